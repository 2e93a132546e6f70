# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Files of an sdist in a folder, made once and looked over at each use."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from . import checkout, lock, sdist

# In the folder: its key, and the size in bytes of each of its files, by path.
LISTING = ".unpacked.json"


def unpacked(
    archive: Path,
    folder: Path,
    key: str,
    wanted: Callable[[str], bool],
    edit: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Return the folder, holding the sdist's wanted files.

    Made anew if the key is another, or a file is gone or cut short. Several processes
    may ask at once.

    Args:
        archive: The sdist.
        folder: Where; it is for these files alone.
        key: What they are made of.
        wanted: Tells the files, by their path in upstream's tree.
        edit: Changes the files, in the folder that it is given.

    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with lock.alone(folder.parent, f"another run that unpacks {archive.name}"):
        if not _is_whole(folder, key):
            for left in folder.parent.glob(f"{checkout.SCRATCH}*"):
                shutil.rmtree(left)
            with checkout.scratch(folder.parent) as scratch:
                draft = scratch / "new"
                _unpack(archive, draft, wanted)
                edit(draft)
                sizes = {
                    path.relative_to(draft).as_posix(): path.lstat().st_size
                    for path in draft.rglob("*")
                    if path.is_symlink() or path.is_file()
                }
                (draft / LISTING).write_text(json.dumps({"key": key, "sizes": sizes}))
                if folder.exists():
                    folder.rename(scratch / "former")
                draft.rename(folder)
    return folder


def _is_whole(folder: Path, key: str) -> bool:
    try:
        listing = json.loads((folder / LISTING).read_text())
        return listing["key"] == key and all(
            os.lstat(folder / path).st_size == size
            for path, size in listing["sizes"].items()
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _unpack(archive: Path, folder: Path, wanted: Callable[[str], bool]) -> None:
    folder.mkdir()
    for path, member, data in sdist.members(archive, wanted):
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        if member.issym():
            file.symlink_to(member.linkname)
        else:
            file.write_bytes(data)
            file.chmod(0o755 if member.mode & 0o111 else 0o644)
