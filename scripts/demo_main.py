# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What scripts/demo runs: the demo, and what a signal does to it."""

import sys

from demo_lib import interrupts


def main() -> int:
    """Run the demo; the exit status is 0 only if all went as it should."""
    interrupts.install()
    try:
        # Takes seconds, in which a Ctrl-C must not be a traceback.
        from demo_lib import show

        return show.main()
    except interrupts.Interrupted as interrupt:
        print(f"demo: stopped by {interrupt}, nothing is left.", file=sys.stderr)
        return interrupt.exit_status


if __name__ == "__main__":
    sys.exit(main())
