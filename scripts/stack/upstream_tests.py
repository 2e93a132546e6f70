# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Upstream's own tests, from the pinned sdist, to run against the fork."""

import shutil
import tarfile
import tempfile
from pathlib import Path

from . import series
from .pins import Base

FOLDER = "tests/"
SETTINGS = "pyproject.toml"


def unpacked(base: Base, sdist: Path, cache: Path) -> Path:
    """Return a folder with upstream's tests as the stack changes them.

    Upstream's `vllm/` is not in it, so what they import is the installed fork.
    """
    patches = series.load(base.patches)
    key = f"{base.sdist.sha256[:16]}-{series.stack_hash(patches)[:16]}"
    folder = cache / key
    if not folder.is_dir():
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir(parents=True)
        draft = Path(tempfile.mkdtemp(dir=cache))
        _unpack(patches, sdist, draft)
        draft.rename(folder)
    return folder


def _unpack(patches: list[series.Patch], sdist: Path, folder: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = []
        for member in archive:
            member.name = member.name.partition("/")[2]
            if member.name.startswith(FOLDER) or member.name == SETTINGS:
                members.append(member)
        archive.extractall(folder, members, filter="data")

    def read(path: str) -> bytes | None:
        file = folder / path
        return file.read_bytes() if file.is_file() else None

    edits = series.apply(patches, read, lambda path: path.startswith(FOLDER))
    for path, data in edits.items():
        if data is None:
            (folder / path).unlink()
        else:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
