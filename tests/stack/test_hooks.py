# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_hooks_pass_on_every_file():
    if not (ROOT / ".git").exists():
        pytest.skip("pre-commit needs a git checkout")
    if not (ROOT / ".venv").is_dir():
        pytest.skip("the hooks' tools are in .venv, which scripts/test makes")
    done = subprocess.run(
        [sys.executable, "-m", "pre_commit", "run", "--all-files"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr
