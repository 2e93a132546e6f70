# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which base the fork is built from on this machine."""

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from .errors import StackError

MACHINES = ("x86_64", "aarch64")

# The kernel driver's and, under WSL, where there is none, the library that
# Windows hands in.
DRIVER_FILES = (
    Path("/proc/driver/nvidia/version"),
    Path("/usr/lib/wsl/lib/libcuda.so.1"),
)


@dataclass(frozen=True)
class Target:
    device: str
    machine: str


def has_nvidia_driver() -> bool:
    return shutil.which("nvidia-smi") is not None or any(
        path.exists() for path in DRIVER_FILES
    )


def detect() -> Target:
    system, machine = sys.platform, platform.machine()
    if system != "linux" or machine not in MACHINES:
        raise StackError(
            f"The fork is built for Linux on {' or '.join(MACHINES)}, "
            f"not for {system} on {machine}."
        )
    # In any case, as upstream takes it.
    device = os.environ.get("VLLM_TARGET_DEVICE", "").lower() or (
        "cuda" if has_nvidia_driver() else "cpu"
    )
    if device not in ("cpu", "cuda"):
        raise StackError(
            f"VLLM_TARGET_DEVICE is {device!r}; the fork is built for 'cpu' or 'cuda'."
        )
    return Target(device, machine)
