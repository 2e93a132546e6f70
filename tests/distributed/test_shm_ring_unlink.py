# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The name of a `MessageQueue`'s ring buffer in /dev/shm. No arena here."""

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

MIB = 1 << 20
TIMEOUT = 60  # seconds; only a failure waits that long


@pytest.fixture(autouse=True)
def close_queues():
    """A queue has no close. In a reference cycle (a traceback is enough) it may
    hang when it is collected: its zmq context waits for sockets that are
    collected after it."""
    yield
    for queue in [o for o in gc.get_objects() if type(o) is MessageQueue]:
        (queue.local_socket or queue.remote_socket).context.destroy(linger=0)


def ring_name(queue: MessageQueue) -> str:
    return queue.buffer.shared_memory.name


def is_there(name: str) -> bool:
    gc.collect()
    return Path("/dev/shm", name).exists()


def make_queues(n_reader: int = 2) -> list[MessageQueue]:
    """A writer and its readers in this process, before the barrier."""
    writer = MessageQueue(n_reader, n_reader, max_chunk_bytes=MIB)
    handle = writer.export_handle()
    return [
        writer,
        *(MessageQueue.create_from_handle(handle, rank) for rank in range(n_reader)),
    ]


def pass_barrier(queues: list[MessageQueue]) -> None:
    threads = [
        threading.Thread(target=queue.wait_until_ready, daemon=True) for queue in queues
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def test_name_goes_at_the_barrier_and_messages_go_on():
    queues = make_queues()
    name = ring_name(queues[0])
    assert is_there(name)
    pass_barrier(queues)
    assert not is_there(name)
    writer, *readers = queues
    for i in range(25):  # more than the ring has chunks
        writer.enqueue(i)
        assert [reader.dequeue(timeout=TIMEOUT) for reader in readers] == [i, i]


def test_queue_that_never_passes_the_barrier_takes_its_name_with_it():
    queues = make_queues()
    name = ring_name(queues[0])
    queues.clear()
    assert not is_there(name)


def test_name_that_somebody_has_removed_is_no_error():
    queues = make_queues()
    Path("/dev/shm", ring_name(queues[0])).unlink()
    pass_barrier(queues)
    queues[0].enqueue("through")
    assert queues[1].dequeue(timeout=TIMEOUT) == "through"


QUEUE_IN_A_PROCESS = """
import os, signal, sys, threading
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

# Three processes for the price of one import. Each starts a tracker of its own.
for end in ("leave", "delete", "kill"):
    pid = os.fork()
    if pid == 0:
        break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == (-signal.SIGKILL if end == "kill" else 0), (end, code)
else:
    sys.exit()

os.setpgid(0, 0)
writer = MessageQueue(1, 1, max_chunk_bytes=1 << 20)
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
thread = threading.Thread(target=reader.wait_until_ready)
thread.start()
writer.wait_until_ready()
thread.join()
writer.enqueue(bytes(1 << 19))
print(writer.buffer.shared_memory.name, flush=True)
if end == "delete":
    del writer, reader
elif end == "kill":
    os.killpg(0, signal.SIGKILL)
"""


def test_nothing_stays_and_nothing_is_said_however_processes_end():
    """Quietly, since the name is removed once: not again by the queue or by the
    resource tracker; and with that tracker killed too."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", QUEUE_IN_A_PROCESS],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    for noise in ("Error", "Exception", "leaked", "Traceback"):
        assert noise not in done.stderr, done.stderr
    names = done.stdout.split()
    assert len(names) == 3 and not any(map(is_there, names))
