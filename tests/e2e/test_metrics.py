# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A server's /metrics and log, with two API servers in front of the engine."""

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo_lib.photos import as_data_url, photograph
from demo_lib.server import Server, engine_environment, serve, worker_count
from demo_lib.tiny_models import pixel_bytes, tiny_qwen2_vl
from tests.e2e.arena_metrics import Samples, arena_samples

REQUESTS = 4
EDGE = 2048
FREE_SECONDS = 30


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("metrics") / "log"


@pytest.fixture(scope="module")
def server(log: Path) -> Iterator[Server]:
    """It has answered requests, each with one photograph, and is idle."""
    with serve(
        tiny_qwen2_vl(),
        arena=True,
        max_images=1,
        log=log,
        env=engine_environment(log.with_name("logging.json")),
        options=["--api-server-count", "2"],
    ) as server:
        server.wait_until_ready(print)
        for shift in range(REQUESTS):
            url = as_data_url(photograph("astronaut", EDGE, shift))
            server.ask("What do you see?", [url])
        yield server


def samples(server: Server) -> Samples:
    by_engine = arena_samples(server)
    assert set(by_engine) == {"0"}
    return by_engine["0"]


def test_counters_add_up_over_the_api_servers(server: Server):
    exported = samples(server)
    nbytes = pixel_bytes(tiny_qwen2_vl(), EDGE)
    assert exported["tensors_total"] == {(): REQUESTS}
    assert exported["bytes_total"] == {(): REQUESTS * nbytes}
    assert exported["copy_seconds_count"] == {(): REQUESTS}
    assert len(exported["declined_total"]) == 5
    assert not any(exported["declined_total"].values())


def test_slots_of_an_idle_server_are_seen_to_be_free(server: Server):
    """Although the engine makes no step, and so no stats, after the last."""
    deadline = time.monotonic() + FREE_SECONDS
    while any((exported := samples(server))["slots_in_use"].values()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert exported["oldest_slot_age_seconds"] == {(): 0}
    assert exported["largest_free_bytes"] == exported["capacity_bytes"]
    assert exported["peak_bytes"][()] >= pixel_bytes(tiny_qwen2_vl(), EDGE)


def test_every_worker_is_seen_to_have_attached(server: Server):
    readers = {(str(rank),): 1 for rank in range(worker_count())}
    assert samples(server)["reader_attached"] == readers


def test_one_line_at_the_start(server: Server, log: Path):
    lines = re.findall(r"Shm tensor arena: .*", log.read_text(errors="replace"))
    (start,) = (line for line in lines if "prepared" in line)
    assert f"2048 MiB for {worker_count()} workers, 512 MiB prepared" in start
