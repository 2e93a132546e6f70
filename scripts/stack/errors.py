# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import sys
from collections.abc import Callable

import interrupts


class StackError(Exception):
    """Bad input or surroundings; the message is the sentence the user reads."""


def sentence(error: StackError | OSError) -> str:
    """Return what went wrong, for the user."""
    if isinstance(error, StackError):
        return str(error)
    where = f"{error.filename2 or error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}."


def told(run: Callable[[], int]) -> int:
    """Return what the program returns; what goes wrong is one sentence and a status."""
    with interrupts.installed():
        try:
            return run()
        except BrokenPipeError:
            # Whoever read the output has enough of it.
            sys.stderr.close()
            return 1
        except (StackError, OSError) as e:
            print(f"error: {sentence(e)}", file=sys.stderr)
            return 1
        except interrupts.Interrupted as interrupt:
            print(f"error: stopped by {interrupt}.", file=sys.stderr)
            return interrupt.exit_status
