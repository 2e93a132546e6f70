# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Reading a base's source distribution."""

import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from .errors import StackError


def members(
    sdist: Path, wanted: Callable[[str], bool] = lambda path: True
) -> Iterator[tuple[str, tarfile.TarInfo, bytes]]:
    """Yield the wanted files, by their path in upstream's tree, and their content."""
    try:
        with tarfile.open(sdist) as archive:
            for member in archive:
                name = member.name.partition("/")[2]
                if name and not member.isdir() and wanted(name):
                    file = None if member.issym() else archive.extractfile(member)
                    yield name, member, file.read() if file else b""
    except (tarfile.TarError, EOFError, zlib.error) as e:
        raise StackError(f"{sdist} is no sound source distribution: {e}.") from e


def reader(sdist: Path, paths: Iterable[str]) -> Callable[[str], bytes | None]:
    """Return a function that gives the content of one of the paths."""
    paths = set(paths)
    return {name: data for name, _, data in members(sdist, paths.__contains__)}.get


class PackageFiles:
    """The files of the package, to read as those of a wheel are."""

    def __init__(self, sdist: Path):
        self._files = {
            name: (data, bool(member.mode & 0o111))
            for name, member, data in members(sdist, lambda p: p.startswith("vllm/"))
        }

    def get(self, name: str) -> bytes | None:
        return self._files[name][0] if name in self._files else None

    def files(self) -> Iterator[tuple[str, int, bool]]:
        """Yield the files: name, size in bytes, whether it is executable."""
        for name, (data, is_executable) in self._files.items():
            yield name, len(data), is_executable
