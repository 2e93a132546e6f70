# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Our own files, and which patch each of them belongs to.

`patches/overlay.toml` names, for a patch, the files that go with it: in a
checkout they are part of its commit, in a pull request part of what is sent.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .errors import StackError

OWNERS = "patches/overlay.toml"


def package_files(root: Path) -> dict[str, Path]:
    """Return our modules of the package, by their path in upstream's tree."""
    files = {
        path.relative_to(root).as_posix(): path
        for path in sorted((root / "vllm").rglob("*.py"))
    }
    for name, path in files.items():
        if not path.is_file():
            raise StackError(f"{name} is no file, or a link to one that is not there.")
    return files


def _is_path(value: object) -> bool:
    return (
        isinstance(value, str)
        and bool(PurePosixPath(value).parts)
        and not PurePosixPath(value).is_absolute()
        and ".." not in PurePosixPath(value).parts
        and not any("**" in part and part != "**" for part in value.split("/"))
    )


@dataclass(frozen=True)
class Overlay:
    root: Path
    patterns: dict[str, list[str]]
    """By patch; a file belongs to the first patch that has a pattern for it."""

    @classmethod
    def load(cls, root: Path) -> "Overlay":
        path = root / OWNERS
        try:
            patterns = tomllib.loads(path.read_text()) if path.exists() else {}
        except (OSError, ValueError) as e:
            raise StackError(f"{OWNERS} cannot be used: {e!r}.") from e
        for patch, value in patterns.items():
            if not isinstance(value, list) or not all(map(_is_path, value)):
                raise StackError(
                    f"{OWNERS} has no list of paths, from the repository's root, for "
                    f"{patch}."
                )
        return cls(root, patterns)

    def folders(self) -> set[Path]:
        """Return the repository's folders that its files are in, or below."""
        return {
            self.root / PurePosixPath(pattern).parts[0]
            for patterns in self.patterns.values()
            for pattern in patterns
        }

    def owner(self, path: str) -> str | None:
        """Return the name of the patch that the file belongs to."""
        for patch, patterns in self.patterns.items():
            if any(PurePosixPath("/", path).match(f"/{p}") for p in patterns):
                return patch
        return None

    def files(self, patch: str) -> dict[str, Path]:
        """Return the files that go with the patch, by path."""
        found = {
            path.relative_to(self.root).as_posix(): path
            for pattern in self.patterns.get(patch, ())
            for path in self.root.glob(pattern)
            if path.is_file()
        }
        return {
            name: found[name] for name in sorted(found) if self.owner(name) == patch
        }

    def problems(self, patches: Iterable[str]) -> list[str]:
        """Return one sentence for everything that is wrong with the ownership."""
        found = [
            f"{OWNERS}: {name} is no patch of the series."
            for name in self.patterns
            if name not in set(patches)
        ]
        found += [
            f"{OWNERS}: {pattern} fits no file."
            for patterns in self.patterns.values()
            for pattern in patterns
            if not any(self.root.glob(pattern))
        ]
        if self.patterns:
            found += [
                f"{path}: {OWNERS} names no patch that it belongs to."
                for path in package_files(self.root)
                if self.owner(path) is None
            ]
        return found
