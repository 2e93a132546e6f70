# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Upstream's functions that the fork relies on: those that the patches change, and
those that the overlay imports. Their signatures are read, nothing is imported."""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import StackError

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Gives a file's content, None where there is none.
Read = Callable[[str], bytes | None]


@dataclass(frozen=True)
class Interface:
    """A function, as in ("vllm/a.py", "Class.method")."""

    path: str
    name: str
    signature: str
    """Parameters with defaults and annotations, and what it returns."""


def hooked(paths: Iterable[str], base: Read, patched: Read) -> list[Interface]:
    """Return the functions of the paths that the patches change.

    Args:
        paths: The files that the patches touch.
        base: Gives a file of the base.
        patched: Gives a file as the patches leave it.

    """
    found = []
    for path in sorted(path for path in paths if path.endswith(".py")):
        before = {name: ast.unparse(f) for name, f in _functions(base(path)).items()}
        for name, function in _functions(patched(path)).items():
            if ast.unparse(function) != before.get(name):
                found.append(Interface(path, name, _signature(function)))
    return found


def lacking(paths: Iterable[str], base: Read, patched: Read, other: Read) -> list[str]:
    """Return what the patches change and another release does not have.

    Args:
        paths: The files that the patches touch.
        base: Gives a file of the base.
        patched: Gives a file as the patches leave it.
        other: Gives a file of the release.

    """
    found = []
    for path in sorted(path for path in paths if base(path) is not None):
        if other(path) is None:
            found.append(path)
        elif path.endswith(".py"):
            try:
                before, there = _functions(base(path)), _functions(other(path))
                hooks = hooked([path], base, patched)
            except StackError:
                # A release may be written for a Python newer than this one.
                continue
            found += [
                f"{hook.name} of {path}"
                for hook in hooks
                if hook.name in before and hook.name not in there
            ]
    return found


def imported(overlay: Mapping[str, Path], read: Read) -> list[Interface]:
    """Return upstream's functions that the overlay imports.

    Args:
        overlay: Our modules.
        read: Gives a file as the patches leave it.

    """
    found = []
    for path, names in sorted(imports(overlay).items()):
        for name, function in _functions(read(path)).items():
            if name in names:
                found.append(Interface(path, name, _signature(function)))
    return found


def imports(overlay: Mapping[str, Path]) -> dict[str, set[str]]:
    """Return what the overlay imports from files of upstream's package, by file.

    A module is in it under both names that its file may have.
    """
    found: dict[str, set[str]] = {}
    for source in overlay.values():
        for node in ast.walk(_parsed(source.read_bytes())):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                name = node.module.replace(".", "/")
                for path in (f"{name}.py", f"{name}/__init__.py"):
                    if path.startswith("vllm/") and path not in overlay:
                        found.setdefault(path, set()).update(a.name for a in node.names)
    return found


def missing(wanted: Iterable[Interface], read: Read) -> Iterator[str]:
    """Yield one sentence for each function that is not there as it is wanted."""
    for interface in wanted:
        function = _functions(read(interface.path)).get(interface.name)
        where = f"{interface.path}: {interface.name}"
        if function is None:
            yield f"{where}{interface.signature} is not there."
        elif (signature := _signature(function)) != interface.signature:
            yield f"{where} is {signature}, where {interface.signature} is relied on."


def _functions(source: bytes | None) -> dict[str, Function]:
    """Return the functions of a module and its classes, by name."""
    found: dict[str, Function] = {}
    for node in _parsed(source or b"").body:
        if isinstance(node, Function):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, Function):
                    # Of overloads the last one, which is the function.
                    found[f"{node.name}.{inner.name}"] = inner
    return found


def _parsed(source: bytes) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as e:
        raise StackError(
            f"a patch or the overlay is not valid Python: {e.msg} in {e.text!r}."
        ) from e


def _signature(function: Function) -> str:
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"({ast.unparse(function.args)}){returns}"
