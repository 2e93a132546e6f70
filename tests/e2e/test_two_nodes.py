# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A real engine with a worker on its own node and one on another."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from demo_lib.arena_log import read_traffic
from demo_lib.tiny_models import tiny_qwen2
from tests.distributed import network_nodes

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENGINE_SECONDS = 400


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What the first node reports, and the log of it and its processes."""
    if reason := network_nodes.why_not():
        pytest.skip(reason)
    if torch.cuda.is_available():
        pytest.skip("both nodes would take the same GPU")
    # Both nodes would make it at once.
    tiny_qwen2()
    folder = tmp_path_factory.mktemp("two-nodes")
    logs = folder / "log0", folder / "log1"
    paths = [str(ROOT / "scripts"), str(HERE), str(ROOT)]
    env = {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    program = [sys.executable, str(HERE / "run_engine_node.py")]
    programs = tuple([*program, str(i), "--folder", str(folder)] for i in range(2))
    with network_nodes.two_nodes(programs, logs, env) as (leader, _):
        status = leader.wait(ENGINE_SECONDS)
        assert status == 0, "\n".join(
            log.read_text(errors="replace")[-4000:] for log in logs
        )
    return json.loads((folder / "report.json").read_text()), logs[0]


def test_embeddings_go_through_the_arena_once(life):
    # 6000 positions, 1024 values, 2 bytes
    assert read_traffic(life[1]).diverted == [6000 * 1024 * 2]


def test_both_workers_get_the_embeddings_that_were_sent(life):
    report, _ = life
    assert len(report["sent"]) == 1 and len(report["arrived"]) == 2
    for worker in report["arrived"]:
        assert worker["digests"] == report["sent"]


def test_the_arena_is_on_the_first_node_only(life):
    assert life[0]["workers_with_arena_module"] == [True, False]
