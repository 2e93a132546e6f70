# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What is pinned: the bases, their distributions, the fork's version tag."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import parse_sdist_filename, parse_wheel_filename

from .errors import StackError


@dataclass(frozen=True)
class Distribution:
    file: str
    sha256: str

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{64}", str(self.sha256)):
            raise ValueError(f"{self.sha256!r} is no sha256")
        _ = self.project

    @property
    def project(self) -> str:
        """The name under which the package index lists the file."""
        parse = parse_wheel_filename if self.file.endswith(".whl") else None
        return (parse or parse_sdist_filename)(self.file)[0]


@dataclass(frozen=True)
class Base:
    version: str
    sdist: Distribution
    wheels: dict[tuple[str, str], Distribution]
    """By device and machine, as in ("cpu", "x86_64")."""
    patches: Path

    def wheel(self, device: str, machine: str) -> Distribution:
        try:
            return self.wheels[device, machine]
        except KeyError:
            known = ", ".join(f"{d} on {m}" for d, m in sorted(self.wheels))
            raise StackError(
                f"vLLM {self.version} has no pinned wheel for {device} on "
                f"{machine}; there are: {known}."
            ) from None


def load_base(root: Path, version: str | None = None) -> Base:
    path = root / "patches" / "upstream.toml"
    try:
        pins = tomllib.loads(path.read_text())
        version = version or pins["default"]
        table = pins["base"].get(version)
        if table is None:
            raise StackError(
                f"patches/upstream.toml pins no base {version}; it has: "
                f"{', '.join(pins['base'])}."
            )
        return Base(
            version,
            Distribution(**table["sdist"]),
            {
                (device, machine): Distribution(**pin)
                for device in ("cpu", "cuda")
                for machine, pin in table.get(device, {}).items()
            },
            root / "patches" / version,
        )
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise StackError(f"patches/upstream.toml cannot be used: {e!r}.") from e


def fork_version(root: Path, base: Base, device: str) -> str:
    """Return the version of the fork's wheel.

    vLLM takes "cpu" in the version of the distribution "vllm" as the mark of
    a CPU build, so the tag itself must not contain it.
    """
    tag = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["vllm-fork"][
        "tag"
    ]
    return f"{base.version}+{tag}" + (".cpu" if device == "cpu" else "")
