# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pinned distributions, from the user's package index or the cache."""

import ast
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs
from unearth import Link, Package, PackageFinder
from unearth.errors import HashMismatchError

from .errors import StackError
from .pins import Distribution


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pip_settings() -> dict[str, str]:
    """Return pip's configuration as it stands: files, then environment.

    pip is asked, because only pip knows all the places and their order. It
    names a setting "global.index-url", "download.index-url" or
    ":env:.index-url"; the later of these wins.
    """
    variables = ((k, v) for k, v in os.environ.items() if k.startswith("PIP_"))
    return _pip_settings(frozenset(variables))


@functools.cache
def _pip_settings(variables: frozenset[tuple[str, str]]) -> dict[str, str]:
    # Starting pip takes half a second; only its variables can change meanwhile.
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        # Told to be quiet it lists nothing.
        env=os.environ | {"PIP_QUIET": "0"},
    )
    if listing.returncode:
        raise StackError(
            "pip cannot read its configuration: "
            f"{(listing.stderr.strip().splitlines() or ['no reason given'])[-1]}"
        )
    found: dict[str, dict[str, str]] = {"global": {}, "download": {}, ":env:": {}}
    for line in listing.stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if section in found:
            found[section][name] = ast.literal_eval(value)
    return found["global"] | found["download"] | found[":env:"]


def package_finder() -> PackageFinder:
    settings = pip_settings()
    if "cert" in settings:
        # unearth has no such option, but its client reads this variable.
        os.environ.setdefault("SSL_CERT_FILE", settings["cert"])
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        indexes = []
        if not settings.get("find-links", "").split():
            # unearth would take its default.
            raise StackError(
                "pip is configured to use no index, and has no find-links either, so "
                "nothing can be fetched."
            )
    else:
        # Sources that are given replace unearth's default, also where they are
        # only additions to it, so the default has to be given too.
        default = [source["url"] for source in PackageFinder().sources]
        indexes = settings.get("index-url", "").split() or default
        indexes += settings.get("extra-index-url", "").split()
    return PackageFinder(
        index_urls=indexes,
        find_links=settings.get("find-links", "").split(),
        trusted_hosts=settings.get("trusted-host", "").split(),
        # A CUDA wheel or an sdist may be wanted on any machine.
        ignore_compatibility=True,
    )


def cache_dir() -> Path:
    return platformdirs.user_cache_path("vllm-fork")


def cached_path(distribution: Distribution) -> Path:
    return cache_dir() / distribution.sha256 / distribution.file


def is_sound(cached: Path, distribution: Distribution) -> bool:
    return sha256(cached) == distribution.sha256


def fetch(distribution: Distribution) -> Path:
    """Return a local copy of the distribution whose hash is the pinned one."""
    cached = cached_path(distribution)
    if cached.is_file():
        if is_sound(cached, distribution):
            return cached
        print(
            f"The cached {distribution.file} is damaged (its sha256 is not the pinned "
            "one) and is fetched again.",
            file=sys.stderr,
        )
        cached.unlink()
    cached.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the move into place is atomic.
    with tempfile.TemporaryDirectory(dir=cached.parent) as scratch:
        os.replace(_download(distribution, Path(scratch)), cached)
    return cached


def packages(project: str) -> list[Package]:
    """Return all files that the package indexes have of the project."""
    try:
        return list(package_finder().find_all_packages(project, allow_yanked=True))
    except StackError:
        raise
    except Exception as e:
        raise StackError(
            f"The package index could not be searched for {project}: {e}"
        ) from e


def _download(distribution: Distribution, folder: Path) -> Path:
    links = [
        package.link
        for package in packages(distribution.project)
        if package.link.filename == distribution.file
    ]
    if not links:
        raise StackError(
            f"{distribution.file} is on none of the package indexes that pip is "
            "configured to use."
        )
    return download(links[0], folder, distribution.sha256)


def download(link: Link, folder: Path, pinned: str | None = None) -> Path:
    """Put the file into the folder.

    Args:
        link: Where it is.
        folder: Where to.
        pinned: Its sha256; None for what the index says, if anything.

    """
    print(f"Downloading {link.filename}", file=sys.stderr, flush=True)
    hashes = {"sha256": [pinned]} if pinned else None
    try:
        found = package_finder().download(link, folder, hashes=hashes)
    except HashMismatchError as e:
        (name,) = e.expected
        whose = "patches/upstream.toml" if pinned else "the index itself"
        raise StackError(
            f"{link.filename} from the package index is not what it should be: its "
            f"{name} is {e.actual[name]}, {whose} has {', '.join(e.expected[name])}."
        ) from e
    except Exception as e:
        raise StackError(f"{link.filename} could not be downloaded: {e}") from e
    # A file of a local index is not copied by unearth, but named where it lies.
    if found.parent != folder:
        found = Path(shutil.copy(found, folder))
    return found
