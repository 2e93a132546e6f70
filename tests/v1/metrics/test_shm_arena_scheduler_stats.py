# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""When the engine reports the tensor arena in its `SchedulerStats`."""

import queue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.distributed.arena_testing import MIB, make_arenas, patterned
from vllm.distributed.device_communicators import shm_tensor_arena
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

pytestmark = pytest.mark.cpu_test


def idle_engine(arena: Any, *, flag: bool = True, log_stats: bool = True) -> Any:
    """As much of an idle EngineCore as waits for requests."""
    engine = object.__new__(EngineCoreProc)
    engine.vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(enable_shm_tensor_arena=flag)
    )
    engine.model_executor = SimpleNamespace(get_tensor_arena=lambda: arena)
    engine.scheduler = SimpleNamespace(make_stats=SchedulerStats)
    engine.log_stats = log_stats
    engine.process_input_queue_block = True
    engine.output_queue = queue.Queue()
    engine._idle_state_callbacks = []
    engine.has_work = lambda: False
    engine.is_running = lambda: True
    engine.aborts_queue = queue.Queue()
    engine.input_queue = mock.Mock()
    engine.input_queue.empty.return_value = True
    engine.input_queue.get.side_effect = queue.Empty
    return engine


def report(engine: Any) -> dict[str, Any]:
    """What the engine sends when it has waited for requests in vain."""
    engine._process_input_queue()
    client, outputs = engine.output_queue.get_nowait()
    assert client == 0
    # What a front end gets.
    encoded = MsgpackEncoder().encode(outputs)
    decoded = MsgpackDecoder(EngineCoreOutputs).decode(encoded)
    return decoded.scheduler_stats.shm_tensor_arena_stats


def waits_without_end(engine: Any) -> bool:
    engine._process_input_queue()
    timeout = engine.input_queue.get.call_args.args[1]
    return timeout is None and engine.output_queue.empty()


def test_engine_reports_its_arena_before_the_first_request():
    writer, _ = make_arenas(n_reader=2)
    engine = idle_engine(writer)
    first = report(engine)
    assert first["reader_attached"] == [1, 1]
    assert first["largest_free_bytes"] == first["capacity_bytes"] == 8 * MIB
    assert waits_without_end(engine)


def test_idle_engine_reports_until_its_slots_are_free(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(shm_tensor_arena, "_GAUGES_INTERVAL_S", 0.0)
    writer, (reader,) = make_arenas()
    engine = idle_engine(writer)
    slot = writer.write_tensor(patterned(MIB))
    held = reader.get_tensor(slot, MIB, torch.uint8, (MIB,))
    assert report(engine)["slots_in_use"] == 1
    del held
    reader.flush_releases()
    assert report(engine)["slots_in_use"] == 0
    assert waits_without_end(engine)


def test_engine_that_does_not_wait_for_requests_reports_with_its_steps():
    writer, _ = make_arenas()
    writer.write_tensor(patterned(MIB))
    engine = idle_engine(writer)
    engine.process_input_queue_block = False
    engine._process_input_queue()
    assert engine.output_queue.empty()


@pytest.mark.parametrize("off", ["flag", "log_stats"])
def test_idle_engine_does_not_wake_without_flag_or_stats(off: str):
    writer, _ = make_arenas()
    writer.write_tensor(patterned(MIB))
    assert waits_without_end(idle_engine(writer, **{off: False}))
