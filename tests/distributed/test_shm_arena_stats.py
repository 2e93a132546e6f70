# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the writer counts and logs: tensors, bytes, slots, and why not."""

import errno
import os
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.distributed.arena_testing import MIB, dumps, make_arenas, patterned
from vllm.distributed.device_communicators import shm_tensor_arena
from vllm.distributed.device_communicators.shm_arena import pinning, slots, stats


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """`time.monotonic`, as far as these modules look at it."""
    clock = Clock()
    fake = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=time.perf_counter)
    for module in (shm_tensor_arena, slots, stats):
        monkeypatch.setattr(module, "time", fake)
    return clock


def view(reader: Any, slot: int | None, nbytes: int) -> torch.Tensor:
    assert slot is not None
    return reader.get_tensor(slot, nbytes, torch.uint8, (nbytes,))


# ---- The writer's counts and gauges -------------------------------------------


def test_a_new_arena_reports_itself_and_then_nothing():
    writer, _ = make_arenas(n_reader=2)
    first = writer.take_stats()
    assert first is not None
    assert first["tensors"] == first["bytes"] == first["slots_in_use"] == 0
    assert first["capacity_bytes"] == first["largest_free_bytes"] == 8 * MIB
    assert first["copy_seconds"] == []
    assert writer.take_stats() is None


def test_diverted_tensors_are_counted_once(clock: Clock):
    writer, _ = make_arenas()
    writer.write_tensor(patterned(2 * MIB))
    writer.write_tensor(patterned(3 * MIB))
    taken = writer.take_stats()
    assert (taken["tensors"], taken["bytes"]) == (2, 5 * MIB)
    assert len(taken["copy_seconds"]) == 2 and min(taken["copy_seconds"]) > 0
    clock.now += 1
    again = writer.take_stats()
    assert (again["tensors"], again["bytes"], again["copy_seconds"]) == (0, 0, [])


def test_gauges_follow_the_slots(clock: Clock):
    writer, (reader,) = make_arenas()
    first = view(reader, writer.write_tensor(patterned(2 * MIB)), 2 * MIB)
    clock.now += 5
    second = view(reader, writer.write_tensor(patterned(3 * MIB)), 3 * MIB)

    def gauges() -> tuple:
        clock.now += 1
        taken = writer.take_stats()
        return (
            taken["slots_in_use"],
            taken["bytes_in_use"] // MIB,
            taken["largest_free_bytes"] // MIB,
            taken["peak_bytes"] // MIB,
            taken["oldest_slot_age_seconds"],
        )

    assert gauges() == (5, 5, 3, 5, 6)
    # Nothing is written in between: the stats themselves take slots back.
    del first
    reader.flush_releases()
    assert gauges() == (3, 3, 3, 5, 2)
    del second
    reader.flush_releases()
    assert writer.has_news
    assert gauges() == (0, 0, 8, 5, 0)
    assert not writer.has_news and writer.take_stats() is None


def test_held_slots_alone_are_reported_ten_times_a_second(clock: Clock):
    writer, _ = make_arenas()
    writer.write_tensor(patterned(MIB))
    reports = 0
    for _ in range(100):
        reports += writer.take_stats() is not None
        clock.now += 0.01
    assert 9 <= reports <= 11
    # What is new does not wait.
    writer.write_tensor(patterned(MIB))
    assert writer.take_stats()["tensors"] == 1


def declined(writer: Any) -> dict[str, int]:
    taken = writer.take_stats()
    assert taken["tensors"] == 0
    return taken["declined"]


@pytest.mark.parametrize("reason", ["too_large", "no_room", "no_space"])
def test_what_does_not_fit_is_counted_by_reason(reason: str):
    writer, (reader,) = make_arenas()
    held = view(reader, writer.write_tensor(patterned(MIB)), MIB)
    writer.take_stats()
    if reason == "no_space":
        writer._backing.take = lambda *_: False
    n = {"too_large": 9 * MIB, "no_room": 8 * MIB, "no_space": MIB}[reason]
    assert writer.write_tensor(patterned(n)) is None
    taken = writer.take_stats()
    assert taken["declined"] == {reason: 1}
    assert taken["declined_bytes"] == {reason: n}
    assert held[0] == patterned(MIB)[0]


def test_what_found_no_space_is_no_peak(monkeypatch: pytest.MonkeyPatch):
    writer, _ = make_arenas(n_slots=4)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "posix_fallocate", mock.Mock(side_effect=full))
    assert writer.write_tensor(patterned(MIB)) is None
    assert writer.take_stats()["peak_bytes"] == 0


def test_size_of_a_sparse_tensor_is_not_counted():
    writer, _ = make_arenas()
    sparse = torch.sparse_coo_tensor([[0], [0]], [1.0], (10**6, 10**6))
    dumps(writer, [sparse, torch.empty(2**40, device="meta")])
    assert declined(writer) == {}


def test_tensor_of_another_kind_is_counted_as_not_eligible():
    writer, _ = make_arenas()
    assert writer.write_tensor(patterned(MIB).view(2, -1).t()) is None
    assert declined(writer) == {"not_eligible": 1}


@pytest.mark.parametrize("kind", ["with gradient", "with attributes", "plain"])
def test_parameter_is_counted_once(kind: str):
    writer, _ = make_arenas(n_slots=16)
    data = patterned(9 * MIB).view(torch.bfloat16)
    parameter = torch.nn.Parameter(data, requires_grad=kind == "with gradient")
    if kind == "with attributes":
        parameter.loader = "default"
    writer.take_stats()
    dumps(writer, parameter)
    taken = writer.take_stats()
    assert (taken["tensors"], taken["bytes"]) == (1, 9 * MIB)
    assert taken["declined"] == {}


def test_parameter_that_is_not_contiguous_is_declined_once():
    writer, _ = make_arenas(n_slots=16)
    data = patterned(18 * MIB).view(2, -1).t()
    parameter = torch.nn.Parameter(data, requires_grad=False)
    dumps(writer, parameter)
    assert declined(writer) == {"not_eligible": 1}


def test_tensor_before_every_reader_has_attached_is_counted():
    writer = shm_tensor_arena.ShmTensorArena(1, slot_bytes=MIB, n_slots=1)
    assert writer.write_tensor(patterned(MIB)) is None
    taken = writer.take_stats()
    assert taken["declined"] == {"not_attached": 1}
    assert taken["reader_attached"] == [0]


def test_writer_reads_what_each_reader_has_pinned(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pinning, "unpinnable_reason", lambda: None)
    monkeypatch.setattr(pinning, "register_host_memory", lambda *_: None)
    writer, readers = make_arenas(n_reader=2)
    writer.on_barrier()
    readers[1].on_barrier()
    taken = writer.take_stats()
    assert taken["reader_attached"] == [1, 1]
    assert taken["reader_pinned_bytes"] == [0, 8 * MIB]
    assert taken["prepared_bytes"] == 8 * MIB


# ---- Log lines ------------------------------------------------------------------


def start_line(writer: Any) -> str:
    with mock.patch.object(shm_tensor_arena.logger, "info") as info:
        writer.log_start()
    (call,) = info.call_args_list
    return call.args[0] % call.args[1:]


def test_start_line_says_what_is_pinned(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pinning, "unpinnable_reason", lambda: None)
    monkeypatch.setattr(pinning, "register_host_memory", lambda *_: None)
    writer, readers = make_arenas(n_reader=2)
    for arena in (writer, *readers):
        arena.on_barrier()
    assert start_line(writer) == (
        "Shm tensor arena: 8 MiB for 2 workers, 8 MiB prepared, 8 MiB pinned by 2 of "
        "them"
    )


def test_start_line_says_why_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch):
    long_reason = "cudaHostRegister returned 2" + "!" * 200
    reasons = iter([long_reason, long_reason])
    monkeypatch.setattr(pinning, "unpinnable_reason", lambda: next(reasons))
    writer, readers = make_arenas(n_reader=2)
    for arena in (writer, *readers):
        arena.on_barrier()
    line = start_line(writer)
    # Once, and cut rather than written over the next reader's.
    assert line.count("cudaHostRegister returned 2!") == 1
    assert "0 MiB pinned by 0 of them" in line


def test_declines_are_logged_first_and_then_once_a_minute_with_a_count(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    lines: list[str] = []
    monkeypatch.setattr(
        stats.logger, "warning", lambda msg, *args: lines.append(msg % args)
    )
    writer, _ = make_arenas()
    too_large, not_contiguous = patterned(9 * MIB), patterned(MIB).view(2, -1).t()
    for _ in range(3):
        writer.write_tensor(too_large)
    assert len(lines) == 1 and "(too_large)" in lines[0] and "9.0 MiB" in lines[0]
    # Another reason is another line.
    writer.write_tensor(not_contiguous)
    assert len(lines) == 2 and "(not_eligible)" in lines[1]
    clock.now += 61
    writer.write_tensor(too_large)
    writer.write_tensor(too_large)
    assert len(lines) == 3
    assert "3 more tensors (27.0 MiB)" in lines[2] and "last 61 s" in lines[2]
