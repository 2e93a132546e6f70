# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The canonical form of a patch file.

It is git format-patch's without what changes though the patch does not:
commit and blob ids, git's version, the patch's number.
"""

import re
from email.parser import HeaderParser

ZERO_COMMIT = f"From {'0' * 40} Mon Sep 17 00:00:00 2001\n"

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
    return re.sub(r"[^a-z0-9]+", "-", title).strip("-") + ".patch"


def body(message: str) -> str:
    """Return the commit message below the subject."""
    _, _, rest = message.partition("\n\n")
    return rest.rpartition("\n---\n")[0] + "\n"
