# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A queue with an arena whose readers are on this node and, over TCP, on others."""

import multiprocessing
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import pytest
import torch

from tests.distributed.arena_testing import MIB, free_slots, patterned
from tests.distributed.queue_testing import (
    BIG,
    N_SLOTS,
    TIMEOUT,
    close_queues,
    is_diverted,
    pass_barrier,
    shrink_arenas,
)
from vllm.distributed.device_communicators import shm_tensor_arena
from vllm.distributed.device_communicators.shm_broadcast import Handle, MessageQueue

N_LOCAL = 2


@pytest.fixture(autouse=True)
def small_queues(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    shrink_arenas(monkeypatch)
    yield
    close_queues()


def make_writer(n_local: int = N_LOCAL, n_remote: int = 1, **kwargs: Any):
    kwargs = {"enable_shm_tensor_arena": True, "max_chunk_bytes": MIB} | kwargs
    return MessageQueue(n_local + n_remote, n_local, connect_ip="127.0.0.1", **kwargs)


def make_queues(
    n_local: int = N_LOCAL, n_remote: int = 1, **kwargs: Any
) -> tuple[MessageQueue, list[MessageQueue], list[MessageQueue]]:
    """A writer, its local and its remote readers, past the barrier."""
    writer = make_writer(n_local, n_remote, **kwargs)
    handle = writer.export_handle()
    readers = [
        MessageQueue.create_from_handle(handle, rank)
        for rank in range(n_local + n_remote)
    ]
    pass_barrier(writer, readers)
    return writer, readers[:n_local], readers[n_local:]


class Pickled:
    """Counts how often it is pickled, and can refuse from some time on."""

    def __init__(self, fails_at: int = 0):
        self.times = 0
        self.fails_at = fails_at

    def __reduce__(self) -> tuple:
        self.times += 1
        if self.times == self.fails_at:
            raise RuntimeError("broken")
        return str, ("pickled",)


def test_local_readers_get_a_view_and_remote_ones_the_bytes():
    writer, local, remote = make_queues(n_remote=2)
    sent = {"big": patterned(BIG), "small": patterned(1000), "text": "x"}
    writer.enqueue(sent)
    for reader in local + remote:
        got = reader.dequeue(timeout=TIMEOUT)
        assert is_diverted(writer, got["big"]) is (reader in local)
        assert torch.equal(got["big"], sent["big"])
        assert torch.equal(got["small"], sent["small"]) and got["text"] == "x"
    assert all(reader.tensor_arena is None for reader in remote)


def test_slots_come_back_though_remote_readers_keep_what_they_got():
    writer, local, remote = make_queues()
    kept = []
    for i in range(12):
        writer.enqueue(patterned(BIG, i))
        kept += [reader.dequeue(timeout=TIMEOUT) for reader in remote]
        for reader in local:
            assert is_diverted(writer, reader.dequeue(timeout=TIMEOUT))
    assert all(torch.equal(t, patterned(BIG, i)) for i, t in enumerate(kept))


def test_remote_readers_get_what_they_get_without_an_arena():
    """Byte for byte, whatever the tensors of a message are."""
    message = {
        "diverted": patterned(BIG),
        "parameter": torch.nn.Parameter(patterned(BIG, 1), requires_grad=False),
        "declined": patterned(BIG, 2).view(3, -1).t(),
        "small": torch.arange(10),
        "text": ["x"] * 100,
    }
    sent = []
    for flag in (False, True):
        writer, *_ = make_queues(enable_shm_tensor_arena=flag)
        with mock.patch.object(writer, "remote_socket") as socket:
            writer.enqueue(message)
        (frames,) = socket.send_multipart.call_args.args
        sent.append([bytes(frame) for frame in frames])
    assert sent[0] == sent[1]


@pytest.mark.parametrize(
    ("n_local", "n_remote", "nbytes", "times"),
    [
        (N_LOCAL, 1, BIG, 2),
        (N_LOCAL, 1, 1000, 1),
        (N_LOCAL, 1, (N_SLOTS + 1) * MIB, 1),  # declined
        (N_LOCAL, 0, BIG, 1),
        (0, 1, BIG, 1),
    ],
    ids=["both kinds", "small tensor", "too large", "local only", "remote only"],
)
def test_how_often_a_message_is_pickled(
    n_local: int, n_remote: int, nbytes: int, times: int
):
    writer, local, remote = make_queues(n_local, n_remote)
    counter = Pickled()
    writer.enqueue([patterned(nbytes), counter])
    assert counter.times == times
    for reader in local + remote:
        got = reader.dequeue(timeout=TIMEOUT)
        assert torch.equal(got[0], patterned(nbytes)) and got[1] == "pickled"


@pytest.mark.parametrize("fails_at", [1, 2])
def test_failed_pickling_sends_nothing_and_gives_slots_back(fails_at: int):
    writer, local, remote = make_queues()
    with pytest.raises(RuntimeError, match="broken"):
        writer.enqueue([patterned(BIG), Pickled(fails_at)])
    assert free_slots(writer.tensor_arena) == N_SLOTS
    writer.enqueue("next")
    for reader in local + remote:
        assert reader.dequeue(timeout=TIMEOUT) == "next"


def test_timeout_of_the_ring_sends_nothing_and_gives_slots_back():
    writer, local, remote = make_queues(max_chunks=1)
    writer.enqueue("first")
    with pytest.raises(TimeoutError):
        writer.enqueue(patterned(BIG), timeout=0.01)
    assert free_slots(writer.tensor_arena) == N_SLOTS
    for reader in local + remote:
        assert reader.dequeue(timeout=TIMEOUT) == "first"
    writer.enqueue("next")
    for reader in local + remote:
        assert reader.dequeue(timeout=TIMEOUT) == "next"


def test_failed_send_to_remote_readers_leaves_the_slots_to_the_local_ones():
    """The local ones have the message by then, as without an arena."""
    writer, local, _ = make_queues()
    with mock.patch.object(writer, "remote_socket") as socket:
        socket.send_multipart.side_effect = RuntimeError("broken")
        with pytest.raises(RuntimeError, match="broken"):
            writer.enqueue(patterned(BIG))
    assert free_slots(writer.tensor_arena) == N_SLOTS - 9
    for reader in local:
        assert torch.equal(reader.dequeue(timeout=TIMEOUT), patterned(BIG))


def test_local_reader_without_the_arena_gets_everything(monkeypatch):
    """Then nobody gets stubs, and nothing is pickled twice."""
    warning = mock.Mock()
    monkeypatch.setattr(shm_tensor_arena.logger, "warning", warning)
    writer = make_writer()
    handle = writer.export_handle()
    *sizes, _ = handle.tensor_arena_handle
    elsewhere = replace(handle, tensor_arena_handle=(*sizes, "vllm_arena_none"))
    readers = [
        MessageQueue.create_from_handle(handle, 0),
        MessageQueue.create_from_handle(elsewhere, 1),
        MessageQueue.create_from_handle(handle, 2),
    ]
    pass_barrier(writer, readers)
    assert warning.call_args.args[1] == [1]
    counter = Pickled()
    writer.enqueue([patterned(BIG), counter])
    assert counter.times == 1
    for reader in readers:
        assert torch.equal(reader.dequeue(timeout=TIMEOUT)[0], patterned(BIG))


def test_stats_are_of_the_local_readers():
    writer, local, remote = make_queues(n_remote=3)
    writer.enqueue(patterned(BIG))
    for reader in local + remote:
        reader.dequeue(timeout=TIMEOUT)
    stats = writer.tensor_arena.take_stats()
    assert stats["reader_attached"] == [1] * N_LOCAL
    assert len(stats["reader_pinned_bytes"]) == N_LOCAL
    # Once, whoever else is sent it over the network.
    assert (stats["tensors"], stats["bytes"]) == (1, BIG)


# ---- A reader in a process of its own ---------------------------------------


def read_until_killed(handle: Handle, rank: int, report: Connection) -> None:
    reader = MessageQueue.create_from_handle(handle, rank)
    reader.wait_until_ready()
    while True:
        got = reader.dequeue(indefinite=True)
        report.send((reader.tensor_arena is None, bytes(got.numpy())))


def test_death_of_a_remote_reader_does_not_matter_to_the_others():
    context = multiprocessing.get_context("spawn")
    writer = make_writer()
    handle = writer.export_handle()
    report, child_end = context.Pipe(duplex=False)
    process = context.Process(
        target=read_until_killed, args=(handle, N_LOCAL, child_end), daemon=True
    )
    process.start()
    child_end.close()
    local = [MessageQueue.create_from_handle(handle, rank) for rank in range(N_LOCAL)]
    pass_barrier(writer, local)
    writer.enqueue(patterned(BIG))
    assert report.poll(TIMEOUT), "nothing from the remote reader"
    assert report.recv() == (True, bytes(patterned(BIG).numpy()))
    process.kill()
    process.join(TIMEOUT)
    for i in range(12):
        if i:
            writer.enqueue(patterned(BIG, i), timeout=TIMEOUT)
        for reader in local:
            got = reader.dequeue(timeout=TIMEOUT)
            assert is_diverted(writer, got) and torch.equal(got, patterned(BIG, i))
