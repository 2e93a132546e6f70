# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The stack as a git checkout that one can edit, and back."""

import ctypes
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path, PurePosixPath

import interrupts

from . import patchform, series
from .errors import StackError
from .git import Git
from .overlay import Overlay
from .pins import Base
from .sdist import members
from .series import Patch

# The commit that the patches stand on, and the last one when the checkout was
# made or exported.
BASE_TAG = "fork-base"
APPLIED_TAG = "fork-applied"

# In the checkout's git configuration: the base's version, and the hash of the
# series that the checkout was made of.
BASE_KEY = "fork.base"
STACK_KEY = "fork.stack"

# The branch that holds the stack; what else is checked out is not exported.
BRANCH = "stack"

# What a base's folder of patches is called while it is written, and the one that it
# takes the place of.
DRAFT, FORMER = ".new", ".old"

# How a file of ours ends, hidden beside the one that it takes the place of.
FILE_DRAFT = ".fork-new"

# How the folders begin in which something is made or removed.
SCRATCH = ".fork-"

# What tools leave behind in a checkout, and nobody misses.
CACHES = {"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache"}

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


def default_folder(root: Path, base: Base) -> Path:
    return root / "build" / f"stack-{base.version}"


def create(
    base: Base,
    sdist: Path,
    folder: Path,
    overlay: Overlay,
    wanted: Callable[[str], bool] = lambda path: True,
) -> int:
    """Make the folder a checkout of the base with each patch a commit.

    The overlay's files are in the commits of the patches they belong to.

    Args:
        base: The base.
        sdist: Its source distribution.
        folder: A new or an empty folder.
        overlay: Our own files.
        wanted: Tells which of the base's files are to be in it.

    Returns:
        The number of patches.

    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StackError(f"{folder} is in the way: name a new or an empty folder.")
    patches = series.load(base.patches)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch(folder.parent) as draft:
        git = Git(draft / "tree")
        git.folder.mkdir()
        git("init", "--quiet", f"--initial-branch={BRANCH}")
        import_base(git, base, sdist, BRANCH, wanted)
        git("reset", "--quiet", "--hard")
        # git am takes hunks at other lines than they say; this does not.
        series.apply(patches, lambda path: _read(git.folder / path))
        git("tag", BASE_TAG)
        add_patches(git, patches, overlay)
        git("tag", APPLIED_TAG)
        git("config", BASE_KEY, base.version)
        # The user's git, in here, has to write the lines as they are, too.
        git("config", "core.autocrlf", "false")
        git("config", STACK_KEY, series.stack_hash(patches))
        # Fails where another run has put something there meanwhile.
        git.folder.rename(folder)
    return len(patches)


def import_base(
    git: Git,
    base: Base,
    sdist: Path,
    branch: str,
    wanted: Callable[[str], bool] = lambda path: True,
) -> None:
    """Commit the sdist's wanted files to the branch, leaving the folder alone.

    Straight from the archive into one pack: thousands of small files are slow to
    write, and here they would be written twice.
    """
    stream = io.BytesIO()
    message = f"vLLM {base.version}\n".encode()
    when = datetime.fromisoformat(TOOL["GIT_COMMITTER_DATE"]).timestamp()
    who = f"{TOOL['GIT_COMMITTER_NAME']} <{TOOL['GIT_COMMITTER_EMAIL']}>"
    stream.write(f"commit refs/heads/{branch}\n".encode())
    stream.write(f"committer {who} {when:.0f} +0000\n".encode())
    stream.write(b"data %d\n%s" % (len(message), message))
    for name, member, data in members(sdist, wanted):
        mode = "100755" if member.mode & 0o111 else "100644"
        if member.issym():
            mode, data = "120000", member.linkname.encode()
        quoted = name.replace("\\", "\\\\").replace('"', '\\"')
        stream.write(f'M {mode} inline "{quoted}"\n'.encode())
        stream.write(b"data %d\n%s\n" % (len(data), data))
    git("fast-import", "--quiet", stdin=stream.getvalue())


def add_patches(git: Git, patches: Iterable[Patch], overlay: Overlay) -> None:
    """Add a commit for each patch, with the overlay's files that belong to it."""
    for patch in patches:
        git(
            "am",
            "--quiet",
            "--keep-non-patch",
            "--no-scissors",
            "--whitespace=nowarn",
            "--committer-date-is-author-date",
            stdin=patch.text.encode(),
            env=TOOL,
        )
        files = overlay.files(patch.name)
        for name, source in files.items():
            path = git.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)
        if files:
            git("add", "--force", "--", *files)
            git(
                *("commit", "--quiet", "--amend", "--no-edit", "--allow-empty"),
                "--cleanup=verbatim",
                env={k: v for k, v in TOOL.items() if "COMMITTER" in k},
            )


@dataclass(frozen=True)
class Exported:
    patches: list[str]
    """The names of the patch files, in order."""
    removed: dict[str, Path]
    """The repository's files that are gone: patches, and files of the overlay; with
    the copy that is kept of each."""


def export(base: Base, folder: Path, overlay: Overlay, force: bool = False) -> Exported:
    """Write the checkout's commits after the base as the base's patches.

    The overlay's files that were changed in the checkout are written back, too.

    Args:
        base: The base.
        folder: The checkout.
        overlay: Our own files.
        force: Overwrite what has changed in the repository since `create`.

    """
    git = opened(folder)
    if git.get("config", BASE_KEY) != base.version:
        raise StackError(
            f"{folder} is a checkout of vLLM {git.get('config', BASE_KEY)}, not of "
            f"{base.version}."
        )
    require_branch(git)
    if git("status", "--porcelain", "--untracked-files=no"):
        raise StackError(f"{folder} has changes that are not committed.")
    patches = patches_of(git, BASE_TAG, overlay)
    _require_same_again(git, patches, overlay)
    files = _changed_overlay(git, overlay)
    if not force:
        _refuse_to_overwrite(git, base, patches, files, overlay.root)
    # What a patch has brought so far, and the overlay now owns, is in no file yet.
    for path in series.touched(series.load(base.patches)):
        if overlay.owner(path) and not (overlay.root / path).exists():
            files.setdefault(path, git.blob("HEAD", path))
    removed = [
        f"patches/{base.version}/{path.name}"
        for path in sorted(base.patches.glob("*.patch"))
        if path.name not in patches
    ]
    removed += [
        path
        for path, data in files.items()
        if data is None and (overlay.root / path).exists()
    ]
    with _drafts(overlay.root, files) as put_in_place:
        kept = {path: keep(overlay.root, path) for path in removed}
        with interrupts.deferred():
            # First: what moves from a patch to the overlay must be in one of the two.
            put_in_place()
            replace_patches(base.patches, patches, series.source(base.patches))
            git("tag", "--force", APPLIED_TAG)
            git("config", STACK_KEY, series.stack_hash(series.load(base.patches)))
    return Exported(list(patches), kept)


@contextmanager
def _drafts(root: Path, files: dict[str, bytes | None]) -> Iterator[Callable[[], None]]:
    """Give a function that makes the files hold the data, or not exist.

    All that may fail of it is done before: then nothing has changed.
    """
    drafts: dict[Path, Path] = {}
    try:
        for path, data in files.items():
            file = root / path
            if file.is_dir():
                raise StackError(f"{file} is a folder where a file of ours belongs.")
            if data is not None and _read(file) != data:
                file.parent.mkdir(parents=True, exist_ok=True)
                drafts[file] = file.with_name(f".{file.name}{FILE_DRAFT}")
                drafts[file].write_bytes(data)

        def put_in_place() -> None:
            for file, draft in drafts.items():
                draft.replace(file)
            for path, data in files.items():
                if data is None:
                    (root / path).unlink(missing_ok=True)

        yield put_in_place
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)


def keep(root: Path, path: str) -> Path:
    """Copy a file that is about to go: it may be in no commit of the repository.

    To git a commit dropped on purpose and one that a `reset` lost look the same.
    """
    data = (root / path).read_bytes()
    first = root / "build" / "removed" / path
    copy, number = first, 0
    # What was removed before may be another one of the same name.
    while copy.exists() and _read(copy) != data:
        number += 1
        copy = first.with_name(f"{first.name}.{number}")
    write(copy, data)
    return copy


def require_branch(git: Git) -> None:
    """Refuse to take for the stack what lacks its later commits."""
    branch = git.get("symbolic-ref", "--quiet", "--short", "HEAD")
    if branch != BRANCH:
        found = f"on the branch {branch}" if branch else "at a commit of its own"
        raise StackError(
            f"{git.folder} is {found}, not on the branch {BRANCH}, which is what is "
            f"exported: `git checkout {BRANCH}` there first (or `git checkout -B "
            f"{BRANCH}`, if what is there is to be the stack)."
        )


def remove_if_untouched(folder: Path) -> None:
    """Remove a checkout that holds nothing but what `create` or `export` left.

    Raises:
        StackError: If there is such a checkout, and it holds more.

    """
    if not (folder / ".git").is_dir():
        return
    if holds := work(opened(folder)):
        raise StackError(
            f"{folder} {holds}, which a checkout made anew would lose: export that, "
            "or remove the folder, or name another one."
        )
    shutil.rmtree(folder)


def work(git: Git) -> str | None:
    """Say what a checkout holds that is nowhere else; None if nothing."""
    if git("stash", "list"):
        return "has a stash"
    # On any branch: git would lose them all with the folder.
    if git("rev-list", "--max-count=1", "--all", "--not", APPLIED_TAG):
        return "has commits that are not exported"
    if git.get("rev-parse", BRANCH) != git.get("rev-parse", f"{APPLIED_TAG}^0"):
        return "has dropped commits and not exported that"
    for line in git("status", "--porcelain", "-z", "--ignored").split("\0"):
        state, path = line[:2], PurePosixPath(line[3:])
        if state.strip() and CACHES.isdisjoint(path.parts):
            kept = {"??": "untracked", "!!": "ignored"}.get(state)
            return (
                f"has the {kept} file {path}"
                if kept
                else "has changes that are not committed"
            )
    return None


def edit(folder: Path, patch: str) -> None:
    """Stop git at the patch's commit in the checkout, for it to be amended."""
    git = opened(folder)
    commits = git("rev-list", "--reverse", f"{BASE_TAG}..HEAD").split()
    for commit in commits:
        subject = git("log", "-1", "--format=%s", commit).strip()
        if patchform.file_name(subject) == patch:
            # The todo list begins with this commit.
            editor = "sed -i -e '1s/^pick/edit/'"
            git(
                *("rebase", "--quiet", "--interactive", f"{commit}^"),
                env=TOOL | {"GIT_SEQUENCE_EDITOR": editor},
            )
            return
    raise StackError(f"{folder} has no commit of {patch}.")


def opened(folder: Path) -> Git:
    """Return git for a checkout of ours in which no operation is under way."""
    git = Git(folder)
    if not (folder / ".git").is_dir():
        raise StackError(f"{folder} is no checkout that `apply` made.")
    for tag in (BASE_TAG, APPLIED_TAG):
        if git("tag", "--list", tag) == "":
            raise StackError(f"{folder} has no tag {tag}, which `apply` gives it.")
    if under_way := git.operation():
        raise StackError(
            f"A git {under_way} is under way in {folder}: finish it there with "
            f"`git {under_way} --continue`, or undo it with `--abort`."
        )
    return git


def patches_of(git: Git, start: str, overlay: Overlay) -> dict[str, str]:
    """Return the commits from start on as canonical patches, by file name.

    What the overlay owns is left out of them.
    """
    stack = f"{start}..HEAD"
    if git("rev-list", "--merges", stack):
        raise StackError(f"{git.folder} has a merge commit, which is no patch.")
    patches: dict[str, str] = {}
    for commit in git("rev-list", "--reverse", stack).split():
        # Only what the commit touches: git is slow with many patterns.
        paths = git.changed_paths(commit)
        ours = [path for path in paths if overlay.owner(path)]
        only = ["--", ".", *(f":(exclude,literal){p}" for p in ours)] if ours else []
        # A range: -1 would go back to a commit that the paths leave in.
        what = f"The commit {git.get('log', '-1', '--format=%h (%s)', commit)} in"
        what += f" {git.folder}"
        subject, body = git("log", "-1", "--format=%s%x00%b", commit).split("\0")
        if problem := patchform.message_problem(subject, body):
            raise StackError(f"{what} {problem}.")
        try:
            text = git.raw(*FORMAT_PATCH, f"{commit}^..{commit}", *only).decode()
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text or "\nGIT binary patch\n" in text:
            raise StackError(f"{what} changes what is no text in UTF-8.")
        text = patchform.without_index_lines(text)
        if not text:
            raise StackError(
                f"{what} changes none of upstream's files: make it part of the one "
                "that its files belong to."
            )
        _, _, diff = text.partition("\ndiff --git ")
        if patchform.has_modes(diff):
            raise StackError(f"{what} {patchform.MODES}.")
        if patchform.has_markers(diff):
            raise StackError(f"{what} has the markers of a conflict.")
        name = patchform.file_name(patchform.headers(text)["subject"])
        if name in patches:
            raise StackError(
                f"Two commits of {git.folder} would both be {name}: give one another "
                "subject."
            )
        patches[name] = text
    return patches


def _require_same_again(git: Git, patches: dict[str, str], overlay: Overlay) -> None:
    """Refuse what the patches do not give again: lines, files, authors, messages."""
    parsed = [Patch(name, text) for name, text in patches.items()]
    edits = series.apply(parsed, partial(git.blob, BASE_TAG))
    changed = git("diff", "--name-only", "--no-renames", "-z", BASE_TAG, "HEAD")
    theirs = [path for path in changed.split("\0") if path and not overlay.owner(path)]
    for path in sorted({*theirs, *edits}):
        if path not in edits or edits[path] != git.blob("HEAD", path):
            raise StackError(
                f"The patches would not give {path} as it is in {git.folder}: they "
                "cannot hold its name, or a change of it."
            )
    with scratch(git.folder / ".git") as folder:
        again = Git(folder)
        again("init", "--quiet", f"--initial-branch={BRANCH}")
        for path in edits:
            write(folder / path, git.blob(BASE_TAG, path))
        again("add", "--all", "--force")
        again("commit", "--quiet", "--allow-empty", "--message=base", env=TOOL)
        again("tag", BASE_TAG)
        add_patches(again, parsed, Overlay(folder, {}))
        given = patches_of(again, BASE_TAG, Overlay(folder, {}))
    for name, text in patches.items():
        if given.get(name) != text:
            raise StackError(
                f"{name} would not give its commit again: git am reads the author, the "
                "message or a line of it otherwise (a carriage return, say)."
            )


def _changed_overlay(git: Git, overlay: Overlay) -> dict[str, bytes | None]:
    """Return the overlay's files that differ from what `create` put there."""
    changed = git("diff", "--name-only", "--no-renames", "-z", APPLIED_TAG, "HEAD")
    paths = [path for path in changed.split("\0") if path and overlay.owner(path)]
    entries = git("ls-tree", "-z", "HEAD", "--", *paths) if paths else ""
    for entry in entries.split("\0"):
        if entry and not entry.startswith("100644 "):
            path = entry.partition("\t")[2]
            raise StackError(f"{git.folder / path} {patchform.MODES}.")
    # Not from the folder, which may lack what is committed (a sparse checkout).
    return {path: git.blob("HEAD", path) for path in paths}


def _refuse_to_overwrite(
    git: Git,
    base: Base,
    patches: dict[str, str],
    files: dict[str, bytes | None],
    root: Path,
) -> None:
    current = series.load(base.patches)
    lost = []
    if series.stack_hash(current) != git.get("config", STACK_KEY) and patches != {
        patch.name: patch.text for patch in current
    }:
        lost.append(f"patches/{base.version}")
    for path, data in files.items():
        now = _read(root / path)
        if now != data and now != git.blob(APPLIED_TAG, path):
            lost.append(path)
    if lost:
        raise StackError(
            f"{', '.join(lost)} changed in the repository after {git.folder} was made; "
            "exporting would overwrite that. Make a checkout anew, or export with "
            "--force and look at `git diff`."
        )


def replace_patches(
    folder: Path, patches: dict[str, str], source: series.Source | None
) -> None:
    """Make the folder hold these patches, as its series, and no others.

    All at once: a mixture of old and new patches could pass every check.
    """
    draft = folder.with_name(f".{folder.name}{DRAFT}")
    listing = series.listing(patches, source, folder)
    if folder.is_symlink():
        raise StackError(f"{folder} is a link; only a folder can be replaced at once.")
    if folder.exists() and not os.access(folder, os.W_OK):
        raise StackError(f"{folder} cannot be written to.")
    draft.mkdir(parents=True)
    try:
        for path in folder.iterdir() if folder.exists() else ():
            if path.is_dir():
                shutil.copytree(path, draft / path.name, symlinks=True)
            elif path.suffix != ".patch":
                shutil.copy2(path, draft / path.name, follow_symlinks=False)
        for name, text in patches.items():
            (draft / name).write_bytes(text.encode())
        (draft / "series").write_bytes(listing.encode())
        if folder.exists():
            _exchange(draft, folder)
        else:
            draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A folder in this one that is removed at the end, or after a kill by `clean`."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=SCRATCH) as name:
        yield Path(name)


def clean(patches: Path) -> None:
    """Undo what a run that was killed has begun; no other must be at work."""
    root = patches.parent
    for left in (root / "build").glob(f"{SCRATCH}*"):
        _remove(left)
    for top in Overlay.load(root).folders():
        for draft in top.rglob(f".*{FILE_DRAFT}"):
            draft.unlink()
    for former in patches.glob(f".*{FORMER}"):
        folder = former.with_name(former.name[1:].removesuffix(FORMER))
        if not folder.exists():
            former.rename(folder)
    for draft in [*patches.glob(f".*{DRAFT}"), *patches.glob(f".*{FORMER}")]:
        _remove(draft)


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _exchange(one: Path, other: Path) -> None:
    """Let two folders change their names."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename and not rename(
        here, os.fsencode(one.absolute()), here, os.fsencode(other.absolute()), exchange
    ):
        return
    _exchange_by_steps(one, other)


def _exchange_by_steps(one: Path, other: Path) -> None:
    # Where the C library or the file system cannot; `clean` mends it after a kill.
    between = other.with_name(f".{other.name}{FORMER}")
    other.rename(between)
    one.rename(other)
    between.rename(one)


def write(path: Path, data: bytes | None) -> None:
    """Make the file hold the data, or not exist. It is never half-written."""
    if data is None:
        path.unlink(missing_ok=True)
    elif _read(path) != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".new")
        draft.write_bytes(data)
        draft.replace(path)


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
