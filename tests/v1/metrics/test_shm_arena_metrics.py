# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The tensor arena's metrics, its part of the periodic log line, its dashboard."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import regex as re
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tests.distributed.arena_testing import MIB, make_arenas
from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.device_communicators.shm_arena.metrics import ShmTensorArenaProm
from vllm.distributed.device_communicators.shm_arena.stats import DeclineReason
from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats

pytestmark = pytest.mark.cpu_test

ROOT = Path(__file__).parents[3]
DASHBOARD = ROOT / "examples/observability/dashboards/grafana/shm_tensor_arena.json"
GUIDE = ROOT / "docs/usage.md"


def sample(**values: Any) -> dict[str, Any]:
    """Stats as an arena makes them, but for `values`."""
    writer, _ = make_arenas(n_reader=2)
    return writer.take_stats() | values


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
        value("declined_total", "3", reason=reason.value) for reason in DeclineReason
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


def test_dashboard_is_one_that_grafana_knows():
    """By Grafana's own model of its files: it takes every field, and nothing that
    we wrote is a field that it would ignore."""
    grafana = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    ours = json.loads(DASHBOARD.read_text())
    theirs = json.loads(JSONEncoder().encode(grafana.Dashboard.from_json(ours)))
    assert not list(ignored(ours, theirs))
    ids = [panel["id"] for panel in ours["panels"]]
    assert len(set(ids)) == len(ids)


def ignored(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Paths of what is in `ours` and not the same in `theirs`."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from ignored(value, theirs.get(key), f"{path}/{key}")
    elif isinstance(ours, list) and isinstance(theirs, list):
        for i, (mine, other) in enumerate(zip_longest(ours, theirs)):
            yield from ignored(mine, other, f"{path}/{i}")
    elif ours != theirs:
        yield f"{path}: {ours!r} is {theirs!r}"


def test_guide_lists_the_metrics_that_the_server_exports(exported: set[str]):
    if not GUIDE.exists():
        pytest.skip("the guide is in the fork's repository only")
    _, table = GUIDE.read_text().split("| `vllm:shm_tensor_arena_…` | tells |\n")
    listed = set()
    for row in table.partition("\n\n")[0].splitlines()[1:]:
        listed |= set(re.findall(r"`(\w+)`", row.split("|")[1]))
    listed -= {"reason", "reader"}  # labels
    assert {f"vllm:shm_tensor_arena_{name}" for name in listed} == families(exported)
