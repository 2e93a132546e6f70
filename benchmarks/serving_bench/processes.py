# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What this process and its children, which are the engine, take of the machine."""

import time
from collections.abc import Iterator
from contextlib import suppress

import psutil


def memory() -> dict[str, float]:
    """Bytes now: private to the processes, shared memory of the machine. What must
    not grow in a long run."""
    private = 0
    for process in _family():
        with suppress(psutil.NoSuchProcess):
            usage = process.memory_info()
            private += usage.rss - usage.shared
    shared = psutil.virtual_memory().shared
    return {"at": time.monotonic(), "private": private, "shared": shared}


def cpu_seconds() -> dict[str, float]:
    """Process -> CPU seconds so far, all threads, user and kernel."""
    seconds = {}
    for process in _family():
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            seconds[f"{process.name()} {process.pid}"] = times.user + times.system
    return seconds


def _family() -> Iterator[psutil.Process]:
    me = psutil.Process()
    yield me
    yield from me.children(recursive=True)
