# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Memory of this process and its children: what must not grow in a long run."""

import time

import psutil


def sample() -> dict[str, float]:
    """Bytes now: private to the processes, shared memory of the machine."""
    private = 0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            memory = process.memory_info()
        except psutil.NoSuchProcess:
            continue
        private += memory.rss - memory.shared
    shared = psutil.virtual_memory().shared
    return {"at": time.monotonic(), "private": private, "shared": shared}
