# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The ordered patches of a base: reading and applying them.

A patch applies only where its hunks say, to lines that are byte for byte the
ones it shows. What git and patch(1) tolerate, a hunk that fits some lines
further down, is how a hook ends up in the wrong function.
"""

import hashlib
import io
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from unidiff import Hunk, PatchedFile, PatchSet
from unidiff.constants import LINE_TYPE_NO_NEWLINE
from unidiff.errors import UnidiffParseError

from . import patchform
from .errors import StackError


@dataclass(frozen=True)
class Patch:
    name: str
    text: str

    @property
    def message(self) -> str:
        """What stands before the diff: mail headers and commit message."""
        return self.text[: self._diff_start]

    @property
    def commit_message(self) -> str:
        """The mail headers and the commit message, without git's summary."""
        return self.message.rpartition("\n---\n")[0]

    @cached_property
    def files(self) -> PatchSet:
        # The message stays out: a line of it may look like a diff's. So do
        # blank lines at the end, which unidiff takes for context.
        diff = self.text[self._diff_start :].rstrip("\n") + "\n"
        if self.has_carriage_returns:
            raise StackError(
                f"{self.name} has carriage returns at the ends of its lines (CRLF): "
                "turn them into line feeds."
            )
        if patchform.has_modes(diff):
            raise StackError(f"{self.name} {patchform.MODES}.")
        # unidiff leaves out, without a word, the lines that the header has not.
        if header := _miscounted(diff):
            raise StackError(
                f"{self.name} is not a valid patch: its hunk {header} counts other "
                "lines than follow."
            )
        try:
            return PatchSet(io.StringIO(diff))
        except UnidiffParseError as e:
            raise StackError(f"{self.name} is not a valid patch: {e}.") from e

    @property
    def has_carriage_returns(self) -> bool:
        # A content line may have one, of a file that is so itself.
        return re.search(r"(?m)^diff --git .*\r$", self.text) is not None

    @property
    def _diff_start(self) -> int:
        start = self.text.find("\ndiff --git ")
        return len(self.text) if start < 0 else start + 1


def _miscounted(diff: str) -> str | None:
    """Return a hunk header whose counts are not those of the lines below it."""
    _, *hunks = re.split(r"(?m)^(?=@@ )", diff)
    for hunk in hunks:
        header, _, rest = hunk.partition("\n")
        counts = re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", header)
        lines = rest.partition("\ndiff --git ")[0].removesuffix("\n").split("\n")
        kinds = [line[:1] or " " for line in lines]
        context = kinds.count(" ")
        found = [context + kinds.count("-"), context + kinds.count("+")]
        if counts is None or [int(n or 1) for n in counts.groups()] != found:
            return counts[0] if counts else header
    return None


def load(folder: Path) -> list[Patch]:
    """Read the patches that the folder's series lists, in its order."""
    file = folder / "series"
    try:
        patches = []
        for name in names(file.read_text()):
            file = folder / name
            patches.append(Patch(name, _read(file)))
        return patches
    except OSError as e:
        raise StackError(f"The series in {folder} cannot be read: {e}.") from e
    except UnicodeDecodeError as e:
        raise StackError(f"{file} is no text in UTF-8: {e}.") from e


def names(listing: str) -> list[str]:
    """Return the patches that the content of a file `series` lists."""
    lines = listing.splitlines()
    return [name for line in lines for name in line.partition("#")[0].split()]


def listing(patches: Iterable[str], source: "Source | None", folder: Path) -> str:
    """Return the content of a `series` of these patches.

    Comments of the one that the folder has are kept: above all of it, up to a blank
    line, and above or beside a patch. Those of a patch that is gone go.
    """
    file = folder / "series"
    text = file.read_text(errors="replace") if file.is_file() else ""
    lines = [line for line in text.splitlines() if not _SOURCE.match(line)]
    end = lines.index("") + 1 if "" in lines else 0
    if names("\n".join(lines[:end])):
        end = 0
    top, above = lines[:end], ""
    comments: dict[str, tuple[str, str]] = {}
    for line in lines[end:]:
        named = names(line)
        if not named:
            above += f"{line}\n"
        for name in named:
            _, mark, beside = line.partition("#")
            comments[name] = (above, f"  {mark}{beside}" if mark else "")
            above = ""
    patches = list(patches)
    if len(patches) == len(comments):
        # A new subject is a new name.
        for former, name in zip(list(comments), patches):
            if former not in patches:
                comments.setdefault(name, comments[former])
    result = [f"{line}\n" for line in top]
    for name in patches:
        before, beside = comments.get(name, ("", ""))
        result.append(f"{before}{name}{beside}\n")
    return f"{source or ''}{''.join(result)}{above}"


def touched(patches: Iterable[Patch]) -> set[str]:
    """Return the paths of the files that the patches change."""
    return {file.path for patch in patches for file in patch.files}


def _read(path: Path) -> str:
    # Python would turn CRLF into LF, and a patch of CRLF would then seem to fit.
    return path.read_bytes().decode()


@dataclass(frozen=True)
class Source:
    """The stack that a base's was made of, by a rebase."""

    version: str
    stack_sha256: str

    def __str__(self) -> str:
        return f"# Rebased from {self.version}, stack {self.stack_sha256}\n"


_SOURCE = re.compile(r"(?m)# Rebased from (\S+), stack ([0-9a-f]{64})$")


def source(folder: Path) -> Source | None:
    """Return what the first line of the folder's series says of its origin."""
    path = folder / "series"
    text = path.read_text(errors="replace") if path.is_file() else ""
    match = _SOURCE.match(text)
    return Source(*match.groups()) if match else None


def stack_hash(patches: Iterable[Patch]) -> str:
    digest = hashlib.sha256()
    for patch in patches:
        data = patch.text.encode()
        digest.update(f"{patch.name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def apply(
    patches: Iterable[Patch],
    read: Callable[[str], bytes | None],
    wanted: Callable[[str], bool] = lambda path: True,
) -> dict[str, bytes | None]:
    """Return what the patched files hold afterwards, None for a deleted one.

    Nothing is written, so a patch that fails leaves nothing half-applied.

    Args:
        patches: The series.
        read: Gives a base file's content, None where the base has no such file.
        wanted: Tells which paths take part; edits of others are left out.

    """
    changed: dict[str, bytes | None] = {}
    for patch in patches:
        if not patch.files:
            raise StackError(f"{patch.name} does not apply: it changes no file.")
        for file in patch.files:
            path = file.path
            if not wanted(path):
                continue
            before = changed[path] if path in changed else read(path)
            try:
                changed[path] = _apply_file(file, before)
            except ValueError as e:
                raise StackError(f"{patch.name} does not apply to {path}: {e}.") from e
    return changed


def is_added(file: PatchedFile) -> bool:
    # unidiff takes a file that was empty for one that was not there.
    return file.source_file == "/dev/null"


def is_removed(file: PatchedFile) -> bool:
    return file.target_file == "/dev/null"


def _apply_file(file: PatchedFile, before: bytes | None) -> bytes | None:
    if file.is_rename or file.is_binary_file:
        raise ValueError("renames and binary changes are not supported")
    if is_added(file) != (before is None):
        raise ValueError(
            "the base has no such file"
            if before is None
            else "the base already has a file of this name"
        )
    lines = _lines((before or b"").decode())
    result: list[str] = []
    done = 0
    for hunk in file:
        old, new = _sides(hunk)
        # A hunk that shows no old line names the line it comes after.
        start = hunk.source_start - (1 if old else 0)
        if start < done or lines[start : start + len(old)] != old:
            there = [line.replace("\r", "") for line in lines[start : start + len(old)]]
            but = ", but for carriage returns" if there == old else ""
            raise ValueError(
                f"the lines at {hunk.source_start} are not those that the patch shows"
                f"{but}"
            )
        result += lines[done:start] + new
        done = start + len(old)
        if len(result) != hunk.target_start - (1 if new else 0) + len(new):
            raise ValueError(f"the hunk at {hunk.source_start} is misnumbered")
    result += lines[done:]
    if is_removed(file):
        if result:
            raise ValueError("the file to be deleted has other lines as well")
        return None
    return "".join(result).encode()


def _sides(hunk: Hunk) -> tuple[list[str], list[str]]:
    old: list[str] = []
    new: list[str] = []
    last: tuple[list[str], ...] = ()
    for line in hunk:
        if line.line_type == LINE_TYPE_NO_NEWLINE:
            for side in last:
                side[-1] = side[-1].removesuffix("\n")
            continue
        last = (new,) if line.is_added else (old,) if line.is_removed else (old, new)
        for side in last:
            side.append(line.value)
    return old, new


def _lines(text: str) -> list[str]:
    # Not splitlines(), which also splits at form feeds and the like.
    return list(io.StringIO(text, newline="\n"))
