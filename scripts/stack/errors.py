# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
class StackError(Exception):
    """Bad input or surroundings; the message is the sentence the user reads."""


def sentence(error: StackError | OSError) -> str:
    """Return what went wrong, for the user."""
    if isinstance(error, StackError):
        return str(error)
    where = f"{error.filename2 or error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}."
