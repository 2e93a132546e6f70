# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The command line of scripts/fork."""

import argparse
import sys
from pathlib import Path

from . import checkout, editable, fetch, lint, pins, target
from .errors import StackError
from .fork import Fork


def main(root: Path, argv: list[str]) -> int:
    try:
        return _run(root, argv)
    except (StackError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


def _run(root: Path, argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/fork", description="Carry the fork's patch stack."
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    base = pins.load_base(root)
    checkout_help = f"default: build/stack-{base.version}"

    apply = verbs.add_parser(
        "apply", help="make a git checkout of the base with each patch a commit"
    )
    apply.set_defaults(run=_apply)
    export = verbs.add_parser(
        "export", help="write a checkout's commits as the base's patches"
    )
    export.set_defaults(run=_export)
    for verb in (apply, export):
        verb.add_argument(
            "folder",
            metavar="DIR",
            nargs="?",
            type=Path,
            default=root / "build" / f"stack-{base.version}",
            help=checkout_help,
        )
    verbs.add_parser("lint", help="check the patches' form").set_defaults(run=_lint)
    verbs.add_parser(
        "sync", help="bring an editable installation up to date with the patches"
    ).set_defaults(run=_sync)

    args = parser.parse_args(argv)
    return args.run(root, base, args)


def _apply(root: Path, base: pins.Base, args: argparse.Namespace) -> int:
    count = checkout.create(base, fetch.fetch(base.sdist), args.folder)
    print(f"{args.folder}: vLLM {base.version} with {count} patches.")
    return 0


def _export(root: Path, base: pins.Base, args: argparse.Namespace) -> int:
    for name in checkout.export(base, args.folder):
        print(name)
    return 0


def _lint(root: Path, base: pins.Base, args: argparse.Namespace) -> int:
    problems = lint.problems(base.patches)
    print("\n".join(problems) or "The patches are in order.")
    return 1 if problems else 0


def _sync(root: Path, base: pins.Base, args: argparse.Namespace) -> int:
    fork = Fork.load(root, base, target.detect())
    editable.sync(fork, fetch.fetch(fork.distribution), editable.tree_path(root))
    return 0
