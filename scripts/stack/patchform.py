# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The canonical form of a patch file.

It is git format-patch's without what changes though the patch does not:
commit and blob ids, git's version, the patch's number.
"""

import re
from email.parser import HeaderParser

ZERO_COMMIT = f"From {'0' * 40} Mon Sep 17 00:00:00 2001\n"

# Far below the 255 bytes that file systems take, with what a draft's name adds.
MAX_NAME = 100

_MARKER = re.compile(r"(?m)^[-+](?:<{7}|\|{7}|={7}$|>{7})")
# In prose seven equals signs may be a heading's underline.
_MARKER_IN_PROSE = re.compile(r"(?m)^[-+](?:<{7}|\|{7}|>{7})")
PROSE = (".md", ".rst")

# What is wrong with a change that `has_modes`.
MODES = "makes a file executable, a link, or no longer so, which a wheel does not carry"

# Where git am ends the message, or takes a line of it for a header.
_NO_TEXT = re.compile(
    r"(?m)^(?:---(?:[ \t].*)?|diff -.*|Index: .*|From \S+ \w{3} \w{3} .*|"
    r"(?:From|Date|Subject):.*)$"
)

_INDEX_LINE = re.compile(r"(?m)^index [0-9a-f]+\.\.[0-9a-f]+(?: \d+)?\n")


def without_index_lines(text: str) -> str:
    message, start, diff = text.partition("\ndiff --git ")
    return message + start + _INDEX_LINE.sub("", diff)


def headers(text: str) -> dict[str, str]:
    """Return the mail headers, by lower-case name, long ones unfolded."""
    _, _, mail = text.partition("\n")
    message = HeaderParser().parsestr(mail)
    return {k.lower(): re.sub(r"\n\s", " ", v) for k, v in message.items()}


def file_name(subject: str) -> str:
    title = subject.removeprefix("[PATCH] ").lower()
    stem = re.sub(r"[^a-z0-9]+", "-", title).strip("-")
    return stem[:MAX_NAME].rstrip("-") + ".patch"


def has_modes(diff: str) -> bool:
    """Tell whether a file of the diff is, or was, no ordinary one."""
    odd = r"(?m)^(?:old mode|new mode|new file mode(?! 100644$)) "
    return re.search(odd, diff) is not None


def has_markers(diff: str) -> bool:
    """Tell whether the diff adds or removes a line of a conflict."""
    for file in re.split(r"(?m)^diff --git ", diff):
        names, _, hunks = file.partition("\n")
        marker = _MARKER_IN_PROSE if names.endswith(PROSE) else _MARKER
        if marker.search(hunks):
            return True
    return False


def message_problem(subject: str, body: str) -> str | None:
    """Say why a commit of this message can be no patch; None if it can."""
    if file_name(subject) == ".patch":
        return "has no subject that its file could be named after"
    if re.match(r"(?:fixup|squash|amend)! ", subject):
        return "is not squashed yet (`git rebase -i --autosquash fork-base`)"
    # git am makes other text of these.
    if " ".join(subject.split()) != subject or re.match(r"(?i)re:|\[patch", subject):
        return "has a subject that would not come back as it is from a mail"
    if line := _NO_TEXT.search(body):
        return (
            f"has the line {line[0]!r} in its message, which git am takes for no text"
        )
    return None


def body(message: str) -> str:
    """Return the commit message below the subject."""
    _, _, rest = message.partition("\n\n")
    return rest.rpartition("\n---\n")[0] + "\n"
