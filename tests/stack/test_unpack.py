# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import io
import os
import signal
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from threading import Event

import pytest

from stack import unpack


@pytest.fixture
def archive(tmp_path):
    (tmp_path / "src").mkdir()
    for name in ("one.py", "two.py"):
        (tmp_path / "src" / name).write_text(f"{name}\n")
    (tmp_path / "src/one.py").chmod(0o755)
    (tmp_path / "src/link.py").symlink_to("one.py")
    path = tmp_path / "vllm-1.2.3.tar.gz"
    with tarfile.open(path, "w:gz") as file:
        file.add(tmp_path / "src", "vllm-1.2.3")
    return path


def make(archive, folder, key="it", **options):
    return unpack.unpacked(
        archive, folder, key, lambda path: path != "two.py", **options
    )


def test_the_wanted_files_are_there(archive, tmp_path):
    folder = make(archive, tmp_path / "cache/it")

    assert (folder / "one.py").read_text() == "one.py\n"
    assert os.access(folder / "one.py", os.X_OK)
    assert (folder / "link.py").readlink().name == "one.py"
    assert not (folder / "two.py").exists()


def test_what_is_whole_is_left_alone(archive, tmp_path):
    folder = make(archive, tmp_path / "it")
    (folder / "__pycache__").mkdir()

    make(tmp_path / "gone.tar.gz", folder)
    assert (folder / "__pycache__").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "one.py").unlink(),
        lambda folder: (folder / "one.py").write_text("one"),
        lambda folder: (folder / unpack.LISTING).write_text("[]"),
        lambda folder: (folder / unpack.LISTING).unlink(),
    ],
)
def test_what_is_not_whole_is_made_anew(archive, tmp_path, damage):
    folder = make(archive, tmp_path / "it")
    damage(folder)

    make(archive, folder)
    assert (folder / "one.py").read_text() == "one.py\n"


def test_another_key_makes_it_anew(archive, tmp_path):
    def edit(folder):
        (folder / "one.py").write_text("changed\n")

    folder = make(archive, tmp_path / "it")
    make(archive, folder, "other", edit=edit)

    assert (folder / "one.py").read_text() == "changed\n"


def test_what_a_kill_left_goes(archive, tmp_path):
    def edit(folder):
        os.kill(os.getpid(), signal.SIGKILL)

    run = get_context("fork").Process(
        target=make, args=(archive, tmp_path / "cache/it"), kwargs={"edit": edit}
    )
    run.start()
    run.join()
    assert len(list((tmp_path / "cache").iterdir())) == 1

    make(archive, tmp_path / "cache/it")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["it"]


def test_an_edit_that_fails_leaves_what_there_was(archive, tmp_path):
    def edit(folder):
        raise ValueError

    folder = make(archive, tmp_path / "it")
    with pytest.raises(ValueError):
        make(archive, folder, "other", edit=edit)
    assert (folder / "one.py").read_text() == "one.py\n"


def test_of_several_that_ask_at_once_one_makes_it(archive, tmp_path, monkeypatch):
    inside, other_is_there = Event(), Event()
    calls = []

    def edit(folder):
        calls.append(folder)
        if len(calls) == 1:
            inside.set()
            other_is_there.wait()
        other_is_there.set()

    stderr = io.StringIO()
    # Says that it waits; or else it makes it, too, and gets to `edit`.
    monkeypatch.setattr(stderr, "write", lambda text: other_is_there.set())
    monkeypatch.setattr(sys, "stderr", stderr)
    with ThreadPoolExecutor() as pool:
        one = pool.submit(make, archive, tmp_path / "it", edit=edit)
        inside.wait()
        two = pool.submit(make, archive, tmp_path / "it", edit=edit)
    assert one.result() == two.result() == tmp_path / "it"
    assert len(calls) == 1
