# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A /dev/shm of one's own: small, empty, and nobody else's."""

import shutil
import subprocess

_UNSHARE = ["unshare", "--mount", "--propagation", "private", "--"]


def is_allowed() -> bool:
    """Whether this user may have a mount namespace."""
    return (
        shutil.which("unshare") is not None
        and subprocess.run([*_UNSHARE, "true"], capture_output=True).returncode == 0
    )


def command(mib: int, argv: list[str]) -> list[str]:
    """`argv`, to run on a /dev/shm of `mib` MiB."""
    script = f'mount -t tmpfs -o size={mib}m tmpfs /dev/shm && exec "$@"'
    return [*_UNSHARE, "sh", "-c", script, "sh", *argv]
