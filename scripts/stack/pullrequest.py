# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The series as upstream would take it: mails for `git am`, or for a pull request.

Each commit holds our files that belong to it and the sender's sign-off, and lacks
what only matters here. The mails are applied to the base again, and upstream's own
checks, as far as they need no network, run on the result.
"""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from . import checkout, patchform, series
from .errors import StackError
from .git import Git
from .overlay import Overlay
from .pins import Base

# Where upstream's checks are, in its tree, and what they look at.
TOOLS = "tools/pre_commit"
CHECKS = (
    "check_spdx_header.py",
    "check_forbidden_imports.py",
    "check_torch_cuda.py",
    "check_boolean_context_manager.py",
    "check_test_tethering.py",
)
RUFF = (("check",), ("format", "--check"))
WANTED = ("vllm/", "tests/", "docs/", f"{TOOLS}/", ".buildkite/", "pyproject.toml")

# Of our patches' messages; upstream has no use for them.
_OWN_FIELDS = re.compile(
    r"(?m)^(Upstream-Status|Remove-When|Size-Reason): .*\n(?: .*\n)*"
)
TEST_SECONDS = 1800

# Lines around a change: a number that no file has, so that a mail shows all of it.
WHOLE_FILES = 10**6


@dataclass(frozen=True)
class Identity:
    name: str
    email: str

    @classmethod
    def of_user(cls, folder: Path) -> "Identity":
        """Return who the user's git says he is; he signs the mails off."""
        # Not whom git would make up of the machine's names; nor another repository's.
        command = ["git", "-c", "user.useConfigOnly=true", "var", "GIT_COMMITTER_IDENT"]
        elsewhere = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
        env = {k: v for k, v in os.environ.items() if k not in elsewhere}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True)
        try:
            found = re.match(r"(.+) <(.+)> \d+ ", done.stdout.decode())
        except UnicodeDecodeError:
            raise StackError("The name that git has of you is not UTF-8.") from None
        if done.returncode or not found:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise StackError(
                "git does not say who you are, which the sign-off needs: "
                f"{said[-1] if said else 'no name or no address'}. `git config "
                "--global user.name ...` and `user.email` set it."
            )
        return cls(*found.groups())

    @property
    def committer(self) -> dict[str, str]:
        return {"GIT_COMMITTER_NAME": self.name, "GIT_COMMITTER_EMAIL": self.email}


def create(
    base: Base,
    sdist: Path,
    folder: Path,
    overlay: Overlay,
    identity: Identity,
    run_tests: bool,
    context: int = WHOLE_FILES,
) -> list[str]:
    """Write the mails into the folder, the cover letter first.

    Args:
        base: The base.
        sdist: Its source distribution.
        folder: A new or an empty folder.
        overlay: Our own files.
        identity: Who sends them.
        run_tests: Whether to run the tests that they bring.
        context: How many lines around a change they show.

    Returns:
        What upstream's checks object to, and failing tests; empty if all is well.

    """
    # git and the checks run in other folders.
    folder = folder.resolve()
    if folder.exists() and any(folder.iterdir()):
        raise StackError(f"{folder} is in the way: name a new or an empty folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        tree = Path(scratch, "tree")
        checkout.create(
            base, sdist, tree, overlay, lambda path: path.startswith(WANTED)
        )
        git = checkout.opened(tree)
        for commit in git(
            "rev-list", "--reverse", f"{checkout.BASE_TAG}..{checkout.APPLIED_TAG}"
        ).split():
            _as_upstream(git, commit, identity)
        mails = Path(scratch, "mails")
        # For the names of the functions, and not of their classes, beside the hunks.
        (tree / ".git" / "info" / "attributes").write_text("*.py diff=python\n")
        git(
            *("format-patch", "--quiet", "--full-index", f"--unified={context}"),
            *("--numbered", "--cover-letter", f"--output-directory={mails}"),
            *("--signoff", "--no-signature", f"{checkout.BASE_TAG}..pr"),
            env=identity.committer,
        )
        _apply(git, sorted(mails.glob("*.patch"))[1:], identity)
        checks = run_checks(git)
        tests = _tests(git)
        outcome, passed = "Not run.", True
        if run_tests and tests:
            outcome, passed = _run_tests(tree, tests)
        cover = next(mails.glob("0000-*"))
        letter = _cover(cover.read_text(), base, overlay, checks, tests, outcome)
        cover.write_text(letter)
        mails.rename(folder)
    problems = [f"{name}: {said}" for name, said in checks.items() if said]
    return problems if passed else [*problems, f"the tests: {outcome}"]


def _as_upstream(git: Git, commit: str, identity: Identity) -> None:
    """Add the commit, as upstream would have it, to the branch "pr"."""
    message = _OWN_FIELDS.sub("", git("log", "-1", "--format=%B", commit))
    author = git("log", "-1", "--format=%an%n%ae%n%aI", commit).splitlines()
    names = ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_AUTHOR_DATE")
    parent = git.get("rev-parse", "--verify", "--quiet", "refs/heads/pr")
    new = git(
        *("commit-tree", f"{commit}^{{tree}}", "-p", parent or checkout.BASE_TAG),
        stdin=(message.strip() + "\n").encode(),
        env=identity.committer | dict(zip(names, author)),
    ).strip()
    git("update-ref", "refs/heads/pr", new)


def _apply(git: Git, mails: list[Path], identity: Identity) -> None:
    """Apply the mails to the base; what comes out is what went in."""
    git("checkout", "--quiet", "--detach", checkout.BASE_TAG)
    # Without that option git takes "[Core]" for one of its own marks.
    git(
        *("am", "--quiet", "--keep-non-patch", *map(str, mails)),
        env=identity.committer,
    )
    subjects = ("log", "--format=%s")
    if git("diff", "--name-only", "HEAD", "pr") or (
        git(*subjects, "HEAD") != git(*subjects, "pr")
    ):
        raise StackError("The mails do not give what they were made of.")


def run_checks(git: Git) -> dict[str, str]:
    """Return what each of upstream's checks says of the changed files, "" if nothing.

    Each runs as upstream's pre-commit runs it, with its configuration.
    """
    changed = git("diff", "--name-only", checkout.BASE_TAG, "HEAD").split()
    python = [path for path in changed if path.endswith(".py")]
    said = {}
    for args in RUFF:
        files = python
        if args[0] == "format":
            # Upstream's release of ruff formats some of its own files otherwise.
            files = [path for path in python if not _is_unformatted(git, path)]
        said[f"ruff {args[0]}"] = _run(git.folder, "-m", "ruff", *args, *files)
    for check in CHECKS:
        if (git.folder / TOOLS / check).is_file():
            # All of it, for the one that also looks at Buildkite's files.
            files = changed if "tethering" in check else python
            said[check] = _run(git.folder, f"{TOOLS}/{check}", *files)
    return said


def _is_unformatted(git: Git, path: str) -> bool:
    """Whether the base has the file, and not as our ruff formats it."""
    base = git.get("show", f"{checkout.BASE_TAG}:{path}")
    ruff = (sys.executable, "-m", "ruff", "format", "--check", "--stdin-filename", path)
    done = subprocess.run(
        [*ruff, "-"],
        cwd=git.folder,
        input=base + "\n",
        capture_output=True,
        text=True,
    )
    return bool(base) and done.returncode != 0


def _run(folder: Path, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, *args], cwd=folder, capture_output=True, text=True
    )
    if not done.returncode:
        return ""
    said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr).strip()
    return said or f"it failed with {done.returncode}."


def _tests(git: Git) -> list[str]:
    changed = git(
        *("diff", "--name-only", "--diff-filter=AM", checkout.BASE_TAG, "HEAD"), "tests"
    )
    return [p for p in changed.split() if re.search(r"/test_[^/]*\.py$", p)]


def _run_tests(tree: Path, tests: list[str]) -> tuple[str, bool]:
    """Run them on the tree that the mails give.

    Returns:
        pytest's last line, and whether all passed.

    """
    command = [sys.executable, "-m", "pytest", "-q", *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, capture_output=True, text=True, timeout=TEST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"Stopped after {TEST_SECONDS} s.", False
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
    (*_, last) = done.stdout.splitlines() or ["pytest said nothing"]
    return last.strip("= "), done.returncode == 0


def _cover(
    draft: str,
    base: Base,
    overlay: Overlay,
    checks: dict[str, str],
    tests: list[str],
    outcome: str,
) -> str:
    """Fill in git's cover letter, under upstream's headings."""
    subjects = {
        patch.name: patchform.headers(patch.message)["subject"].removeprefix("[PATCH] ")
        for patch in series.load(base.patches)
    }
    # The one that the others are for, wherever it stands.
    main = max(subjects, key=lambda name: len(overlay.files(name)))
    parts = [
        "## Purpose",
        "\n".join(f"- {subject}" for subject in subjects.values()),
        f"Each says why. Made for vLLM {base.version}: `git am -3 --keep-non-patch`.",
        "## Test Plan",
        "\n".join(f"    pytest -v -s {test}" for test in tests),
        "## Test Result",
        outcome,
        "Upstream's checks on the changed files:",
        "\n".join(
            f"- {name}: {'fails' if said else 'passes'}"
            for name, said in checks.items()
        ),
    ]
    filled = draft.replace("*** SUBJECT HERE ***", subjects[main])
    return filled.replace("*** BLURB HERE ***", "\n\n".join(parts))
