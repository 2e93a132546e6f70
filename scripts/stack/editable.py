# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A tree of the fork to work on, in the place where Python imports it from.

The base's files with the patches applied; the overlay as links into the
repository, so that a change there is seen at once. After a change of a patch
`sync` brings the tree up to date.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from . import fetch, pins, target
from .errors import StackError
from .fork import Fork
from .sdist import PackageFiles
from .wheel import BaseWheel

STATE = "state.json"


def tree_path(root: Path) -> Path:
    return root / "build" / "editable"


def create(fork: Fork, base_file: Path, tree: Path) -> None:
    # Nothing must fail once the old tree is gone.
    with _open(base_file) as base:
        fork.edits(base.get)
    if tree.exists():
        shutil.rmtree(tree)
    tree.mkdir(parents=True)
    _save_state(fork, tree, [])
    _sync(fork, base_file, tree)


def sync(fork: Fork, base_file: Path, tree: Path) -> None:
    """Bring the tree's patched files and overlay up to date.

    What it has lost of the base's other files, or has of another size, comes back.
    """
    for path in _sync(fork, base_file, tree):
        print(f"{tree / path} was not the base's, and is again.", file=sys.stderr)


def _sync(fork: Fork, base_file: Path, tree: Path) -> list[str]:
    """Do it; return which of the base's files came back."""
    restored = []
    state = _load_state(fork, tree)
    with _open(base_file) as base:
        edits = fork.edits(base.get)
        managed = [*edits, *fork.overlay]
        # Before the first write: whatever an interrupted run has left, the next
        # one knows of.
        _save_state(fork, tree, {*state, *managed})
        for path in state:
            if path not in managed:
                _write(tree / path, base.get(path))
        for path, data in edits.items():
            _write(tree / path, data)
        for path, size, is_executable in base.files():
            if path not in managed and _size(tree / path) != size:
                _write(tree / path, base.get(path))
                if is_executable:
                    (tree / path).chmod(0o755)
                restored.append(path)
    for path, source in fork.overlay.items():
        _link(tree / path, source)
    _save_state(fork, tree, managed)
    return restored


@contextmanager
def _open(base_file: Path) -> Iterator[BaseWheel | PackageFiles]:
    if base_file.suffix == ".whl":
        with BaseWheel(base_file) as wheel:
            yield wheel
    else:
        yield PackageFiles(base_file)


def drift(root: Path) -> str | None:
    """Say in what the editable tree, if there is one, lags behind the patches."""
    tree = tree_path(root)
    if not (tree / STATE).exists():
        return None
    try:
        fork = Fork.load(root, pins.load_base(root), target.detect())
        _load_state(fork, tree)
        base_file = fetch.cached_path(fork.distribution)
        if not base_file.is_file():
            return None
        if not fetch.is_sound(base_file, fork.distribution):
            return f"The cached {base_file} is damaged: remove it."
        with BaseWheel(base_file) as base:
            edits = fork.edits(base.get)
    except StackError as e:
        return str(e)
    stale = [path for path, data in edits.items() if _content(tree / path) != data] + [
        path for path in fork.overlay if not (tree / path).is_symlink()
    ]
    if stale:
        return (
            f"The editable tree {tree} is behind in {', '.join(stale)}: "
            "run `scripts/fork sync`."
        )
    return None


def _write(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink(missing_ok=True)
    elif path.is_symlink() or not path.is_file() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".new")
        draft.write_bytes(data)
        os.replace(draft, path)
    else:
        return
    _forget_bytecode(path)


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _link(path: Path, source: Path) -> None:
    if path.is_symlink() and path.readlink() == source:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(source)
    _forget_bytecode(path)


def _forget_bytecode(path: Path) -> None:
    # Bytecode is told stale by size and whole seconds: two edits within one
    # second can look the same.
    for cached in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        cached.unlink(missing_ok=True)


def _identity(fork: Fork) -> dict[str, str]:
    return {"version": fork.version, "base_sha256": fork.distribution.sha256}


def _save_state(fork: Fork, tree: Path, managed: Iterable[str]) -> None:
    state = _identity(fork) | {"managed": sorted(managed)}
    draft = tree / f"{STATE}.new"
    draft.write_text(json.dumps(state, indent=2))
    os.replace(draft, tree / STATE)


def _load_state(fork: Fork, tree: Path) -> list[str]:
    try:
        state = json.loads((tree / STATE).read_text())
        managed = state.pop("managed")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise StackError(
            f"There is no editable tree in {tree}; `pip install -e .` makes it."
        ) from None
    if state != _identity(fork):
        raise StackError(
            f"The editable tree in {tree} is of {state.get('version')}, the repository "
            f"is at {fork.version}: run `pip install -e .` again."
        )
    return managed
