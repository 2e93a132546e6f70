# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def hooks():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    (repo,) = config["repos"]
    assert repo["repo"] == "local"
    return repo["hooks"]


def test_the_hooks_need_only_the_package_index(hooks):
    assert {hook["language"] for hook in hooks} == {"python"}
    pins = [pin for hook in hooks for pin in hook["additional_dependencies"]]
    assert all("==" in pin for pin in pins)


def test_the_hooks_share_one_environment(hooks):
    """Seven would take minutes to install."""
    assert len({tuple(hook["additional_dependencies"]) for hook in hooks}) == 1


def test_the_patch_lint_has_what_the_tool_imports(hooks):
    lines = (ROOT / "requirements/stack.txt").read_text().splitlines()
    pins = {line for line in lines if not line.startswith("#")}

    assert pins <= set(hooks[-1]["additional_dependencies"])


def test_scripts_fork_pr_has_the_ruff_of_the_hooks(hooks):
    lines = (ROOT / "requirements/test.txt").read_text().splitlines()
    (ruff,) = (line for line in lines if line.startswith("ruff=="))

    assert ruff in hooks[0]["additional_dependencies"]


def test_the_hooks_pass_on_every_file():
    if not (ROOT / ".git").exists():
        pytest.skip("pre-commit needs a git checkout")
    done = subprocess.run(
        [sys.executable, "-m", "pre_commit", "run", "--all-files"],
        cwd=ROOT,
        # Where --base puts another vLLM, which mypy would read.
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr
