# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Reading a base's source distribution."""

import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path


def members(
    sdist: Path, wanted: Callable[[str], bool] = lambda path: True
) -> Iterator[tuple[str, tarfile.TarInfo, bytes]]:
    """Yield the wanted files, by their path in upstream's tree, and their content."""
    with tarfile.open(sdist) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if name and not member.isdir() and wanted(name):
                file = None if member.issym() else archive.extractfile(member)
                yield name, member, file.read() if file else b""


def reader(sdist: Path, paths: Iterable[str]) -> Callable[[str], bytes | None]:
    """Return a function that gives the content of one of the paths."""
    paths = set(paths)
    return {name: data for name, _, data in members(sdist, paths.__contains__)}.get
