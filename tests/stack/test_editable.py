# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
from zipfile import ZipFile

import pytest

from stack import editable, fetch, wheel
from stack.errors import StackError


@pytest.fixture
def tree(project, make_patch):
    project.add_patch("hook.patch", make_patch())
    project.write("vllm/arena.py", "arena = 1\n")
    tree = editable.tree_path(project.root)
    editable.create(project.fork, fetch.fetch(project.fork.distribution), tree)
    return tree


def sync(project, tree):
    editable.sync(project.fork, fetch.fetch(project.fork.distribution), tree)


def test_the_tree_is_the_fork(project, tree):
    assert "\nhook\n" in (tree / "vllm/engine.py").read_text()
    assert (tree / "vllm/other.py").read_text() == "other\n"
    assert "1.2.3+mark.1.cpu" in (tree / "vllm/_version.py").read_text()


def test_a_change_of_the_overlay_is_seen_at_once(project, tree):
    project.write("vllm/arena.py", "arena = 2\n")

    assert (tree / "vllm/arena.py").read_text() == "arena = 2\n"


def test_a_change_of_a_patch_is_seen_after_sync(project, tree, make_patch):
    project.write("patches/1.2.3/hook.patch", make_patch(new="another"))
    sync(project, tree)

    assert "\nanother\n" in (tree / "vllm/engine.py").read_text()


def test_what_is_gone_is_gone_after_sync(project, tree):
    project.write("patches/1.2.3/series", "")
    (project.root / "vllm/arena.py").unlink()
    sync(project, tree)

    assert (tree / "vllm/engine.py").read_text() == project.upstream["vllm/engine.py"]
    assert not (tree / "vllm/arena.py").is_symlink()


def test_a_patch_that_does_not_apply_changes_nothing(project, tree, make_patch):
    before = (tree / "vllm/engine.py").read_text()
    project.write("patches/1.2.3/hook.patch", make_patch(at=8))
    project.write("vllm/more.py", "")

    with pytest.raises(StackError, match=r"hook\.patch does not apply"):
        sync(project, tree)
    assert (tree / "vllm/engine.py").read_text() == before
    assert not (tree / "vllm/more.py").exists()


def test_stale_bytecode_is_removed(project, tree, make_patch):
    cached = tree / "vllm/__pycache__/engine.cpython-311.pyc"
    cached.parent.mkdir()
    cached.touch()
    project.write("patches/1.2.3/hook.patch", make_patch(new="hoof"))
    sync(project, tree)

    assert not cached.exists()


def test_what_a_tree_has_lost_comes_back_and_is_named(project, tree, capsys):
    (tree / "vllm/other.py").unlink()
    sync(project, tree)

    assert (tree / "vllm/other.py").read_text() == "other\n"
    assert capsys.readouterr().err == (
        f"{tree / 'vllm/other.py'} was not the base's, and is again.\n"
    )


def test_a_tree_that_cannot_be_made_anew_is_kept(project, tree, make_patch):
    project.write("patches/1.2.3/hook.patch", make_patch(at=8))

    with pytest.raises(StackError, match=r"hook\.patch does not apply"):
        editable.create(project.fork, fetch.fetch(project.fork.distribution), tree)
    assert "\nhook\n" in (tree / "vllm/engine.py").read_text()


def test_without_a_tree_sync_says_how_to_make_one(project):
    with pytest.raises(StackError, match=r"pip install -e \."):
        sync(project, editable.tree_path(project.root))


def test_a_tree_of_another_version_is_refused(project, tree):
    project.write("pyproject.toml", '[tool.vllm-fork]\ntag = "mark.2"\n')

    with pytest.raises(StackError, match=r"is of 1\.2\.3\+mark\.1\.cpu"):
        sync(project, tree)


def test_the_editable_wheel_holds_the_path_and_the_metadata(project, tree, tmp_path):
    fork = project.fork
    base = fetch.fetch(fork.distribution)
    name = wheel.build_editable(fork, base, tree, tmp_path)

    with ZipFile(tmp_path / name) as archive:
        assert archive.read("__editable__.vllm.pth").decode() == f"{tree}\n"
        assert not any(n.startswith("vllm/") for n in archive.namelist())
        assert "vllm-1.2.3+mark.1.cpu.dist-info/entry_points.txt" in archive.namelist()
