# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run our tests and upstream's, and add the two up; scripts/test calls this.

Arguments go to pytest. Paths choose: one of ours, one of upstream's (as it is
called in upstream's tree), or both. A whole run of ours has two workers.
`--base V` runs the fork of another release.
"""

import argparse
import ctypes
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import FrameType

import interrupts
from stack.errors import StackError, told

ROOT = Path(__file__).resolve().parent.parent
SELECTION = ROOT / "tests" / "upstream" / "selection.toml"

# pytest's options whose value, given apart, must not be taken for a path.
VALUED = ("-k", "-m", "-p", "-o", "-c", "-W", "-r", "-n", "--deselect", "--ignore")
FLAGS = ("-v", "-q", "-l", "-s")

ENGINES = "tests/e2e"
# By file, so that what a module sets up (an engine, say) is set up once; in their
# order, as files of few tests, which would come last, are among the longest.
WORKERS = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1

# pytest's exit codes for "all passed" and "nothing was selected".
PASSED, NOTHING_RAN = 0, 5


@dataclass
class Arguments:
    options: list[str] = field(default_factory=list)
    ours: list[str] = field(default_factory=list)
    upstream: list[str] = field(default_factory=list)

    @property
    def any_path(self) -> bool:
        return bool(self.ours or self.upstream)

    @property
    def max_failures(self) -> float:
        """As pytest will understand -x, which may be one of several letters."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--maxfail", type=int, default=0)
        parser.add_argument(
            "-x", "--exitfirst", dest="maxfail", action="store_const", const=1
        )
        for flag in FLAGS:
            parser.add_argument(flag, action="count")
        for option in VALUED:
            parser.add_argument(option, action="append")
        return parser.parse_known_args(self.options)[0].maxfail or math.inf

    def parts(self, device: str) -> list[list[str]]:
        """Our tests, as pytest is to run them: the arguments of each of its runs."""
        if self.ours:
            return [self.ours]
        if self.any_path:
            return []
        if all(
            re.fullmatch("-[vqlx]+|--exitfirst|--maxfail=.*", o) for o in self.options
        ):
            if device == "cpu":
                return [[*WORKERS]]
            # An engine takes most of a GPU's memory.
            return [[*WORKERS, f"--ignore={ENGINES}"], [ENGINES]]
        # To start two workers takes longer than a few tests.
        return [[]]


def sort_arguments(
    argv: list[str], root: Path, upstream: Path, folder: Path
) -> Arguments:
    """Tell pytest's options from paths, which may be relative to the folder."""
    args = Arguments()
    value_follows = after_option = False
    for arg in argv:
        path, colons, name = arg.partition("::")
        here = Path(os.path.normpath(folder / path))
        if here.is_relative_to(root) and not (root / path).exists():
            path = str(here.relative_to(root))
        if value_follows or arg.startswith("-"):
            args.options.append(arg)
        elif (root / path).exists():
            args.ours.append(os.path.relpath(root / path, root) + colons + name)
        elif (upstream / path).exists():
            args.upstream.append(path + colons + name)
        elif after_option:  # the value of an option that VALUED lacks
            args.options.append(arg)
        else:
            raise StackError(f"There is no test {path}, neither ours nor upstream's.")
        value_follows = arg in VALUED and not value_follows
        after_option = arg.startswith("--") and "=" not in arg
    return args


def has_engines(path: str) -> bool:
    chosen, engines = PurePosixPath(path.partition("::")[0]), PurePosixPath(ENGINES)
    return chosen.is_relative_to(engines) or engines.is_relative_to(chosen)


def end_with_parent() -> None:
    """In a pytest that begins: SIGINT, for which pytest ends what its tests have
    started, works (in the background of a shell it is ignored), and comes when the
    parent is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGINT)


@contextmanager
def passing_on_signals(process: subprocess.Popen) -> Iterator[None]:
    """Whatever asks this process to end, it tells the other, and ends after it."""
    asked = []

    def end(number: int, _: FrameType | None) -> None:
        asked.append(number)
        process.send_signal(signal.SIGINT)

    with interrupts.handled_by(end):
        yield
    if asked:
        sys.exit(128 + asked[0])


def pytest(folder: Path, args: list[str], report: Path) -> tuple[int, Counter]:
    """Run pytest in the folder; return its exit code and the outcomes."""
    command = [sys.executable, "-m", "pytest", "-rs", f"--junitxml={report}", *args]
    # In a session of its own: a signal to all of this one, as Ctrl-C or `timeout`
    # sends, would reach it a second time, or as one that it does not tidy up for.
    process = subprocess.Popen(
        command, cwd=folder, start_new_session=True, preexec_fn=end_with_parent
    )
    with passing_on_signals(process):
        code = process.wait()
    if code in (PASSED, 1, NOTHING_RAN) and report.exists():
        return code, outcomes(report)
    if code == PASSED:  # told something, such as its version
        return code, Counter()
    # Stopped on the way: usage, an internal error, a signal.
    return code, Counter(failed=1)


def outcomes(report: Path) -> Counter:
    counts: Counter = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        tags = {child.tag for child in case}
        if tags & {"failure", "error"}:
            counts["failed"] += 1
        elif "skipped" in tags:
            counts["skipped"] += 1
        else:
            counts["passed"] += 1
    return counts


def run(argv: list[str], folder: Path, scratch: Path) -> int:
    # Not at the top: it takes a while, in which Ctrl-C must not be a traceback.
    from stack import base_tree, fetch, target, upstream_tests

    version, argv = base_tree.split_option(argv)
    tree = base_tree.make(ROOT, version)
    tree.use()
    base = tree.base
    upstream = upstream_tests.unpacked(
        base,
        fetch.fetch(base.sdist),
        ROOT / "build" / "upstream-tests" / base.version,
    )
    selection = tomllib.loads(SELECTION.read_text())
    args = sort_arguments(argv, ROOT, upstream, folder)
    files = selection["files"]
    # Upstream's tests of its own arena, whose place ours takes.
    left_out = ["-k", "not arena"] if base.replaces else []
    if not tree.is_complete and any(map(has_engines, args.ours)):
        raise StackError(
            f"{ENGINES} starts engines, for which vLLM {base.version}, without a CPU "
            "wheel, lacks the compiled parts: choose other tests."
        )
    if not tree.is_complete and not args.any_path:
        print(f"vLLM {base.version} has no CPU wheel: only the queue's tests run.")
        args.ours = selection["queue"]["ours"]
        files = selection["queue"]["upstream"]
        args.upstream = files

    total: Counter = Counter()
    codes = []
    for number, part in enumerate(args.parts(target.detect().device)):
        if total["failed"] < args.max_failures:
            report = scratch / f"ours{number}.xml"
            code, counts = pytest(ROOT, [*args.options, *part], report)
            codes.append(code)
            total += counts
    if (args.upstream or not args.any_path) and total["failed"] < args.max_failures:
        print(
            f"\nUpstream's tests of vLLM {base.version}, against the fork:", flush=True
        )
        left_out += [f"--deselect={test}" for test in selection["deselected"]]
        code, counts = pytest(
            upstream,
            [*left_out, *args.options, *(args.upstream or files)],
            scratch / "upstream.xml",
        )
        codes.append(code)
        total += counts
        for test, reason in selection["deselected"].items():
            print(f"Left out: {test}: {reason}")

    failed = total["failed"] or any(c not in (PASSED, NOTHING_RAN) for c in codes)
    nothing_ran = all(code == NOTHING_RAN for code in codes)
    if nothing_ran:
        print("Nothing ran: no test fits the arguments.")
    print(
        f"{total['passed']} passed, {total['failed']} failed, "
        f"{total['skipped']} skipped"
    )
    return 1 if failed or nothing_ran else 0


def _main() -> int:
    folder = Path.cwd()
    # Where pytest looks for the overlay's neighbours, the fork must be found,
    # and not what lies in the current folder.
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="vllm-fork-tests-") as scratch:
        return run(sys.argv[1:], folder, Path(scratch))


def main() -> int:
    return told(_main)


if __name__ == "__main__":
    sys.exit(main())
