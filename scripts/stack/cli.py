# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The command line of scripts/fork."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from . import (
    checkout,
    editable,
    fetch,
    lint,
    lock,
    pins,
    pullrequest,
    rebase,
    series,
    status,
    target,
    verify,
    wheel_diff,
)
from .errors import StackError, told
from .fork import Fork
from .overlay import Overlay


def main(root: Path, argv: list[str]) -> int:
    return told(lambda: _run(root, argv))


Verb = Callable[[Path, argparse.Namespace], int]


def _run(root: Path, argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/fork",
        description="Carry the fork's patch stack; docs/carrying.md shows how.",
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def add(name: str, run: Verb, help: str, base: str | None = None):
        verb = verbs.add_parser(name, help=help, description=help[0].upper() + help[1:])
        verb.set_defaults(run=run)
        if base:
            verb.add_argument("--base", metavar="V", help=f"default: {base}")
        return verb

    default = pins.load_base(root).version
    add("status", _status, "say which bases and patches there are, and what drifted")
    apply = add(
        "apply", _apply, "make a git checkout of a base, each patch a commit", default
    )
    edit = add(
        "edit", _edit, "stop git at a patch's commit, for it to be amended", default
    )
    edit.add_argument("patch", metavar="PATCH", help="the patch's file name")
    export = add(
        "export",
        _export,
        "write a checkout's commits as the base's patches",
        "the checkout's",
    )
    export.add_argument(
        "--force",
        action="store_true",
        help="overwrite what changed in the repository since `apply`",
    )
    for verb in (apply, edit, export):
        verb.add_argument(
            "folder",
            metavar="DIR",
            nargs="?",
            type=Path,
            help="the checkout; default: build/stack-V",
        )
    rebase = add("rebase", _rebase, "carry the stack to another release", default)
    way = rebase.add_mutually_exclusive_group(required=True)
    way.add_argument("--to", metavar="V", help="the release")
    way.add_argument(
        "--continue",
        action="store_true",
        dest="resume",
        help="go on after a conflict was solved or a problem mended",
    )
    way.add_argument("--abort", action="store_true", help="give it up")
    add("lint", _lint, "check the form of the patches", "every base")
    add("verify", _verify, "prove that the stacks hold, from the sdists", "every base")
    pr = add("pr", _pr, "write the series as upstream would take it", default)
    pr.add_argument(
        "folder", metavar="DIR", nargs="?", type=Path, help="default: build/pr-V"
    )
    pr.add_argument(
        "--context",
        metavar="LINES",
        type=_lines,
        default=pullrequest.WHOLE_FILES,
        help="lines to show around a change; default: the whole file",
    )
    pr.add_argument(
        "--no-tests", action="store_true", help="do not run the series' tests"
    )
    diff = add(
        "wheel-diff",
        _wheel_diff,
        "list what a built wheel has that the base's has not",
        default,
    )
    diff.add_argument("wheel", metavar="WHEEL", type=Path, help="a wheel of the fork")
    add("sync", _sync, "bring an editable installation up to date with the patches")

    args = parser.parse_args(argv)
    if args.run in (_apply, _edit, _export, _rebase, _sync):
        with _alone(root):
            return args.run(root, args)
    return args.run(root, args)


def _lines(text: str) -> int:
    # Without a line of context git does not apply what it has written.
    if (number := int(text)) < 1:
        raise ValueError
    return number


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Wait for the others that write."""
    with lock.alone(root / "patches", "another scripts/fork"):
        checkout.clean(root / "patches")
        yield


def _status(root: Path, args: argparse.Namespace) -> int:
    for line in status.lines(root):
        print(line, flush=True)
    return 0


def _apply(root: Path, args: argparse.Namespace) -> int:
    base = pins.load_base(root, args.base)
    folder = _new_checkout(root, base, args)
    print(
        f"{folder}: vLLM {base.version} with {len(series.load(base.patches))} patches."
    )
    return 0


def _new_checkout(root: Path, base: pins.Base, args: argparse.Namespace) -> Path:
    folder = args.folder or checkout.default_folder(root, base)
    sdist = fetch.fetch(base.sdist)
    checkout.remove_if_untouched(folder)
    checkout.create(base, sdist, folder, Overlay.load(root))
    return folder


def _edit(root: Path, args: argparse.Namespace) -> int:
    base = pins.load_base(root, args.base)
    names = [patch.name for patch in series.load(base.patches)]
    given = Path(args.patch)
    name = given.name
    if given.parent.name not in ("", base.version):
        raise StackError(
            f"{given} is no patch of {base.version}: --base {given.parent.name} edits "
            "those of that base."
        )
    if name not in names:
        raise StackError(
            f"{name} is no patch of {base.version}; there are: {', '.join(names)}."
        )
    folder = _new_checkout(root, base, args)
    checkout.edit(folder, name)
    print(
        f"{folder} is at {name}. Change it there, then:\n"
        f"  git -C {folder} commit --all --amend\n"
        f"  git -C {folder} rebase --continue\n"
        f"  scripts/fork export {folder}"
    )
    return 0


def _export(root: Path, args: argparse.Namespace) -> int:
    folder = args.folder or checkout.default_folder(
        root, pins.load_base(root, args.base)
    )
    version = args.base
    if version is None:
        version = checkout.opened(folder).get("config", checkout.BASE_KEY)
    base = pins.load_base(root, version)
    exported = checkout.export(base, folder, Overlay.load(root), args.force)
    for name in exported.patches:
        print(name)
    for path, copy in exported.removed.items():
        print(f"removed {path}; a copy is kept in {copy}")
    return 0


def _rebase(root: Path, args: argparse.Namespace) -> int:
    if args.abort:
        written = rebase.abort(root)
        print(
            f"Given up; not committed: {', '.join(written)}."
            if written
            else "Given up; nothing has changed."
        )
        return 0
    if args.resume:
        git = rebase.resume(root)
    else:
        git = rebase.start(root, pins.load_base(root, args.base), args.to)
    state = rebase.advance(root, git)
    version = state.target.version
    for name in state.dropped:
        print(f"{name} changes nothing in vLLM {version} and is left out.")
    problems = rebase.finish(root, git, lambda base: verify.problems(root, base))
    if problems:
        print("\n".join(problems))
        raise StackError(
            f"the stack on vLLM {version} does not hold. Mend it by commits in "
            f"{git.folder}, then `scripts/fork rebase --continue`; "
            "`scripts/fork rebase --abort` gives up."
        )
    print(f"patches/{version} holds the stack for vLLM {version}, verified.")
    return 0


def _bases(root: Path, version: str | None) -> list[pins.Base]:
    return [
        pins.load_base(root, v)
        for v in ([version] if version is not None else pins.versions(root))
    ]


def _lint(root: Path, args: argparse.Namespace) -> int:
    problems = lint.overlay_problems(root)
    for base in _bases(root, args.base):
        problems += lint.problems(base.patches)
    print("\n".join(problems) or "The patches are in order.")
    return 1 if problems else 0


def _verify(root: Path, args: argparse.Namespace) -> int:
    failed = False
    for base in _bases(root, args.base):
        problems = verify.problems(root, base)
        holds = f"vLLM {base.version}: {len(series.load(base.patches))} patches hold."
        print("\n".join(problems) or holds, flush=True)
        failed |= bool(problems)
    return 1 if failed else 0


def _pr(root: Path, args: argparse.Namespace) -> int:
    base = pins.load_base(root, args.base)
    folder = args.folder or root / "build" / f"pr-{base.version}"
    problems = pullrequest.create(
        base,
        fetch.fetch(base.sdist),
        folder,
        Overlay.load(root),
        pullrequest.Identity.of_user(root),
        run_tests=not args.no_tests,
        context=args.context,
    )
    for mail in sorted(folder.iterdir()):
        print(mail)
    if problems:
        print("\n".join(problems))
        raise StackError("upstream's checks or the tests do not pass.")
    return 0


def _wheel_diff(root: Path, args: argparse.Namespace) -> int:
    if not args.wheel.is_file():
        raise StackError(f"There is no wheel {args.wheel}; `pip wheel .` makes one.")
    base = pins.load_base(root, args.base)
    fork = Fork.load(root, base, wheel_diff.target_of(args.wheel))
    found = wheel_diff.compare(fork, fetch.fetch(fork.distribution), args.wheel)
    for difference in found:
        print(difference)
    unintended = [d for d in found if d.why is None]
    if unintended:
        raise StackError(
            f"{len(unintended)} differences from {fork.distribution.file} are not "
            "what the patches and the overlay account for."
        )
    return 0


def _sync(root: Path, args: argparse.Namespace) -> int:
    fork = Fork.load(root, pins.load_base(root), target.detect())
    editable.sync(fork, fetch.fetch(fork.distribution), editable.tree_path(root))
    return 0
