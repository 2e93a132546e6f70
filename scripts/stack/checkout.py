# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stack as a git checkout that one can edit, and back."""

import shutil
import tarfile
import tempfile
from pathlib import Path

from . import patchform, series
from .errors import StackError
from .git import Git
from .pins import Base

# The commit that the patches stand on.
BASE_TAG = "fork-base"

# Where nobody's name belongs: commits that the tool makes.
TOOL = {
    "GIT_AUTHOR_NAME": "vLLM fork",
    "GIT_AUTHOR_EMAIL": "fork@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "vLLM fork",
    "GIT_COMMITTER_EMAIL": "fork@localhost",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
}

FORMAT_PATCH = (
    "format-patch",
    "--stdout",
    "--zero-commit",
    "--no-signature",
    "--no-numbered",
    "--stat=72",
    "--summary",
    "--patch",
    "--subject-prefix=PATCH",
    "--no-attach",
    "--no-thread",
    "--no-to",
    "--no-cc",
    "--no-add-header",
    "--no-base",
    "--no-notes",
    "--no-encode-email-headers",
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--no-renames",
    "--no-relative",
    "--no-indent-heuristic",
    "--diff-algorithm=myers",
    "--unified=3",
    "--inter-hunk-context=0",
    "--src-prefix=a/",
    "--dst-prefix=b/",
)


def create(base: Base, sdist: Path, folder: Path) -> int:
    """Make the folder a checkout of the base with each patch a commit.

    Returns:
        The number of patches.

    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StackError(f"{folder} is in the way: name a new or an empty folder.")
    patches = series.load(base.patches)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        tree = _unpack(sdist, Path(scratch))
        # git am takes hunks at other lines than they say; this does not.
        series.apply(patches, lambda path: _read(tree / path))
        git = Git(tree)
        git("init", "--quiet", "--initial-branch=stack")
        # What upstream's .gitignore names may still be in its sdist.
        git("add", "--all", "--force")
        git("commit", "--quiet", f"--message=vLLM {base.version}", env=TOOL)
        git("tag", BASE_TAG)
        for patch in patches:
            git(
                "am",
                "--quiet",
                "--keep-non-patch",
                "--no-scissors",
                "--whitespace=nowarn",
                "--committer-date-is-author-date",
                stdin=patch.text,
                env=TOOL,
            )
        if folder.exists():
            folder.rmdir()
        shutil.move(tree, folder)
    return len(patches)


def export(base: Base, folder: Path) -> list[str]:
    """Write the checkout's commits after the base as the base's patches.

    Returns:
        The names of the patch files, in order.

    """
    git = Git(folder)
    if not (folder / ".git").is_dir():
        raise StackError(f"{folder} is no checkout that `apply` made.")
    if git("tag", "--list", BASE_TAG) == "":
        raise StackError(f"The checkout {folder} has no tag {BASE_TAG}.")
    if git("status", "--porcelain", "--untracked-files=no"):
        raise StackError(f"{folder} has changes that are not committed.")
    stack = f"{BASE_TAG}..HEAD"
    if git("rev-list", "--merges", stack):
        raise StackError(f"{folder} has a merge commit, which is no patch.")
    patches: dict[str, str] = {}
    for commit in git("rev-list", "--reverse", stack).split():
        text = patchform.without_index_lines(git(*FORMAT_PATCH, "-1", commit))
        name = patchform.file_name(patchform.headers(text)["subject"])
        if name in patches:
            raise StackError(
                f"Two commits of {folder} would both be {name}: give one another "
                "subject."
            )
        patches[name] = text
    _replace(base.patches, patches)
    return list(patches)


def _replace(folder: Path, patches: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in patches.items():
        _write(folder / name, text)
    # The list before the removals: it never names a file that is gone.
    _write(folder / "series", "".join(f"{name}\n" for name in patches))
    for path in folder.glob("*.patch"):
        if path.name not in patches:
            path.unlink()


def _write(path: Path, text: str) -> None:
    if _read(path) != text.encode():
        draft = path.with_name(path.name + ".new")
        draft.write_bytes(text.encode())
        draft.replace(path)


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.iterdir()
    return tree
