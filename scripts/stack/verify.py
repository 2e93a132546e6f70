# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whether a base's stack does what it is for, beyond its form.

All from the base's sdist: that the patches apply exactly and export to the same
bytes; that upstream's functions are as the fork relies on; that what the fork
changes and adds can be imported, and, with the flag off, leaves every pickled byte
and every import as the base has it.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from . import checkout, fetch, interfaces, overlay, pins, sdist, series, unpack
from .errors import StackError
from .fork import package_edits
from .overlay import Overlay
from .pins import Base

PROBE = Path(__file__).with_name("verify_probe.py")
# Importing vLLM takes ten seconds; a minute on a busy machine.
PROBE_SECONDS = 300


def problems(root: Path, base: Base) -> list[str]:
    """Return one sentence for everything that does not hold."""
    try:
        stack = _Stack(root, base)
        found = [*_export_problems(stack), *_interface_problems(stack)]
        # Without these the imports would only fail again, in more words.
        found = found or _run_problems(stack)
    except StackError as e:
        found = [str(e)]
    return [f"vLLM {base.version}: {problem}" for problem in found]


class _Stack:
    """The files of a base, and as its patches leave them."""

    def __init__(self, root: Path, base: Base):
        self.root = root
        self.base = base
        self.sdist = fetch.fetch(base.sdist)
        self.patches = series.load(base.patches)
        self.overlay = overlay.package_files(root)
        touched = series.touched(self.patches)
        self.read_base = sdist.reader(
            self.sdist, [*touched, *self.overlay, *interfaces.imports(self.overlay)]
        )
        series.apply(self.patches, self.read_base)
        self.edits = package_edits(base, self.patches, self.overlay, self.read_base)

    def read(self, path: str) -> bytes | None:
        return self.edits[path] if path in self.edits else self.read_base(path)

    def interfaces(self) -> list[interfaces.Interface]:
        return [
            *interfaces.hooked(self.edits, self.read_base, self.read),
            *interfaces.imported(self.overlay, self.read),
        ]


def _export_problems(stack: _Stack) -> list[str]:
    nothing = Overlay(stack.root, {})
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "checkout")
        touched = series.touched(stack.patches)
        checkout.create(stack.base, stack.sdist, folder, nothing, touched.__contains__)
        exported = checkout.patches_of(
            checkout.opened(folder), checkout.BASE_TAG, nothing
        )
    given = {patch.name: patch.text for patch in stack.patches}
    if list(exported) != list(given):
        return [f"exported, the patches are {', '.join(exported)}."]
    return [
        f"{name} is not what a checkout of it exports: export it."
        for name in given
        if exported[name] != given[name]
    ]


def _interface_problems(stack: _Stack) -> list[str]:
    """Compare with what the patches of the base of record were written for."""
    record = pins.load_base(stack.root)
    if record.version == stack.base.version:
        return []
    wanted = _Stack(stack.root, record).interfaces()
    paths = {interface.path for interface in wanted}
    contents = sdist.reader(stack.sdist, paths)

    def read(path: str) -> bytes | None:
        return stack.edits[path] if path in stack.edits else contents(path)

    return list(interfaces.missing(wanted, read))


def _run_problems(stack: _Stack) -> list[str]:
    with tempfile.TemporaryDirectory() as scratch:
        edited = {}
        for path, data in stack.edits.items():
            checkout.write(Path(scratch, path), data)
            if data is not None and path.endswith(".py"):
                edited[path] = str(Path(scratch, path))
        task = {
            "tree": str(package_tree(stack.base)),
            "edited": edited,
            "deleted": [path for path, data in stack.edits.items() if data is None],
            "overlay": {path: str(file) for path, file in stack.overlay.items()},
        }
        try:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", str(PROBE)],
                input=json.dumps(task),
                capture_output=True,
                text=True,
                timeout=PROBE_SECONDS,
                cwd=scratch,
                env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"},
            )
        except subprocess.TimeoutExpired:
            return [f"importing it took more than {PROBE_SECONDS} s."]
    if done.returncode:
        why = done.stderr.strip().splitlines() or ["no reason given"]
        return [f"it does not run: {why[-1]}"]
    for line in done.stderr.splitlines():
        if line.startswith("Not imported"):
            print(f"vLLM {stack.base.version}: {line}", file=sys.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def package_tree(base: Base) -> Path:
    """Return a folder with the Python files of the base's package, unpatched."""
    return unpack.unpacked(
        fetch.fetch(base.sdist),
        fetch.cache_dir() / "tree" / base.sdist.sha256,
        base.sdist.sha256,
        lambda path: path.startswith("vllm/") and path.endswith(".py"),
    )
