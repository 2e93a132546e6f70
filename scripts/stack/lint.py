# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a patch has to be, beyond applying."""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from unidiff import Hunk, PatchedFile
from unidiff.patch import Line

from . import patchform, pins, series
from .errors import StackError
from .overlay import Overlay
from .series import Patch

# A hook is a line or a few; more than this belongs into a module of its own.
MAX_ADDED_LINES = 40

FIELDS = ("Upstream-Status", "Remove-When", "Signed-off-by")


def overlay_problems(root: Path) -> list[str]:
    """Return one sentence for everything wrong with who owns the overlay."""
    patches = series.load(pins.load_base(root).patches)
    return Overlay.load(root).problems([patch.name for patch in patches])


def problems(folder: Path) -> list[str]:
    """Return one sentence for everything that is wrong with the series."""
    patches = series.load(folder)
    names = [patch.name for patch in patches]
    found = [
        f"{folder.name}/{name}: listed twice in the series."
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    found += [
        f"{folder.name}/{path.name}: not listed in the series."
        for path in sorted(folder.glob("*.patch"))
        if path.name not in names
    ]
    for patch in patches:
        where = f"{folder.name}/{patch.name}"
        found += [f"{where}: {problem}" for problem in _problems(patch)]
    return found


def _problems(patch: Patch) -> Iterator[str]:
    if patch.has_carriage_returns:
        yield "has carriage returns at the ends of its lines (CRLF)."
        return
    yield from _form_problems(patch)
    yield from _message_problems(patch)
    try:
        files = patch.files
    except StackError as e:
        yield str(e)
        return
    for file in files:
        if file.added > MAX_ADDED_LINES and not _field(patch, "Size-Reason"):
            yield (
                f"adds {file.added} lines to {file.path}, more than "
                f"{MAX_ADDED_LINES}, and gives no Size-Reason."
            )
        if series.is_added(file):
            yield f"adds {file.path}: a new file belongs to the overlay."
        yield from _position_problems(file)
        for hunk in file:
            yield from _line_problems(file.path, hunk)


def _position_problems(file: PatchedFile) -> Iterator[str]:
    end = shift = 0
    for hunk in file:
        # A side without lines names the line that it comes after.
        old = hunk.source_start - (1 if hunk.source_length else 0)
        new = hunk.target_start - (1 if hunk.target_length else 0)
        if old < end or new != old + shift:
            yield f"the hunk at {hunk.source_start} of {file.path} is misnumbered."
        end = old + hunk.source_length
        shift += hunk.target_length - hunk.source_length


def _line_problems(path: str, hunk: Hunk) -> Iterator[str]:
    for line in hunk:
        if line.is_added and re.search(r"[ \t\r]\n?\Z", line.value):
            yield f"line {line.target_line_no} of {path} ends with white space."
    # A line that is taken away and put back in another layout, or under another
    # comment: it conflicts at every rebase and does nothing.
    removed = [line.value for line in hunk if line.is_removed]
    added = [line.value for line in hunk if line.is_added]
    if not "".join(removed + added).strip():
        yield f"the hunk at {hunk.source_start} of {path} changes only blank lines."
    elif any(_changes_no_code(path, run) for run in _runs(hunk)):
        yield f"the hunk at {hunk.source_start} of {path} changes no code."


def _runs(hunk: Hunk) -> Iterator[list[Line]]:
    """Yield the lines that are changed one after the other."""
    for is_context, lines in itertools.groupby(hunk, lambda line: line.is_context):
        if not is_context:
            yield list(lines)


def _changes_no_code(path: str, run: list[Line]) -> bool:
    removed = [line.value for line in run if line.is_removed]
    added = [line.value for line in run if line.is_added]
    # Blank lines and comments alone may belong to what the rest of the hunk does.
    return bool(removed and added) and _code(path, removed) == _code(path, added)


def _code(path: str, lines: list[str]) -> str:
    """The lines without their layout and, in Python, without lines of comment."""
    if path.endswith(".py"):
        lines = [line for line in lines if not line.lstrip().startswith("#")]
    return re.sub(r",(?=[)\]}])", "", "".join("".join(lines).split()))


def _form_problems(patch: Patch) -> Iterator[str]:
    if not patch.text.startswith(patchform.ZERO_COMMIT):
        yield "does not begin with git format-patch's line for commit 0."
    if "\r" in patch.message:
        yield "its message has CR line ends."
    if patchform.without_index_lines(patch.text) != patch.text:
        yield "has index lines."
    if re.search(r"\n-- \n.*\Z", patch.text, re.DOTALL):
        yield "has git's signature at its end."
    if not patch.text.endswith("\n") or patch.text.endswith("\n\n"):
        yield "does not end with exactly one line feed."
    if patchform.has_markers(patch.text[len(patch.message) :]):
        yield "has the markers of a conflict."
    if "\n---\n" not in patch.message:
        yield "has no '---' line between message and diff."


def _message_problems(patch: Patch) -> Iterator[str]:
    headers = patchform.headers(patch.message)
    for name in ("from", "date"):
        if not headers.get(name):
            yield f"has no {name.title()} header."
    subject = headers.get("subject", "")
    if not subject.startswith("[PATCH] "):
        yield "its subject does not begin with '[PATCH] '."
    elif patchform.file_name(subject) != patch.name:
        yield f"is to be named {patchform.file_name(subject)}, from its subject."
    for field in FIELDS:
        if not _field(patch, field):
            yield f"its message has no line '{field}: ...'."
    if not re.sub(r"(?m)^[\w-]+: .*(\n .*)*$", "", _body(patch)).strip():
        yield "its message does not say why."


def _body(patch: Patch) -> str:
    return patchform.body(patch.message)


def _field(patch: Patch, name: str) -> bool:
    return re.search(rf"(?m)^{name}: *\S", _body(patch)) is not None
