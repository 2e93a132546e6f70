# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What is pinned: the bases, their distributions, the fork's version tag."""

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from .errors import StackError

DEVICES = ("cpu", "cuda")


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
    replaces: frozenset[str] = frozenset()
    """Its files whose place the overlay takes, relative to its tree."""

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
    """Return the base of that version, or the one that upstream.toml prefers."""
    path = root / "patches" / "upstream.toml"
    try:
        pins = tomllib.loads(path.read_text())
        version = pins["default"] if version is None else version
        for name in pins["base"]:
            Version(name)
        table = pins["base"].get(version)
        if table is None:
            raise StackError(
                f"patches/upstream.toml pins no base {version or repr(version)}; "
                f"it has: {', '.join(pins['base'])}."
            )
        return Base(
            version,
            Distribution(**table["sdist"]),
            {
                (device, machine): Distribution(**pin)
                for device in DEVICES
                for machine, pin in table.get(device, {}).items()
            },
            root / "patches" / version,
            frozenset(_paths(table.get("replaces", []))),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise StackError(f"patches/upstream.toml cannot be used: {e!r}.") from e


def _paths(value: object) -> list[str]:
    if not isinstance(value, list):
        raise TypeError(f"replaces is {value!r}, not a list of paths")
    return value


def versions(root: Path) -> list[str]:
    """Return the versions of all bases, oldest first."""
    load_base(root)
    pins = tomllib.loads((root / "patches" / "upstream.toml").read_text())
    return sorted(pins["base"], key=Version)


def pinned_name(root: Path, version: str) -> str | None:
    """Return the name under which the version is a base: 0.31.0 for 0.31, too."""
    try:
        wanted = Version(version)
    except InvalidVersion:
        return None
    return next((name for name in versions(root) if Version(name) == wanted), None)


def add_base(root: Path, base: Base) -> None:
    """Pin one more base, at the end of upstream.toml."""
    text = ""
    if base.replaces:
        replaces = ", ".join(_quoted(path) for path in sorted(base.replaces))
        text = f"\n[base.{_quoted(base.version)}]\nreplaces = [{replaces}]\n"
    tables = {"sdist": base.sdist} | {
        f"{device}.{machine}": pin for (device, machine), pin in base.wheels.items()
    }
    for name, pin in tables.items():
        text += f"\n[base.{_quoted(base.version)}.{name}]\n"
        text += f"file = {_quoted(pin.file)}\nsha256 = {_quoted(pin.sha256)}\n"
    path = root / "patches" / "upstream.toml"
    draft = path.with_name(path.name + ".new")
    draft.write_text(path.read_text() + text)
    draft.replace(path)


def _quoted(text: str) -> str:
    # A JSON string is a TOML string.
    return json.dumps(text)


def fork_version(root: Path, base: Base, device: str) -> str:
    """Return the version of the fork's wheel.

    vLLM takes "cpu" in the version of the distribution "vllm" as the mark of
    a CPU build, so the tag itself must not contain it.
    """
    try:
        settings = tomllib.loads((root / "pyproject.toml").read_text())
        tag = settings["tool"]["vllm-fork"]["tag"]
        version = Version(f"{base.version}+{tag}")
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise StackError(
            "pyproject.toml gives no usable tag for the fork's version, as in "
            f'[tool.vllm-fork] tag = "shmarena.1": {e!r}.'
        ) from e
    if "cpu" in str(version.local):
        raise StackError(
            f"The tag {tag!r} in pyproject.toml has 'cpu' in it, which vLLM takes for "
            "the mark of a CPU build."
        )
    return f"{base.version}+{tag}" + (".cpu" if device == "cpu" else "")
