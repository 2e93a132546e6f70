# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A `MessageQueue` with an arena."""

import faulthandler
import gc
import multiprocessing
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch

from tests.distributed.arena_testing import (
    MIB,
    free_slots,
    in_dev_shm,
    is_in_shared_memory,
    patterned,
)
from tests.distributed.queue_testing import (
    BIG,
    N_SLOTS,
    TIMEOUT,
    close_queues,
    is_diverted,
    pass_barrier,
    shrink_arenas,
)
from vllm.distributed.device_communicators import shm_broadcast, shm_tensor_arena
from vllm.distributed.device_communicators.shm_arena import stats
from vllm.distributed.device_communicators.shm_broadcast import (
    SHM_READER_RECHECK_INTERVAL_MS,
    Handle,
    MessageQueue,
)


@pytest.fixture(autouse=True)
def small_queues(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    shrink_arenas(monkeypatch)
    yield
    close_queues()


def make_queues(n_reader: int = 1, **kwargs: Any) -> list[MessageQueue]:
    """A writer and its readers in this process, past the barrier."""
    kwargs = {"enable_shm_tensor_arena": True, "max_chunk_bytes": MIB} | kwargs
    writer = MessageQueue(n_reader, n_reader, **kwargs)
    handle = writer.export_handle()
    readers = [MessageQueue.create_from_handle(handle, i) for i in range(n_reader)]
    pass_barrier(writer, readers)
    return [writer, *readers]


def segment_names(writer: MessageQueue) -> tuple[str, str]:
    assert writer.tensor_arena is not None
    return (
        writer.buffer.shared_memory.name,
        writer.tensor_arena.shared_memory.name,
    )


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("broken")


# ---- Processes --------------------------------------------------------------


def read_and_report(
    handle: Handle, rank: int, n_messages: int, report: Connection
) -> None:
    reader = MessageQueue.create_from_handle(handle, rank)
    reader.wait_until_ready()
    kept = []
    for _ in range(n_messages):
        message = reader.dequeue(timeout=TIMEOUT)
        kept.append(message["big"])
        assert reader.tensor_arena is not None
        name = reader.tensor_arena.shared_memory.name
        report.send((message["i"], is_in_shared_memory(message["big"], name)))
    # All of them again, now that the later ones have been written.
    report.send([checksum(t) for t in kept])


def checksum(t: torch.Tensor) -> int:
    # Not torch's sum: its OpenMP threads do not survive the fork.
    return zlib.crc32(t.numpy())


def receive(pipe: Connection) -> Any:
    assert pipe.poll(TIMEOUT), "nothing from the reader"
    return pipe.recv()


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_broadcast_to_processes(method: str):
    """Two processes each read six tensors and keep them; four fit the arena."""
    context = multiprocessing.get_context(method)
    writer = MessageQueue(2, 2, max_chunk_bytes=MIB, enable_shm_tensor_arena=True)
    pipes, processes = [], []
    for rank in range(2):
        parent, child = context.Pipe()
        args = (writer.export_handle(), rank, 6, child)
        processes.append(context.Process(target=read_and_report, args=args))
        processes[-1].start()
        child.close()
        pipes.append(parent)
    writer.wait_until_ready()
    sent = [patterned(BIG, seed) for seed in range(6)]
    for i, t in enumerate(sent):
        writer.enqueue({"i": i, "big": t}, timeout=TIMEOUT)
    for pipe in pipes:
        assert [receive(pipe) for _ in sent] == [(i, i < 4) for i in range(6)]
        assert receive(pipe) == [checksum(t) for t in sent]
    for process in processes:
        process.join(TIMEOUT)
        assert process.exitcode == 0
    names = segment_names(writer)
    del writer
    assert not in_dev_shm(*names)


def write_and_report(handle: Handle, rank: int, report: Connection) -> None:
    reader = MessageQueue.create_from_handle(handle, rank)
    reader.wait_until_ready()
    got = reader.dequeue(timeout=TIMEOUT)
    report.send(checksum(got))
    # The interpreter would otherwise say at length where it died.
    faulthandler.disable()
    got[0] = 0
    report.send("it has written")


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_worker_that_writes_into_a_tensor_ends_and_changes_nothing(method: str):
    """Else the other workers would go on with other values than it."""
    context = multiprocessing.get_context(method)
    writer = MessageQueue(2, 2, max_chunk_bytes=MIB, enable_shm_tensor_arena=True)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    pipe, child = context.Pipe()
    args = (writer.export_handle(), 1, child)
    process = context.Process(target=write_and_report, args=args)
    process.start()
    child.close()
    pass_barrier(writer, [reader])
    writer.enqueue(patterned(BIG), timeout=TIMEOUT)
    got = reader.dequeue(timeout=TIMEOUT)
    assert is_diverted(writer, got)
    assert receive(pipe) == checksum(patterned(BIG))
    process.join(TIMEOUT)
    assert process.exitcode == -signal.SIGSEGV
    with pytest.raises(EOFError):
        pipe.recv()
    assert torch.equal(got, patterned(BIG))
    writer.enqueue(patterned(BIG, 1), timeout=TIMEOUT)
    assert torch.equal(reader.dequeue(timeout=TIMEOUT), patterned(BIG, 1))


# ---- One process ------------------------------------------------------------


def test_large_tensors_are_diverted_and_small_ones_are_not():
    writer, *readers = make_queues(2)
    sent = {"big": patterned(BIG), "small": patterned(1000), "text": "x"}
    writer.enqueue(sent)
    for reader in readers:
        got = reader.dequeue(timeout=TIMEOUT)
        assert is_diverted(writer, got["big"]) and torch.equal(got["big"], sent["big"])
        assert not is_diverted(writer, got["small"])
        assert torch.equal(got["small"], sent["small"]) and got["text"] == "x"


def test_message_with_diverted_and_overflowing_tensors():
    """A declined tensor larger than a chunk goes over the socket, in the same
    message as a stub."""
    writer, reader = make_queues()
    sent = [patterned(BIG), patterned(BIG, 1).view(3, -1).t()]
    writer.enqueue(sent)
    got = reader.dequeue(timeout=TIMEOUT)
    assert [is_diverted(writer, t) for t in got] == [True, False]
    assert all(torch.equal(a, b) for a, b in zip(got, sent))


def test_slots_come_back_over_many_messages():
    writer, reader = make_queues()
    for i in range(20):
        writer.enqueue(patterned(BIG, i))
        got = reader.dequeue(timeout=TIMEOUT)
        assert is_diverted(writer, got) and torch.equal(got, patterned(BIG, i))


def test_retained_tensor_keeps_its_bytes():
    """As `prompt_embeds` are retained over the steps of a chunked prefill."""
    writer, reader = make_queues()
    writer.enqueue(patterned(BIG))
    retained = reader.dequeue(timeout=TIMEOUT)[100:]
    for i in range(1, 20):
        writer.enqueue(patterned(BIG, i))
        assert is_diverted(writer, reader.dequeue(timeout=TIMEOUT))
    assert torch.equal(retained, patterned(BIG)[100:])


def test_source_may_change_after_enqueue():
    writer, reader = make_queues()
    sent = patterned(BIG)
    writer.enqueue(sent)
    sent.zero_()
    assert torch.equal(reader.dequeue(timeout=TIMEOUT), patterned(BIG))


def test_failed_pickling_gives_slots_back():
    writer, reader = make_queues()
    with pytest.raises((AttributeError, TypeError, ValueError)):
        writer.enqueue([patterned(BIG), threading.Lock()])
    assert free_slots(writer.tensor_arena) == N_SLOTS
    writer.enqueue("next")
    assert reader.dequeue(timeout=TIMEOUT) == "next"


def test_timeout_of_the_ring_gives_slots_back():
    writer, reader = make_queues(max_chunks=1)
    writer.enqueue("first")
    with pytest.raises(TimeoutError):
        writer.enqueue(patterned(BIG), timeout=0.01)
    assert free_slots(writer.tensor_arena) == N_SLOTS
    assert reader.dequeue(timeout=TIMEOUT) == "first"
    writer.enqueue(patterned(BIG))
    assert is_diverted(writer, reader.dequeue(timeout=TIMEOUT))


def test_failure_after_the_message_is_out_keeps_its_slots():
    writer, reader = make_queues()
    with (
        mock.patch.object(writer._spin_condition, "notify", fail),
        pytest.raises(RuntimeError, match="broken"),
    ):
        writer.enqueue(patterned(BIG))
    assert free_slots(writer.tensor_arena) == N_SLOTS - 9
    assert torch.equal(reader.dequeue(timeout=TIMEOUT), patterned(BIG))


def test_failed_socket_send_gives_slots_back():
    writer, _ = make_queues()
    with mock.patch.object(writer, "local_socket") as socket:
        socket.send_multipart = fail
        with pytest.raises(RuntimeError, match="broken"):
            writer.enqueue([patterned(BIG), patterned(BIG).view(3, -1).t()])
    assert free_slots(writer.tensor_arena) == N_SLOTS


# ---- Releases while waiting -------------------------------------------------


class RecordingPoller:
    """Stands in for a reader's poller: tells each time-out, waits for nothing."""

    def __init__(self) -> None:
        self.timeouts: SimpleQueue[int] = SimpleQueue()
        self.go_on = threading.Semaphore(0)

    def poll(self, timeout: int) -> list:
        self.timeouts.put(timeout)
        self.go_on.acquire(timeout=TIMEOUT)
        return []

    def next_timeout(self) -> int:
        return self.timeouts.get(timeout=TIMEOUT)


@pytest.fixture
def parked():
    """(writer, reader, poller, tensors): the reader is parked in `dequeue`,
    while `tensors` holds what it has read."""
    writer, reader = make_queues()
    writer.enqueue(patterned(BIG))
    tensors = [reader.dequeue(timeout=TIMEOUT)]
    reader._spin_condition.busy_loop_s = -1
    poller = RecordingPoller()
    reader._spin_condition.poller = poller

    def dequeue() -> None:
        with pytest.raises(RuntimeError, match="cancelled"):
            reader.dequeue(indefinite=True)

    thread = threading.Thread(target=dequeue)
    thread.start()
    yield writer, reader, poller, tensors
    reader.shutdown()
    poller.go_on.release(1000)
    thread.join(TIMEOUT)
    assert not thread.is_alive()


def test_parked_reader_releases_what_is_freed_after_it_parked(parked):
    writer, _, poller, tensors = parked
    assert poller.next_timeout() <= 100  # ms: the bound on giving slots back
    assert free_slots(writer.tensor_arena) == N_SLOTS - 9
    tensors.clear()
    poller.go_on.release()
    poller.next_timeout()
    assert free_slots(writer.tensor_arena) == N_SLOTS


def test_parked_reader_with_nothing_out_does_not_poll(parked):
    _, reader, poller, tensors = parked
    poller.next_timeout()
    tensors.clear()
    poller.go_on.release(2)
    assert poller.next_timeout() == SHM_READER_RECHECK_INTERVAL_MS
    assert poller.next_timeout() == SHM_READER_RECHECK_INTERVAL_MS


def test_a_shorter_time_out_stays_shorter(parked):
    writer, reader, poller, _ = parked
    assert reader.tensor_arena.while_waiting(3) == 3
    assert reader.tensor_arena.while_waiting(None) <= 100


def test_shutdown_wakes_a_reader_that_holds_tensors():
    """With the real poller, and no other way for it to end within the test."""
    writer, reader = make_queues()
    writer.enqueue(patterned(BIG))
    held = reader.dequeue(timeout=TIMEOUT)
    reader._spin_condition.busy_loop_s = -1
    parked = threading.Event()
    while_waiting = reader.tensor_arena.while_waiting

    def wait_for_ever(timeout_ms: int | None) -> None:
        while_waiting(timeout_ms)
        parked.set()

    with (
        mock.patch.object(reader.tensor_arena, "while_waiting", wait_for_ever),
        ThreadPoolExecutor(1) as thread,
    ):
        ended = thread.submit(reader.dequeue, indefinite=True)
        assert parked.wait(TIMEOUT)
        reader.shutdown()
        with pytest.raises(RuntimeError, match="cancelled"):
            ended.result(TIMEOUT)
    assert torch.equal(held, patterned(BIG))


def test_reader_opens_the_arena_before_it_subscribes(monkeypatch):
    """Once the writer has all subscriptions, it must know who could open it."""
    writer = MessageQueue(1, 1, enable_shm_tensor_arena=True)

    def attach(*_: Any) -> None:
        assert not writer.local_socket.poll(timeout=500), "has subscribed"

    monkeypatch.setattr(shm_tensor_arena.ShmTensorArena, "attach", attach)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    assert writer.local_socket.poll(timeout=TIMEOUT * 1000)
    pass_barrier(writer, [reader])


# ---- Readers that cannot, and queues that have none -------------------------


def test_start_that_finds_no_room_leaves_no_socket(monkeypatch):
    """An open one would keep its context, and a collection, from ending."""
    error = RuntimeError("no room in /dev/shm")
    monkeypatch.setattr(
        shm_tensor_arena, "ShmTensorArena", mock.Mock(side_effect=error)
    )
    context = mock.Mock()
    monkeypatch.setattr(shm_broadcast, "Context", context)
    with pytest.raises(RuntimeError, match="no room"):
        MessageQueue(1, 1, enable_shm_tensor_arena=True)
    context().socket.assert_not_called()


def test_reader_that_cannot_open_the_arena_gets_everything(monkeypatch):
    warning = mock.Mock()
    monkeypatch.setattr(shm_tensor_arena.logger, "warning", warning)
    writer = MessageQueue(2, 2, max_chunk_bytes=MIB, enable_shm_tensor_arena=True)
    handle = writer.export_handle()
    *sizes, _ = handle.tensor_arena_handle
    elsewhere = replace(handle, tensor_arena_handle=(*sizes, "vllm_arena_none"))
    monkeypatch.setattr(stats.logger, "warning", warning)
    readers = [
        MessageQueue.create_from_handle(handle, 0),
        MessageQueue.create_from_handle(elsewhere, 1),
    ]
    pass_barrier(writer, readers)
    assert warning.call_count == 2  # the reader's and the writer's
    assert "out-of-band" in warning.call_args_list[1].args[0]
    assert warning.call_args_list[1].args[1] == [1]
    for i in range(2):
        writer.enqueue(patterned(BIG, i))
        for reader in readers:
            got = reader.dequeue(timeout=TIMEOUT)
            assert torch.equal(got, patterned(BIG, i)) and not is_diverted(writer, got)
    assert warning.call_count == 2


def test_stuck_reader_is_said_once_and_does_not_stop_the_writer(monkeypatch):
    """It has read one message and reads no more; the ring has room for ten."""
    warning = mock.Mock()
    monkeypatch.setattr(stats.logger, "warning", warning)
    writer, reader, stuck = make_queues(2)
    writer.enqueue("first")
    assert reader.dequeue(timeout=TIMEOUT) == stuck.dequeue(timeout=TIMEOUT)
    diverted = []
    for i in range(8):
        writer.enqueue(patterned(BIG, i))
        got = reader.dequeue(timeout=TIMEOUT)
        assert torch.equal(got, patterned(BIG, i))
        diverted.append(is_diverted(writer, got))
        del got
    assert diverted == [True] * 4 + [False] * 4
    (call,) = warning.call_args_list
    # The other has not been back to say that it is done with its last one.
    assert "no_room" in call.args and call.args[-1].endswith("hold [9, 36] MiB")

    for i in range(8):
        assert torch.equal(stuck.dequeue(timeout=TIMEOUT), patterned(BIG, i))
    for queue in (reader, stuck):
        queue.tensor_arena.flush_releases()
    writer.enqueue(patterned(BIG))
    assert is_diverted(writer, reader.dequeue(timeout=TIMEOUT))
    assert warning.call_count == 1


def test_message_that_fails_to_load_holds_only_what_comes_after_the_failure():
    """In vLLM the worker ends; its queue's other readers do not."""
    writer, reader = make_queues()
    writer.enqueue([patterned(BIG), FailsToLoad(), patterned(BIG)])
    with pytest.raises(RuntimeError, match="broken"):
        reader.dequeue(timeout=TIMEOUT)
    gc.collect()
    reader.tensor_arena.flush_releases()
    n = -(-BIG // MIB)
    assert free_slots(writer.tensor_arena) == N_SLOTS - n
    writer.enqueue(patterned(BIG, 1))
    assert torch.equal(reader.dequeue(timeout=TIMEOUT), patterned(BIG, 1))


class FailsToLoad:
    def __reduce__(self) -> Any:
        return fail, ()


def test_queue_with_remote_readers_only_has_no_arena_and_works(monkeypatch):
    warning = mock.Mock()
    monkeypatch.setattr(shm_broadcast.logger, "warning", warning)
    writer = MessageQueue(1, 0, connect_ip="127.0.0.1", enable_shm_tensor_arena=True)
    assert writer.tensor_arena is None
    assert "no effect" in warning.call_args.args[0]
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    pass_barrier(writer, [reader])
    writer.enqueue(patterned(BIG))
    assert torch.equal(reader.dequeue(timeout=TIMEOUT), patterned(BIG))


def test_queue_without_the_flag_has_no_arena():
    writer, reader = make_queues(enable_shm_tensor_arena=False)
    assert writer.tensor_arena is None and reader.tensor_arena is None
    assert writer.export_handle().tensor_arena_handle is None
    writer.enqueue(patterned(BIG))
    assert torch.equal(reader.dequeue(timeout=TIMEOUT), patterned(BIG))


def here(call: Callable[[], None]) -> None:
    call()


def in_another_thread(call: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(call).result(TIMEOUT)


def while_pickled(call: Callable[[], None]) -> Any:
    """An object that makes the call when it is pickled."""

    class Interlude:
        def __reduce__(self) -> tuple:
            call()
            return str, ("after it",)

    return Interlude()


@pytest.mark.parametrize("run", [here, in_another_thread])
def test_message_sent_while_another_is_pickled_does_not_commit_it(run):
    writer, reader = make_queues()
    inner = while_pickled(lambda: run(lambda: writer.enqueue(patterned(BIG, 1))))
    with pytest.raises((AttributeError, TypeError, ValueError)):
        writer.enqueue([patterned(BIG), inner, threading.Lock()])
    assert free_slots(writer.tensor_arena) == N_SLOTS - 9
    assert torch.equal(reader.dequeue(timeout=TIMEOUT), patterned(BIG, 1))


@pytest.mark.parametrize("run", [here, in_another_thread])
def test_failure_while_another_is_pickled_does_not_roll_it_back(run):
    """Else its first tensor's slots would go to its last, and be read twice."""
    writer, reader = make_queues()

    def fail_to_send() -> None:
        with pytest.raises((AttributeError, TypeError, ValueError)):
            writer.enqueue([patterned(BIG, 1), threading.Lock()])

    inner = while_pickled(lambda: run(fail_to_send))
    writer.enqueue([patterned(BIG), inner, patterned(BIG, 2)])
    first, _, last = reader.dequeue(timeout=TIMEOUT)
    assert is_diverted(writer, first) and is_diverted(writer, last)
    assert torch.equal(first, patterned(BIG)) and torch.equal(last, patterned(BIG, 2))
    assert free_slots(writer.tensor_arena) == N_SLOTS - 18


def test_message_without_tensors_calls_nothing_of_the_arena():
    """What the flag costs it is then a few looks at attributes."""
    writer, reader = make_queues()
    called = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.add(Path(frame.f_code.co_filename).name)

    sys.setprofile(profile)
    try:
        writer.enqueue({"text": ["x"] * 1000})
    finally:
        sys.setprofile(None)
    assert "shm_broadcast.py" in called
    assert not called & {"shm_tensor_arena.py", "slots.py", "layout.py"}
    assert reader.dequeue(timeout=TIMEOUT)["text"] == ["x"] * 1000


def test_two_queues_in_one_process():
    queues = [make_queues(), make_queues()]
    for seed, (writer, _) in enumerate(queues):
        writer.enqueue(patterned(BIG, seed))
    for seed, (writer, reader) in enumerate(queues):
        got = reader.dequeue(timeout=TIMEOUT)
        assert is_diverted(writer, got) and torch.equal(got, patterned(BIG, seed))


def test_queue_that_never_passes_the_barrier_takes_its_names_with_it():
    writer = MessageQueue(1, 1, enable_shm_tensor_arena=True)
    names = segment_names(writer)
    assert in_dev_shm(*names) == set(names)
    del writer
    assert not in_dev_shm(*names)


def test_names_go_at_the_barrier():
    queues = make_queues(2)
    assert not in_dev_shm(*segment_names(queues[0]))


VIEW_OUTLIVES_QUEUE = """
import gc, threading, torch
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
writer = MessageQueue(1, 1, enable_shm_tensor_arena=True)
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
thread = threading.Thread(target=reader.wait_until_ready)
thread.start()
writer.wait_until_ready()
thread.join()
writer.enqueue(torch.full((9 << 20,), 7, dtype=torch.uint8))
got = reader.dequeue(timeout=60)
del writer, reader
gc.collect()
assert (got == 7).all()
"""


THREAD_READS_AT_EXIT = """
import atexit, threading
passed = threading.Semaphore(0)

def let_it_pass_twice():  # runs after what is registered later
    for _ in range(2):
        while thread.is_alive() and not passed.acquire(timeout=0.1):
            pass

atexit.register(let_it_pass_twice)
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
writer = MessageQueue(1, 1, enable_shm_tensor_arena=True)
reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
thread = threading.Thread(target=reader.wait_until_ready)
thread.start()
writer.wait_until_ready()
thread.join()
arena = reader.tensor_arena
while_waiting = arena.while_waiting

def passing(timeout_ms):
    passed.release()
    return while_waiting(timeout_ms)

arena.while_waiting = passing
thread = threading.Thread(target=lambda: reader.dequeue(indefinite=True), daemon=True)
thread.start()
passed.acquire()
"""


@pytest.mark.parametrize(
    "program", [VIEW_OUTLIVES_QUEUE, THREAD_READS_AT_EXIT], ids=["view", "thread"]
)
def test_process_in_which_something_outlives_the_queue_ends_quietly(program):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert done.returncode == 0, done.stderr
    for noise in ("Error", "Exception", "leaked", "Traceback"):
        assert noise not in done.stderr, done.stderr
