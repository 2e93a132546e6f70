# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the fork is made of: a base's wheel, the stack, the overlay."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from . import overlay, series
from .errors import StackError
from .pins import Base, Distribution, fork_version
from .target import Target

VERSION_FILE = "vllm/_version.py"


def package_edits(
    base: Base,
    patches: list[series.Patch],
    overlay: Iterable[str],
    read: Callable[[str], bytes | None],
) -> dict[str, bytes | None]:
    """Return the base's package files that the stack changes, None where it deletes.

    Raises:
        StackError: If a patch does not apply, or the overlay has a file of the
            base that it is not meant to replace.

    """
    edits = series.apply(patches, read, lambda path: path.startswith("vllm/"))
    overlay = set(overlay)
    for path in sorted(overlay):
        if path in edits or (path not in base.replaces and read(path) is not None):
            raise StackError(
                f"{path} is a file of vLLM {base.version} or of a patch: "
                "change it by a patch, the overlay is for new files."
            )
    for path in sorted(base.replaces):
        if path not in overlay or read(path) is None:
            raise StackError(
                f"patches/upstream.toml says that the overlay replaces {path} of vLLM "
                f"{base.version}, but only one of the two has it."
            )
    return edits


@dataclass(frozen=True)
class Fork:
    """The fork for one target. Paths are relative to upstream's tree."""

    base: Base
    distribution: Distribution
    """The base's wheel."""
    version: str
    patches: list[series.Patch]
    overlay: dict[str, Path]

    @classmethod
    def load(cls, root: Path, base: Base, target: Target) -> "Fork":
        return cls(
            base,
            base.wheel(target.device, target.machine),
            fork_version(root, base, target.device),
            series.load(base.patches),
            overlay.package_files(root),
        )

    def edits(self, read: Callable[[str], bytes | None]) -> dict[str, bytes | None]:
        """Return what `package_edits` does, and the file with the version.

        Args:
            read: Gives a file of the base's wheel, None where there is none.

        """
        edits = package_edits(self.base, self.patches, self.overlay, read)
        edits[VERSION_FILE] = self._version_file(read(VERSION_FILE) or b"")
        return edits

    def provenance(self) -> str:
        overlay = hashlib.sha256()
        for name, path in self.overlay.items():
            data = path.read_bytes()
            overlay.update(f"{name}\0{len(data)}\0".encode() + data)
        facts = {
            "base": {
                "file": self.distribution.file,
                "sha256": self.distribution.sha256,
            },
            "stack_sha256": series.stack_hash(self.patches),
            "overlay_sha256": overlay.hexdigest(),
        }
        return json.dumps(facts, indent=2) + "\n"

    def _version_file(self, text: bytes) -> bytes:
        numbers, _, local = self.version.partition("+")
        parts = ", ".join(numbers.split("."))
        for pattern, value in (
            (rb"(?m)^(__version__ = version = ).*$", f"'{self.version}'"),
            (rb"(?m)^(__version_tuple__ = .* = )\(.*$", f"({parts}, '{local}')"),
        ):
            text, count = re.subn(pattern, rb"\1" + value.encode(), text)
            if count != 1:
                raise StackError(
                    f"{VERSION_FILE} of {self.distribution.file} is not of the form "
                    "that this build can give the fork's version."
                )
        return text
