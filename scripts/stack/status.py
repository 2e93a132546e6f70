# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What there is, and what no longer fits together."""

from collections.abc import Iterator
from pathlib import Path

from . import checkout, editable, fetch, overlay, pins, rebase, sdist, series
from .errors import StackError
from .fork import package_edits
from .git import Git
from .pins import Base


def lines(root: Path) -> Iterator[str]:
    """Yield the report line by line; nothing is downloaded or changed."""
    default = pins.load_base(root)
    stack = series.load(default.patches)
    for version in pins.versions(root):
        base = pins.load_base(root, version)
        mark = ", the base of record" if version == default.version else ""
        yield f"vLLM {version}{mark}: {_state(root, base)}"
        if drift := _drift(base, default, stack):
            yield f"  behind: {drift}"
    yield from ("", "The patches:")
    for patch in stack:
        yield f"  {patch.name}: {_changes(patch)}"
    yield from _unfinished(root)


def _changes(patch: series.Patch) -> str:
    try:
        return ", ".join(f"{f.path} +{f.added} -{f.removed}" for f in patch.files)
    except StackError:
        # Why is said beside the base.
        return "cannot be read"


def _state(root: Path, base: Base) -> str:
    try:
        patches = series.load(base.patches)
        count = f"{len(patches)} patches"
        file = fetch.cached_path(base.sdist)
        if not file.is_file():
            return f"{count}, not tried: {file.name} has not been downloaded yet."
        if not fetch.is_sound(file, base.sdist):
            return f"{count}, not tried: the cached {file} is damaged: remove it."
        ours = overlay.package_files(root)
        read = sdist.reader(file, [*series.touched(patches), *ours])
        series.apply(patches, read)
        package_edits(base, patches, ours, read)
    except StackError as e:
        return str(e)
    return f"{count}, all apply."


def _drift(base: Base, default: Base, stack: list[series.Patch]) -> str | None:
    """Say how the base's stack lags behind the base of record's."""
    if base.version == default.version:
        return None
    source = series.source(base.patches)
    if source is None:
        return "its series does not say which stack it was rebased from."
    if source != series.Source(default.version, series.stack_hash(stack)):
        return (
            f"patches/{source.version} has changed since; "
            f"`scripts/fork rebase --to {base.version}` brings it up to date."
        )
    return None


def _unfinished(root: Path) -> Iterator[str]:
    """Yield what the working tree, checkouts and the editable tree hold of work."""
    if (root / ".git").exists():
        changed = Git(root)("status", "--porcelain")
        if changed:
            yield from ("", "Not committed in this repository:")
            yield from (f"  {line}" for line in changed.splitlines())
    for folder in sorted((root / "build").glob("stack-*")):
        yield from ("", _checkout_state(root, folder))
    for folder in rebase.folders(root):
        version = folder.name.removeprefix("rebase-")
        yield from ("", f"A rebase to {version} is under way in {folder}.")
    for folder in sorted((root / "build").glob("tmp*")):
        yield from (
            "",
            f"{folder} is of a run that was killed, or of one that is under way.",
        )
    if (drift := editable.drift(root)) is not None:
        yield from ("", drift)


def _checkout_state(root: Path, folder: Path) -> str:
    try:
        git = checkout.opened(folder)
        if holds := checkout.work(git):
            return f"{folder} {holds}."
        if git("rev-parse", "HEAD") != git("rev-parse", f"{checkout.APPLIED_TAG}^0"):
            return f"{folder} is at an older commit than the last of its stack."
        base = pins.load_base(root, git.get("config", checkout.BASE_KEY))
        stack = series.stack_hash(series.load(base.patches))
    except StackError as e:
        return str(e)
    if stack != git.get("config", checkout.STACK_KEY):
        return f"{folder} is of an older series; nothing in it was changed."
    return f"{folder} is as it was made."
