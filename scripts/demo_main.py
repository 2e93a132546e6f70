# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What scripts/demo runs: the demo, and what a signal does to it."""

import sys
from pathlib import Path

import interrupts

BASE_OPTION = "--base"


def use_base() -> None:
    """Take `--base V` from the arguments, and let vLLM be that base's fork."""
    if not any(arg.startswith(BASE_OPTION) for arg in sys.argv[1:]):
        return
    # Not installed where the demo is all that was asked for.
    from stack import base_tree
    from stack.errors import StackError, sentence

    try:
        version, sys.argv[1:] = base_tree.split_option(sys.argv[1:])
        tree = base_tree.make(Path(__file__).resolve().parents[1], version)
        if not tree.is_complete:
            raise StackError(f"vLLM {version} has no CPU wheel, which the demo needs.")
    except (StackError, OSError) as e:
        raise SystemExit(f"error: {sentence(e)}") from None
    tree.use()


def main() -> int:
    """Run the demo; the exit status is 0 only if all went as it should."""
    with interrupts.installed():
        try:
            use_base()
            # Takes seconds, in which a Ctrl-C must not be a traceback.
            from demo_lib import show

            return show.main()
        except interrupts.Interrupted as interrupt:
            print(f"demo: stopped by {interrupt}, nothing is left.", file=sys.stderr)
            return interrupt.exit_status


if __name__ == "__main__":
    sys.exit(main())
