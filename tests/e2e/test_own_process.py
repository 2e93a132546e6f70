# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The clean-up that the demo and the engine tests rely on."""

import os
import signal
import sys
import uuid

import psutil
import pytest

import interrupts
from demo_lib.own_process import SHM_DIR, own_process

# Says the pid of a grandchild that is an orphan at once and deaf to SIGTERM.
ORPHAN = """
import os, signal, sys
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(os.getpid(), flush=True)
    signal.pause()
"""

MAPPED = """
import mmap, os, signal, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(fd, 4096)
kept = mmap.mmap(fd, 4096)
print("mapped", flush=True)
signal.pause()
"""


@pytest.fixture
def shm_path():
    path = SHM_DIR / f"test-own-process-{uuid.uuid4().hex}"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def handlers():
    """The demo's signal handlers, for one test."""
    with interrupts.installed():
        yield


def test_what_is_ignored_stays_ignored():
    """As by `nohup`, or in the background of a shell."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interrupts.installed():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def say_until(process, word):
    """Wait until the log has `word`; the process must not end before."""
    while word not in process.log.read_text():
        assert process.poll() is None, process.log.read_text()


def test_orphan_that_ignores_sigterm_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("demo_lib.own_process.ORPHAN_GRACE_SECONDS", 0.1)
    with own_process([sys.executable, "-c", ORPHAN], {}, tmp_path / "log") as process:
        while not (said := process.log.read_text()).endswith("\n"):
            process.wait(0)
        orphan = psutil.Process(int(said))
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE


def test_shm_of_a_killed_process_is_removed(tmp_path, shm_path):
    command = [sys.executable, "-c", MAPPED, str(shm_path)]
    with own_process(command, {}, tmp_path / "log") as process:
        say_until(process, "mapped")
    assert process.leftovers == [shm_path.name]
    assert not shm_path.exists()


def test_shm_that_was_there_before_is_kept(tmp_path, shm_path):
    shm_path.write_bytes(b"another's")
    command = [sys.executable, "-c", MAPPED, str(shm_path)]
    with own_process(command, {}, tmp_path / "log") as process:
        say_until(process, "mapped")
    assert process.leftovers == []
    assert shm_path.exists()


def test_shm_with_a_reused_name_is_kept(tmp_path, shm_path):
    command = [sys.executable, "-c", MAPPED, str(shm_path)]
    with own_process(command, {}, tmp_path / "log") as process:
        say_until(process, "mapped")
        process.poll()
        # Made while the old one exists, so that it cannot get the same inode.
        successor = shm_path.with_suffix(".new")
        successor.write_bytes(b"another's")
        os.replace(successor, shm_path)
    assert shm_path.read_bytes() == b"another's"


def test_interrupt_waits_for_the_deferred_block(handlers):
    finished = False
    with pytest.raises(interrupts.Interrupted) as interrupt, interrupts.deferred():
        signal.raise_signal(signal.SIGTERM)
        finished = True
    assert finished
    assert interrupt.value.exit_status == 128 + signal.SIGTERM
