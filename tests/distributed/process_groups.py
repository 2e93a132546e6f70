# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Forked processes that can be killed with what they have started."""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def run_in_group(run: Callable[..., Any], *args: Any) -> None:
    """Run in a process group of our own, which our resource tracker will be in,
    too. Target of a process."""
    os.setpgid(0, 0)
    # Whoever started us may be killed himself, and nobody would end us.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    run(*args)


def kill_group(pid: int) -> None:
    """SIGKILL a process that `run_in_group` runs in, and its group."""
    # It may not have come so far as to have a group.
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def wait_for_end_of(pid: int, timeout: float) -> None:
    """Wait, at most so many seconds, for a process that is not our child."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.01)
