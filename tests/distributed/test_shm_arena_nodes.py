# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A `MultiprocExecutor` over two nodes, with the arena on the first one."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import network_nodes
from tests.distributed.arena_testing import MIB
from tests.distributed.network_nodes import ADDRESSES

WORKERS = 4
SIZES = [9 * MIB, 20 * MIB, 1000]
TIMEOUT = 600  # seconds; only a failure waits that long


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `node_program` told of tensors of `SIZES`, sent to all workers."""
    if reason := network_nodes.why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("nodes")
    logs = folder / "log0", folder / "log1"
    report = folder / "report.json"
    program = [sys.executable, "-m", "tests.distributed.node_program"]
    options = ["--workers", str(WORKERS), "--report", str(report)]
    options += ["--sizes", *map(str, SIZES)]
    programs = [*program, "0", *options], [*program, "1", *options]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with network_nodes.two_nodes(programs, logs, env) as (leader, follower):
        status = leader.wait(TIMEOUT)
        assert status == 0, tails(*logs)
        # It has no reason to end before it is killed.
        assert follower.poll() is None, tails(*logs)
    return json.loads(report.read_text())


def tails(*logs: Path) -> str:
    return "\n".join(log.read_text(errors="replace")[-4000:] for log in logs)


def test_both_nodes_have_half_of_the_workers(told: dict[str, Any]):
    for call in told["calls"]:
        addresses = [worker["address"] for worker in call["workers"]]
        assert addresses == [ADDRESSES[0]] * 2 + [ADDRESSES[1]] * 2


def test_every_worker_gets_the_bytes_that_were_sent(told: dict[str, Any]):
    for call in told["calls"]:
        assert {w["checksum"] for w in call["workers"]} == {call["checksum"]}


def test_large_tensors_are_shared_on_the_first_node_only(told: dict[str, Any]):
    shared = [
        [worker["shared"] for worker in call["workers"]] for call in told["calls"]
    ]
    large = [True, True, False, False]
    assert shared == [large, large, [False] * WORKERS]


def test_second_node_has_no_arena(told: dict[str, Any]):
    for worker in told["calls"][0]["workers"]:
        assert worker["has_arena_module"] is (worker["address"] == ADDRESSES[0])


def test_stats_are_of_the_first_node(told: dict[str, Any]):
    stats = told["stats"]
    assert stats["reader_attached"] == [1, 1]
    assert (stats["tensors"], stats["bytes"]) == (2, 29 * MIB)
    assert stats["declined"] == {}
