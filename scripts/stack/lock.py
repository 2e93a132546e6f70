# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One process at a time."""

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(folder: Path, other: str) -> Iterator[None]:
    """Wait for the process that holds the folder, which must exist; then hold it.

    The folder itself is locked, which needs no file, and ends with the process,
    however that ends.

    Args:
        folder: What only one process at a time may change.
        other: What the user is told to be waiting for.

    """
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Waiting for {other} to end.", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
