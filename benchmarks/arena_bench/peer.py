# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tree of another vLLM whose queue is run beside the fork's."""

import os
import re
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

from .block import BenchmarkError

ROOT = Path(__file__).resolve().parents[2]


def peer_tree(peer: str) -> Path:
    """Return a folder that holds the peer's `vllm/`.

    Args:
        peer: Such a folder, or a version that patches/upstream.toml pins.

    Raises:
        BenchmarkError: If it is neither, or cannot be had.

    """
    if not re.fullmatch(r"\d+(\.\d+)+", peer):
        folder = Path(peer).resolve()
        if not (folder / "vllm" / "__init__.py").is_file():
            raise BenchmarkError(f"--peer: {peer} is no version and holds no vllm/.")
        return folder
    pins = tomllib.loads((ROOT / "patches" / "upstream.toml").read_text())
    pin = pins.get("peer", {}).get(peer)
    if pin is None:
        known = ", ".join(pins.get("peer", {})) or "none"
        raise BenchmarkError(
            f"--peer: patches/upstream.toml pins no peer {peer}; it has: {known}."
        )
    # Only here: where the tree is given as a folder, nothing else is needed.
    sys.path.append(str(ROOT / "scripts"))
    try:
        from stack import errors, fetch
        from stack.pins import Distribution
    except ImportError as e:
        raise BenchmarkError(
            f"--peer {peer} needs what requirements/stack.txt lists: {e}."
        ) from e
    try:
        sdist = fetch.fetch(Distribution(**pin))
    except errors.StackError as e:
        raise BenchmarkError(f"--peer {peer}: {e}") from e
    folder = fetch.cache_dir() / "peer" / pin["sha256"]
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            draft = Path(scratch) / "tree"
            _unpack_python(sdist, draft)
            os.rename(draft, folder)
    return folder


def _unpack_python(sdist: Path, folder: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = []
        for member in archive:
            member.name = member.name.partition("/")[2]
            if member.name.startswith("vllm/") and member.name.endswith(".py"):
                members.append(member)
        archive.extractall(folder, members, filter="data")
