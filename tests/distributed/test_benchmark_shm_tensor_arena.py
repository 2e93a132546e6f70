# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The benchmark of the shm tensor arena runs, and counts right."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def benchmark(
    *args: str, script: str = "benchmark_shm_tensor_arena.py"
) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, BENCHMARKS / script, *args],
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from arena_bench import report

    return report


def sample(arm: str, message: int, ms: float, **more: Any) -> dict[str, Any]:
    times = dict.fromkeys(("enqueue_ms", "dequeued_ms", "device_ms"), ms)
    return {"arm": arm, "message": message, **times, **more}


def test_run_tells_the_arms_apart(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    run = benchmark(
        *("--sizes", "16MB", "--readers", "1", "--messages", "2", "--repeat", "1"),
        *("--json", str(file)),
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(file.read_text())
    shares = {
        block["arm"]: [s["shared"] for s in block["samples"]]
        for block in result["blocks"]
        if block["arm"] != "limit"
    }
    assert shares == {"off": [0, 0], "on": [1, 1]}
    assert "on/limit" in run.stdout


def test_local_and_remote_readers_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    run = benchmark(
        *("--sizes", "16MB", "--pairs", "1", "--repeat", "1", "--json", str(file)),
        script="benchmark_shm_arena_remote.py",
    )
    assert run.returncode == 0, run.stderr
    (pair,) = json.loads(file.read_text())["pairs"]["16MB"]
    assert (pair["off_shared"], pair["on_shared"]) == (0, 1)
    assert pair["on_remote_ms"] > 0 and "read, remote" in run.stdout


def test_unknown_peer_is_one_sentence() -> None:
    run = benchmark("--peer", "0.0.1")
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1
    assert "pins no peer 0.0.1" in run.stderr


def test_phases_are_told_apart(report: ModuleType) -> None:
    samples = [sample("on", message, float(message)) for message in range(1, 61)]
    enqueue = {
        phase: metrics["enqueue_ms"]["on"]
        for phase, metrics in report.summarize(samples).items()
    }
    assert [s["median"] for s in enqueue.values()] == [1, 5.5, 40]
    assert [s["n"] for s in enqueue.values()] == [1, 10, 41]


def test_limit_is_that_of_the_fastest_thread_count(report: ModuleType) -> None:
    samples = [
        sample("limit", message, ms, threads=threads)
        for threads, ms in ((1, 9.0), (2, 4.0), (4, 5.0))
        for message in (1, 2)
    ]
    summary = report.summarize(samples)
    assert summary["warm 20-60"]["device_ms"]["limit"]["median"] == 4
