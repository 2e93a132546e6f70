# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the arena tells of itself: counts, gauges, log lines, metrics."""

import errno
import functools
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import regex as re
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tests.distributed.arena_testing import MIB, dumps, make_arenas, patterned
from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.device_communicators import shm_tensor_arena
from vllm.distributed.device_communicators.shm_arena import pinning, slots, stats
from vllm.distributed.device_communicators.shm_arena.metrics import ShmTensorArenaProm
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "examples/observability/dashboards/grafana/shm_tensor_arena.json"
GUIDE = ROOT / "docs/usage.md"


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
    assert writer.in_use
    assert gauges() == (0, 0, 8, 5, 0)
    assert not writer.in_use and writer.take_stats() is None


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


# ---- The engine ------------------------------------------------------------------


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


def test_idle_engine_reports_until_its_slots_are_free(clock: Clock):
    writer, (reader,) = make_arenas()
    held = view(reader, writer.write_tensor(patterned(MIB)), MIB)
    engine = idle_engine(writer)
    in_use = []
    for _ in range(2):
        engine._process_input_queue()
        client, outputs = engine.output_queue.get_nowait()
        assert client == 0
        in_use.append(outputs.scheduler_stats.shm_tensor_arena_stats["slots_in_use"])
        held = None
        reader.flush_releases()
        clock.now += 1
    assert held is None and in_use == [1, 0]
    # Now it waits without end.
    engine._process_input_queue()
    assert engine.input_queue.get.call_args.args == (True, None)
    assert engine.output_queue.empty()


def test_engine_that_does_not_wait_for_requests_reports_with_its_steps():
    writer, (reader,) = make_arenas()
    held = view(reader, writer.write_tensor(patterned(MIB)), MIB)
    engine = idle_engine(writer)
    engine.process_input_queue_block = False
    engine._process_input_queue()
    assert engine.output_queue.empty() and held is not None


@pytest.mark.parametrize("off", ["flag", "log_stats"])
def test_idle_engine_does_not_wake_without_flag_or_stats(off: str):
    writer, (reader,) = make_arenas()
    held = view(reader, writer.write_tensor(patterned(MIB)), MIB)
    engine = idle_engine(writer, **{off: False})
    engine._process_input_queue()
    assert engine.input_queue.get.call_args.args == (True, None)
    assert engine.output_queue.empty() and held is not None


# ---- The front end ------------------------------------------------------------------


def sample(**values: Any) -> dict[str, Any]:
    """Stats as a front end gets them: made by an arena, sent by an engine."""
    writer, _ = make_arenas(n_reader=2)
    made = writer.take_stats() | values
    outputs = EngineCoreOutputs(
        scheduler_stats=SchedulerStats(shm_tensor_arena_stats=made)
    )
    encoded = MsgpackEncoder().encode(outputs)
    decoded = MsgpackDecoder(EngineCoreOutputs).decode(encoded)
    assert decoded.scheduler_stats.shm_tensor_arena_stats == made
    return made


def vllm_config(*, flag: bool) -> VllmConfig:
    config = VllmConfig(
        parallel_config=ParallelConfig(
            enable_shm_tensor_arena=flag, distributed_executor_backend="mp"
        )
    )
    config.model_config = mock.Mock(
        served_model_name="model", max_model_len=4096, is_diffusion=False
    )
    return config


def test_metrics_of_two_engines_are_kept_apart():
    registry = CollectorRegistry()
    prom = ShmTensorArenaProm(
        ["model_name", "engine"],
        {0: ["model", "0"], 3: ["model", "3"]},
        functools.partial(Gauge, registry=registry),
        functools.partial(Counter, registry=registry),
        functools.partial(Histogram, registry=registry),
    )
    prom.observe(sample(tensors=2, bytes=50, copy_seconds=[0.004, 0.03]), 0)
    prom.observe(
        sample(declined={"no_room": 4}, declined_bytes={"no_room": 90}, peak_bytes=7), 3
    )
    prom.observe(sample(tensors=1, bytes=20, reader_pinned_bytes=[0, 512]), 0)

    def value(name: str, engine: str, **labels: str) -> float | None:
        return registry.get_sample_value(
            f"vllm:shm_tensor_arena_{name}",
            {"model_name": "model", "engine": engine} | labels,
        )

    assert [value("tensors_total", engine) for engine in "03"] == [3, 0]
    assert [value("bytes_total", engine) for engine in "03"] == [70, 0]
    by_reason = [
        value("declined_total", "3", reason=reason.value)
        for reason in stats.DeclineReason
    ]
    assert by_reason == [0, 4, 0, 0, 0]
    assert value("declined_bytes_total", "3", reason="no_room") == 90
    assert [value("peak_bytes", engine) for engine in "03"] == [0, 7]
    assert value("copy_seconds_count", "0") == 2
    assert value("copy_seconds_bucket", "0", le="0.005") == 1
    assert value("reader_attached", "3", reader="1") == 1
    assert [value("reader_pinned_bytes", "0", reader=r) for r in "01"] == [0, 512]


# Two API servers get the stats of two engines, each those of some steps; then the
# metrics are collected as /metrics does it.
API_SERVERS = """
import json, os, sys
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.device_communicators.shm_arena.metrics import ShmTensorArenaProm
for server in json.loads(sys.argv[1]):
    if os.fork() == 0:
        prom = ShmTensorArenaProm(["model_name", "engine"],
            {0: ["model", "0"], 1: ["model", "1"]}, Gauge, Counter, Histogram)
        for engine, stats in server:
            prom.observe(stats, engine)
        os._exit(0)
    assert os.wait()[1] == 0
from vllm.v1.metrics.prometheus import get_prometheus_registry
for metric in get_prometheus_registry().collect():
    for sample in metric.samples:
        engine = sample.labels["engine"]
        print(sample.name.removeprefix("vllm:shm_tensor_arena_"), engine, sample.value)
        assert sample.labels["model_name"] == "model" and "pid" not in sample.labels
"""


def test_metrics_of_two_api_servers_are_added_up(tmp_path: Path):
    servers = [
        [
            (0, sample(tensors=2, slots_in_use=5, copy_seconds=[0.1])),
            (1, sample(tensors=10)),
        ],
        [(0, sample(tensors=1, slots_in_use=3, copy_seconds=[0.2]))],
    ]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", API_SERVERS, json.dumps(servers)],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert {"tensors_total 0 3.0", "tensors_total 1 10.0"} <= set(lines)
    assert "copy_seconds_count 0 2.0" in lines
    # The latest, not the sum: it is one arena that both tell of.
    assert "slots_in_use 0 3.0" in lines


@pytest.fixture
def exported() -> Iterator[set[str]]:
    """Names of the samples that a server with the flag on exports."""
    logger = PrometheusStatLogger(vllm_config(flag=True))
    logger.record(SchedulerStats(shm_tensor_arena_stats=sample()), None)
    yield sample_names()
    unregister_vllm_metrics()


def sample_names() -> set[str]:
    from prometheus_client import REGISTRY

    return {
        sample.name
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("vllm:")
    }


def test_server_exports_nothing_of_the_arena_without_the_flag(exported: set[str]):
    PrometheusStatLogger(vllm_config(flag=False)).record(SchedulerStats(), None)
    arena = {name for name in exported if "shm_tensor_arena" in name}
    assert len(arena) > 10
    without = {name for name in sample_names() if not name.endswith("_created")}
    with_flag = {name for name in exported if not name.endswith("_created")}
    assert without == with_flag - arena


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({}, None),
        ({"tensors": 3, "bytes": 6 * MIB}, "3 tensors (6.0 MiB), 0 declined"),
        ({"declined": {"no_room": 2, "too_large": 1}}, "0 tensors (0.0 MiB), 3 decl"),
    ],
    ids=["unused", "used", "declined"],
)
def test_periodic_line_names_the_arena_only_when_it_was_used(
    counts: dict[str, Any], said: str | None
):
    logger = LoggingStatLogger(vllm_config(flag=True))
    lines: list[str] = []
    with mock.patch("vllm.v1.metrics.loggers.logger") as log:
        log.debug.side_effect = lambda msg, *args: lines.append(msg % args)
        logger.record(SchedulerStats(shm_tensor_arena_stats=sample(**counts)), None)
        logger.log()
        logger.log()
    assert len(lines) == 2
    if said is not None:
        assert f"Shm tensor arena: {said}" in lines[0]
    else:
        assert "arena" not in lines[0]
    assert "arena" not in lines[1]


# ---- Dashboard and guide ------------------------------------------------------------


def families(samples: set[str]) -> set[str]:
    """What a person calls the arena's metrics: without a histogram's suffixes."""
    found = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in samples}
    # A counter's creation is a sample beside its total.
    return {
        name
        for name in found
        if "shm_tensor_arena" in name and f"{name}_total" not in found
    }


def test_dashboard_asks_for_metrics_that_the_server_exports(exported: set[str]):
    promql_parser = pytest.importorskip("promql_parser")
    dashboard = json.loads(DASHBOARD.read_text())
    asked = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            # What Grafana puts in.
            query = target["expr"].replace("$__rate_interval", "5m")
            asked |= set(re.findall(r"vllm:\w+", promql_parser.parse(query).prettify()))
    for variable in dashboard["templating"]["list"]:
        asked |= set(re.findall(r"vllm:\w+", json.dumps(variable)))
    assert asked <= exported
    assert families(asked) == families(exported)


def test_guide_lists_the_metrics_that_the_server_exports(exported: set[str]):
    if not GUIDE.exists():
        pytest.skip("the guide is in the fork's repository only")
    _, table = GUIDE.read_text().split("| `vllm:shm_tensor_arena_…` | tells |\n")
    listed = set()
    for row in table.partition("\n\n")[0].splitlines()[1:]:
        listed |= set(re.findall(r"`(\w+)`", row.split("|")[1]))
    listed -= {"reason", "reader"}  # labels
    assert {f"vllm:shm_tensor_arena_{name}" for name in listed} == families(exported)
