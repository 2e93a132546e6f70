# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The arena with Ray: `RayExecutorV2` and a Ray of one node."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

# vLLM's executor cannot be imported without it, and the suite does not ask for it.
pytest.importorskip("ray", reason="Ray is not installed (240 MB)")

from tests.distributed.arena_testing import MIB
from vllm.config import ParallelConfig, VllmConfig
from vllm.v1.executor import ray_executor_v2, ray_utils

WORKERS = 2
SIZES = [9 * MIB, 20 * MIB, 1000]
TIMEOUT = 600  # seconds; only a failure waits that long


def ray_config(flag: bool) -> ParallelConfig:
    with mock.patch.object(ray_utils, "assert_ray_available"):
        return ParallelConfig(
            enable_shm_tensor_arena=flag,
            distributed_executor_backend="ray",
            tensor_parallel_size=WORKERS,
            placement_group=mock.sentinel.placement_group,
        )


# ---- With a mocked Ray ------------------------------------------------------


@pytest.mark.parametrize("flag", [True, False])
def test_executor_passes_the_flag_to_its_queue(flag: bool, monkeypatch):
    """Up to the queue, the executor only asks Ray where its workers will be."""
    ray = mock.Mock()
    monkeypatch.setattr(ray_executor_v2, "ray", ray)
    monkeypatch.setattr(ray_executor_v2, "initialize_ray_cluster", mock.Mock())
    here = ray.get_runtime_context.return_value.get_node_id.return_value
    bundles = [(0, here, "10.0.0.1"), (1, "another node", "10.0.0.2")]
    monkeypatch.setattr(
        ray_executor_v2, "get_bundles_sorted_by_node", lambda _: bundles
    )
    queue = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(ray_executor_v2, "MessageQueue", queue)
    config = VllmConfig(parallel_config=ray_config(flag))
    with pytest.raises(InterruptedError):
        ray_executor_v2.RayExecutorV2(config)
    assert queue.call_args.args == (WORKERS, 1)
    assert queue.call_args.kwargs["enable_shm_tensor_arena"] is flag


# ---- With Ray ---------------------------------------------------------------


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What `ray_program` told of tensors of `SIZES`, sent to all workers."""
    # Ray puts sockets there, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        report, log = Path(folder, "report"), Path(folder, "log")
        command = [sys.executable, "-m", "tests.distributed.ray_program"]
        command += ["--workers", str(WORKERS), "--sizes", *map(str, SIZES)]
        command += ["--folder", folder, "--report", str(report)]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with log.open("wb") as output:
            status = subprocess.run(
                command, env=env, stdout=output, stderr=output, timeout=TIMEOUT
            ).returncode
        assert status == 0, log.read_text(errors="replace")[-4000:]
        return json.loads(report.read_text())


def test_every_worker_gets_the_bytes_that_were_sent(told: dict[str, Any]):
    for call in told["calls"]:
        assert [w["rank"] for w in call["workers"]] == list(range(WORKERS))
        assert {w["checksum"] for w in call["workers"]} == {call["checksum"]}


def test_large_tensors_are_shared(told: dict[str, Any]):
    shared = [
        [worker["shared"] for worker in call["workers"]] for call in told["calls"]
    ]
    assert shared == [[True] * WORKERS] * 2 + [[False] * WORKERS]
    assert told["stats"]["tensors"] == 2
    assert told["stats"]["reader_attached"] == [1] * WORKERS
