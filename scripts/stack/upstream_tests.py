# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Upstream's own tests, from the pinned sdist, to run against the fork."""

from pathlib import Path

from . import checkout, series, unpack
from .pins import Base

FOLDER = "tests/"
SETTINGS = "pyproject.toml"


def unpacked(base: Base, sdist: Path, folder: Path) -> Path:
    """Return the folder, holding upstream's tests as the stack changes them.

    Upstream's `vllm/` is not in it, so what they import is the installed fork.
    """
    patches = series.load(base.patches)

    def edit(folder: Path) -> None:
        def read(path: str) -> bytes | None:
            file = folder / path
            return file.read_bytes() if file.is_file() else None

        edits = series.apply(patches, read, lambda path: path.startswith(FOLDER))
        for path, data in edits.items():
            checkout.write(folder / path, data)

    return unpack.unpacked(
        sdist,
        folder,
        f"{base.sdist.sha256} {series.stack_hash(patches)}",
        lambda path: path.startswith(FOLDER) or path == SETTINGS,
        edit,
    )
