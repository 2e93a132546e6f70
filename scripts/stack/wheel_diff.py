# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a wheel of the fork has that the base's has not."""

import csv
import io
import stat
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from wheel.wheelfile import WheelError, WheelFile

from . import series
from .errors import StackError
from .fork import VERSION_FILE, Fork
from .target import MACHINES, Target
from .wheel import PROVENANCE, BaseWheel, metadata, tagged


@dataclass(frozen=True)
class Difference:
    path: str
    kind: str
    """"added", "changed" or "removed"."""
    why: str | None
    """What it is there for; None if nothing accounts for it."""

    def __str__(self) -> str:
        return f"{self.kind:8} {self.path}: {self.why or 'NOT INTENDED'}"


def target_of(wheel: Path) -> Target:
    """Return what the wheel was made for, which its name says."""
    try:
        _, version, _, tags = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as e:
        raise StackError(f"{wheel} is not named as a wheel is: {e}.") from e
    machines = [m for m in MACHINES if any(t.platform.endswith(m) for t in tags)]
    if not machines:
        raise StackError(f"{wheel} is for none of {', '.join(MACHINES)}.")
    return Target("cpu" if "cpu" in str(version.local) else "cuda", machines[0])


def compare(fork: Fork, base_file: Path, wheel: Path) -> list[Difference]:
    """Return every file in which the wheel differs from the base's."""
    found = []
    try:
        with BaseWheel(base_file) as base, WheelFile(wheel) as built:
            _require_plain(built)
            edits = fork.edits(base.get)
            info = f"vllm-{fork.version}.dist-info/"
            before = {
                _renamed(i.filename, base.dist_info, info): i for i in base.infolist()
            }
            after = {i.filename: i for i in built.infolist()}
            for path in sorted(before.keys() | after.keys()):
                old = base.read(before[path]) if path in before else None
                new = built.read(path) if path in after else None
                # RECORD is written anew; what is added is as the base's other files.
                is_record = path == info + "RECORD"
                like = path if path in before else _model(info, path)
                infos = [before[like], *([after[path]] if path in after else ())]
                modes = [entry.external_attr >> 16 for entry in infos]
                same_mode = is_record or modes[0] == modes[-1]
                if old == new and same_mode:
                    continue
                in_both = path in before and path in after
                kind = "added" if old is None else "changed" if in_both else "removed"
                why = _why(fork, edits, base.tags, info, path, old, new)
                if (
                    not same_mode
                    or stat.S_ISLNK(modes[-1])
                    or (is_record and _listed(new) != _sizes(built, path))
                ):
                    why = None
                found.append(Difference(path, kind, why))
    # What zipfile raises of data that was tampered with; a hash in RECORD may be none,
    # which is a ValueError.
    except (
        *(BadZipFile, WheelError, ValueError),
        *(zlib.error, RuntimeError, NotImplementedError, EOFError),
    ) as e:
        raise StackError(f"{wheel} is not a sound wheel: {e}.") from e
    return found


def _model(info: str, path: str) -> str:
    return info + "METADATA" if path.startswith(info) else "vllm/__init__.py"


def _listed(record: bytes | None) -> dict[str, str]:
    rows = csv.reader(io.StringIO((record or b"").decode()))
    return {path: size for path, _, size in rows}


def _sizes(wheel: WheelFile, record: str) -> dict[str, str]:
    """Return what RECORD has to say of the sizes; of itself nothing."""
    return {
        info.filename: "" if info.filename == record else str(info.file_size)
        for info in wheel.infolist()
    }


def _require_plain(wheel: WheelFile) -> None:
    """Refuse what not every reader of the zip would see."""
    counts = Counter(wheel.namelist())
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"it has {', '.join(twice)} twice")
    if min((info.header_offset for info in wheel.infolist()), default=0):
        raise ValueError("it has data before its first file")


def _why(
    fork: Fork,
    edits: dict[str, bytes | None],
    tags: list[str],
    info: str,
    path: str,
    old: bytes | None,
    new: bytes | None,
) -> str | None:
    if path == VERSION_FILE:
        return "the version" if new == edits[path] else None
    if path in edits:
        names = [p.name for p in fork.patches if path in series.touched([p])]
        return ", ".join(names) if new == edits[path] else None
    if path in fork.overlay:
        return "the overlay" if new == fork.overlay[path].read_bytes() else None
    checks: dict[str, tuple[str, Callable[[], bool]]] = {
        info + PROVENANCE: (
            "where the wheel comes from",
            lambda: new == fork.provenance().encode(),
        ),
        info + "METADATA": (
            "name, version, requirements, extras",
            lambda: old is not None and new == metadata(old, fork.version),
        ),
        info + "WHEEL": (
            "the tags of the file's name",
            lambda: old is not None and new == tagged(old, tags),
        ),
        # WheelFile compares it with each file that is read.
        info + "RECORD": ("the files' hashes", lambda: True),
    }
    why, holds = checks.get(path, ("", lambda: False))
    return why if old is not new and holds() else None


def _renamed(path: str, old: str, new: str) -> str:
    return new + path.removeprefix(old) if path.startswith(old) else path
