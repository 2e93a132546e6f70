# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""SIGKILL at every moment, on one /dev/shm without cleaning up between."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import private_shm
from tests.distributed.arena_testing import MIB
from tests.distributed.killed_rigs import BEFORE_BARRIER, MOMENTS, VICTIMS

if not private_shm.is_allowed():
    pytest.skip("mount namespaces are not allowed here", allow_module_level=True)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rigs() -> dict:
    done = subprocess.run(
        private_shm.command(
            256,
            [sys.executable, "-W", "ignore", "-m", "tests.distributed.killed_rigs"],
        ),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    return {(report["moment"], report.get("victim")): report for report in reports}


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_kill(rigs: dict, moment: str, victim: str):
    """The rest goes on or waits, and when all have ended nothing is left; of those
    that never had all readers, at most names without memory."""
    report = rigs[moment, victim]
    assert not report["fallen"]
    if moment in BEFORE_BARRIER and victim != "writer":
        assert sum(report["left"].values()) < MIB
    else:  # a tracker that lives removes what its dead process has named
        assert not report["left"]


def test_start_after_all_of_them(rigs: dict):
    assert rigs[None, None]["exit codes"] == [0, 0, 0]
