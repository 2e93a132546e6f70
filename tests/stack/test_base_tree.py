# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from stack import base_tree, fetch, lock, pins
from stack.errors import StackError


@pytest.fixture
def two(project, make_patch, monkeypatch):
    """1.2.3 is the base of record, 1.3.0 a base with an sdist only."""
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    project.write("vllm/arena.py", "arena = 1\n")
    project.release("1.3.0", project.upstream | {"vllm/engine.py": "ENGINE = 130\n"})
    file = project.index / "vllm-1.3.0.tar.gz"
    sdist = pins.Distribution(file.name, fetch.sha256(file))
    base = replace(project.base, version="1.3.0", sdist=sdist, wheels={})
    pins.add_base(project.root, base)
    project.write("patches/1.3.0/series", "")
    return project


def test_the_base_of_record_is_what_is_installed(two):
    for version in (None, "1.2.3"):
        assert base_tree.make(two.root, version).path is None


def test_another_base_is_found_before_what_is_installed(two, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    tree = base_tree.make(two.root, "1.3.0")
    tree.use()

    code = "import vllm.engine, vllm.arena; print(vllm.engine.ENGINE, vllm.arena.arena)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "130 1\n", done.stderr
    assert os.environ["PYTHONPATH"].split(os.pathsep)[1:] == ["/elsewhere"]
    assert not tree.is_complete


def test_a_tree_follows_the_repository(two):
    path = base_tree.make(two.root, "1.3.0").path
    two.write("vllm/more.py", "")

    assert base_tree.make(two.root, "1.3.0").path == path
    assert (path / "vllm/more.py").exists()


@pytest.mark.parametrize("version", ["1.3.0", "1.2.3"])
def test_a_tree_gets_back_what_it_has_lost(two, version):
    """From the sdist, and from the wheel."""
    text = (two.root / "patches/upstream.toml").read_text()
    record = "1.2.3" if version == "1.3.0" else "1.3.0"
    two.write(
        "patches/upstream.toml",
        text.replace('default = "1.2.3"', f'default = "{record}"'),
    )
    path = base_tree.make(two.root, version).path
    engine = (path / "vllm/engine.py").read_bytes()
    (path / "vllm/engine.py").unlink()
    (path / "vllm/other.py").write_text("")
    base_tree.make(two.root, version)

    assert (path / "vllm/engine.py").read_bytes() == engine
    assert (path / "vllm/other.py").read_text() == "other\n"


def test_two_that_make_a_tree_wait_for_each_other(two):
    (two.root / "build").mkdir()
    program = (
        "from pathlib import Path; from stack import base_tree\n"
        f"base_tree.make(Path({str(two.root)!r}), '1.3.0')\n"
    )
    env = os.environ | {"PYTHONPATH": str(Path(base_tree.__file__).parents[1])}
    with ExitStack() as held:
        held.enter_context(lock.alone(two.root / "build", "nobody"))
        with subprocess.Popen(
            [sys.executable, "-c", program], env=env, stderr=subprocess.PIPE, text=True
        ) as run:
            assert any("Waiting for another run" in line for line in run.stderr)
            assert not (two.root / "build/base-1.3.0").exists()
            held.close()
    assert run.returncode == 0
    assert (two.root / "build/base-1.3.0/vllm/arena.py").exists()


def test_a_tree_from_the_wheel_is_complete(two, make_patch):
    text = (two.root / "patches/upstream.toml").read_text()
    default = text.replace('default = "1.2.3"', 'default = "1.3.0"')
    two.write("patches/upstream.toml", default)
    two.add_patch("core-add-a-hook.patch", make_patch())
    tree = base_tree.make(two.root, "1.2.3")

    assert tree.is_complete
    assert (tree.path / "vllm/engine.so").read_text() == "code"
    assert "\nhook\n" in (tree.path / "vllm/engine.py").read_text()


def test_with_the_cuda_build_there_is_no_other_base(two, monkeypatch):
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cuda")

    with pytest.raises(StackError, match="with the CPU build of vLLM 1.2.3 only"):
        base_tree.make(two.root, "1.3.0")


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["-x", "tests"], (None, ["-x", "tests"])),
        (["--base", "0.32.0", "-x"], ("0.32.0", ["-x"])),
        (["-x", "--base=0.32.0"], ("0.32.0", ["-x"])),
    ],
)
def test_the_option_is_taken_out_of_the_arguments(argv, expected):
    assert base_tree.split_option(argv) == expected


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--base"], "needs a version"),
        (["--base="], "needs a version"),
        (["--base=", "tests"], "needs a version"),
        (["--base", "0.32.0", "--base=0.33.0"], "can be given once"),
    ],
)
def test_the_option_has_one_version(argv, reason):
    with pytest.raises(StackError, match=reason):
        base_tree.split_option(argv)
