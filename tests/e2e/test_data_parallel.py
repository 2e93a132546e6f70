# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Two engines behind one API server: each has an arena, metrics, a log line."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from demo_lib.photos import as_data_url, photograph
from demo_lib.server import Server, engine_environment, serve
from demo_lib.tiny_models import pixel_bytes, tiny_qwen2_vl
from tests.e2e.arena_metrics import arena_samples

EDGE = 2048
# Photographs that each engine is sent.
PHOTOGRAPHS = {"0": 1, "1": 2}
LOG_SECONDS = 30


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data-parallel") / "log"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[Server]:
    """It has answered nothing yet."""
    if torch.cuda.device_count() == 1:
        pytest.skip("two engines need two GPUs")
    env = engine_environment(log.with_name("logging.json"))
    with serve(
        tiny_qwen2_vl(),
        arena=True,
        max_images=1,
        log=log,
        env=env | {"VLLM_LOG_STATS_INTERVAL": "1"},
        options=[
            *("--tensor-parallel-size", "1"),
            *("--data-parallel-size", "2"),
            # Else there is one for each engine, and no periodic line.
            *("--api-server-count", "1"),
        ],
    ) as server:
        server.wait_until_ready(print)
        yield server


def wait_for(condition) -> bool:
    deadline = time.monotonic() + LOG_SECONDS
    while not (met := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return met


def test_each_engine_reports_its_workers_before_the_first_request(server: Server):
    def attached() -> dict[str, float | None]:
        return {
            engine: samples.get("reader_attached", {}).get(("0",))
            for engine, samples in arena_samples(server).items()
        }

    assert wait_for(lambda: attached() == {"0": 1, "1": 1})


@pytest.fixture(scope="module")
def asked(server: Server) -> Server:
    for engine, count in PHOTOGRAPHS.items():
        for shift in range(count):
            url = as_data_url(photograph("astronaut", EDGE, shift))
            server.ask("What do you see?", [url], engine=int(engine))
    return server


def test_each_engine_counts_what_it_was_sent(asked: Server):
    nbytes = pixel_bytes(tiny_qwen2_vl(), EDGE)
    exported = arena_samples(asked)
    for engine, count in PHOTOGRAPHS.items():
        assert exported[engine]["tensors_total"] == {(): count}
        assert exported[engine]["bytes_total"] == {(): count * nbytes}
        assert exported[engine]["copy_seconds_count"] == {(): count}


def test_periodic_line_of_each_engine_tells_what_it_sent(asked: Server, log: Path):
    def logged() -> dict[str, int]:
        counts = dict.fromkeys(PHOTOGRAPHS, 0)
        text = log.read_text(errors="replace")
        for engine, tensors in re.findall(
            r"Engine 00(\d): .*, Shm tensor arena: (\d+) tensors .*, 0 declined", text
        ):
            counts[engine] += int(tensors)
        return counts

    assert wait_for(lambda: logged() == PHOTOGRAPHS), logged()
