# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""How much memory this process's cgroups still allow (writer)."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup")
_PROC_SELF_CGROUP = Path("/proc/self/cgroup")
# Of cgroup v2 and v1: limit, usage, and in memory.stat the page cache that the
# kernel drops before it kills. Reading a model's weights fills a limited cgroup
# with it.
_V2_FILES = ("memory.max", "memory.current", "inactive_file")
_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
# v1 writes "no limit" as the largest multiple of a page.
_NO_LIMIT = 1 << 60


def memory_room() -> int | None:
    """Bytes that may be taken before a limit is reached: of the cgroup at the
    mount's root, which is the container's, and of the process's own and all
    between them (systemd, Slurm). None if there is no limit."""
    rooms = [
        room
        for group, files in _groups()
        if (room := _room_of(group, *files)) is not None
    ]
    return min(rooms, default=None)


def _groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    yield _MOUNT, _V2_FILES
    yield _MOUNT / "memory", _V1_FILES
    with suppress(OSError):
        for line in _PROC_SELF_CGROUP.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                root, files = _MOUNT, _V2_FILES
            elif "memory" in controllers.split(","):
                root, files = _MOUNT / "memory", _V1_FILES
            else:
                continue
            # A path that is not below the mount is that of another namespace.
            group = root
            for part in Path(path).parts[1:]:
                group /= part
                yield group, files


def _room_of(group: Path, limit_file: str, usage_file: str, cache: str) -> int | None:
    try:
        limit = int((group / limit_file).read_text())
        if limit >= _NO_LIMIT:
            return None
        usage = int((group / usage_file).read_text())
        stat = (group / "memory.stat").read_text()
    except (OSError, ValueError):  # not there, or "max"
        return None
    cached = [
        int(line.split()[1]) for line in stat.splitlines() if line.split()[0] == cache
    ]
    return limit - usage + sum(cached)
