# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Engines that run once for a module, with what they reported."""

import fnmatch
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo_lib.arena_log import ArenaTraffic, read_traffic
from demo_lib.own_process import own_process
from demo_lib.server import engine_environment

HERE = Path(__file__).parent
SCRIPTS = HERE.parents[1] / "scripts"
ENGINE_SECONDS = 400
# What the CPU collectives of the base leave after a clean end.
LEFT_BY_THE_BASE = "vllm_dist_*cpushm*"


@dataclass(frozen=True)
class EngineRun:
    """A finished life of an engine."""

    report: dict[str, Any]
    traffic: ArenaTraffic
    # The imports of all processes, one a line.
    log: str
    # Names in /dev/shm after a clean end.
    leftovers: list[str]


RunEngine = Callable[..., EngineRun]


@pytest.fixture(scope="session", autouse=True)
def _fork_installed() -> None:
    from vllm.config import ParallelConfig

    if not hasattr(ParallelConfig, "enable_shm_tensor_arena"):
        pytest.skip("the installed vLLM has no tensor arena: it is not the fork")


@pytest.fixture(scope="module")
def run_engine(tmp_path_factory: pytest.TempPathFactory) -> RunEngine:
    """Runs a workload of run_engine.py, or of another program of this folder, with
    the arena "on" or "off"."""

    def run(workload: str, arena: str, program: str = "run_engine.py") -> EngineRun:
        folder = tmp_path_factory.mktemp(f"{workload}-{arena}")
        log, report = folder / "log", folder / "report.json"
        env = engine_environment(folder / "logging.json") | {
            "PYTHONPATH": os.pathsep.join(
                # What --base puts there comes along.
                [str(SCRIPTS), str(HERE), os.environ.get("PYTHONPATH", "")]
            ),
            # Python tells every import on stderr, in all processes that inherit
            # the variable: no process can use a module unseen.
            "PYTHONPROFILEIMPORTTIME": "1",
        }
        command = [
            *(sys.executable, str(HERE / program), workload),
            *("--arena", arena, "--report", str(report)),
        ]
        with own_process(command, env, log) as process:
            status = process.wait(ENGINE_SECONDS)
        text = log.read_text(errors="replace")
        said = [line for line in text.splitlines() if "import time:" not in line]
        assert status == 0, "\n".join(said[-30:])
        return EngineRun(
            report=json.loads(report.read_text()),
            traffic=read_traffic(log),
            log=text,
            leftovers=[
                name
                for name in process.leftovers
                if not fnmatch.fnmatch(name, LEFT_BY_THE_BASE)
            ],
        )

    return run
