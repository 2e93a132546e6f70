# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A minute of the soak; docs/results has an hour."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_minute_loses_nothing(tmp_path: Path):
    report_path = tmp_path / "soak.json"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.soak.soak"]
        + ["--minutes", "1", "--seed", "0", "--report", str(report_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    report = json.loads(report_path.read_text())
    assert report["problems"] == []
    for count in ("messages received", "tensors put into the arena", "pickles failed"):
        assert report["counts"][count] > 0
