# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The arena on a small /dev/shm that fills up, in a mount namespace of its own.

Each scenario is a process: where it goes wrong the end is SIGBUS.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed import private_shm

ROOT = Path(__file__).parents[2]

if not private_shm.is_allowed():
    pytest.skip("mount namespaces are not allowed here", allow_module_level=True)

PRELUDE = """
import os, sys, threading, torch
sys.path.insert(0, sys.argv[1])
from tests.distributed.arena_testing import MIB, free_slots, make_arenas, patterned
from vllm.distributed.device_communicators import shm_broadcast, shm_tensor_arena
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.distributed.device_communicators.shm_tensor_arena import ShmTensorArena

def fill(leave_pages=0):
    fs = os.statvfs("/dev/shm")
    with open("/dev/shm/filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, (fs.f_bavail - leave_pages) * fs.f_bsize)
"""


def run(mib: int, scenario: str) -> str:
    """Run a scenario on a /dev/shm of `mib` MiB; return what it printed."""
    done = subprocess.run(
        private_shm.command(
            mib,
            [sys.executable, "-W", "ignore", "-c", PRELUDE + scenario, str(ROOT)],
        ),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    return done.stdout


def test_too_small_for_the_reservation_fails_at_start():
    assert "Increase /dev/shm" in run(
        16,
        """
try:
    ShmTensorArena(1, MIB, 32)
except RuntimeError as e:
    print(e)
assert not os.listdir("/dev/shm")
""",
    )


def test_filled_by_others_after_start():
    """Readers attach, the writer declines, and goes on when there is room."""
    run(
        64,
        """
writer = ShmTensorArena(1, MIB, 32)
fill()
reader = ShmTensorArena(*writer.handle(), reader_rank=0)
writer.on_barrier(); reader.on_barrier()
for _ in range(3):
    assert writer.write_tensor(patterned(2 * MIB)) is None
os.unlink("/dev/shm/filler")
slot = writer.write_tensor(patterned(2 * MIB))
got = reader.get_tensor(slot, 2 * MIB, torch.uint8, (2 * MIB,))
assert torch.equal(got, patterned(2 * MIB))
""",
    )


@pytest.mark.parametrize("pages", [1, 2, 3, 10, 300])
def test_a_few_pages_left(pages: int):
    run(
        64,
        f"""
writer, readers = make_arenas(n_reader=8, slot_bytes=4096, n_slots=1024)
fill({pages})
while writer.write_tensor(patterned(4096)) is not None:
    pass
""",
    )


def test_full_before_start():
    assert "Increase" in run(
        16,
        """
fill()
try:
    ShmTensorArena(1, 4096, 1)
except RuntimeError as e:
    print(e)
""",
    )


def test_arena_leaves_room_for_the_rings():
    """The ring's pages are touched late, and nothing takes them before."""
    run(
        96,
        """
init = ShmTensorArena.__init__
ShmTensorArena.__init__ = lambda self, n, *args, **kwargs: init(
    self, n, *(args or (MIB, 80)), **kwargs)
writer = MessageQueue(1, 1, max_chunk_bytes=MIB // 2, enable_shm_tensor_arena=True)
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
thread = threading.Thread(target=reader.wait_until_ready)
thread.start(); writer.wait_until_ready(); thread.join()
kept = []
for i in range(8):
    writer.enqueue(patterned(12 * MIB, i))
    kept.append(reader.dequeue(timeout=60))
for i in range(20):  # all of the ring
    writer.enqueue(bytes(400_000))
    assert len(reader.dequeue(timeout=60)) == 400_000
assert all(torch.equal(t, patterned(12 * MIB, i)) for i, t in enumerate(kept))
""",
    )


@pytest.fixture
def limited_cgroup() -> Iterator[Path]:
    """A memory cgroup of 700 MiB below the mount's root, as systemd makes them."""
    v1 = Path("/sys/fs/cgroup/memory")
    parent, limit = (
        (v1, "memory.limit_in_bytes")
        if v1.is_dir()
        else (Path("/sys/fs/cgroup"), "memory.max")
    )
    group = parent / f"shm-arena-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as e:
        pytest.skip(f"no cgroup can be made here: {e}")
    try:
        (group / limit).write_text(str(700 << 20))
    except OSError as e:
        group.rmdir()
        pytest.skip(f"no memory limit can be set here: {e}")
    yield group
    # Busy as long as a process is in it: a resource tracker ends a moment after
    # the process that it belongs to.
    deadline = time.monotonic() + 60
    while True:
        try:
            return group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_limit_of_a_cgroup_is_not_exceeded(limited_cgroup: Path):
    """Where it is not seen, the end is SIGKILL."""
    assert "declined" in run(
        2000,
        f"""
with open("{limited_cgroup}/cgroup.procs", "w") as file:
    file.write(str(os.getpid()))
writer, (reader,) = make_arenas(slot_bytes=MIB, n_slots=1024)
sent = patterned(64 * MIB)
print(["declined" for _ in range(16) if writer.write_tensor(sent) is None])
""",
    )
