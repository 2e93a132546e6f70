# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The demo as its user sees it: the engine behind HTTP, and an orderly end."""

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from demo_lib.own_process import SHM_DIR, mapped_shm

DEMO = Path(__file__).parents[2] / "scripts" / "demo_main.py"
DEMO_SECONDS = 600


@contextlib.contextmanager
def running_demo() -> Iterator[subprocess.Popen[str]]:
    demo = subprocess.Popen(
        [sys.executable, str(DEMO), "--quick"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with demo:
        try:
            yield demo
        finally:
            # So that it ends its server even if a test has failed.
            demo.terminate()


def servers(demo: subprocess.Popen[str]) -> list[psutil.Process]:
    """Processes with the demo's mark in their environment, its folder of logs."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if f"-{demo.pid}/" in environment.get("VLLM_LOGGING_CONFIG_PATH", ""):
            found.append(process)
    return found


def is_alive(process: psutil.Process) -> bool:
    # Where nobody reaps orphans, they stay zombies.
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_quick_demo_shows_the_table():
    with running_demo() as demo:
        output, _ = demo.communicate(timeout=DEMO_SECONDS)
    assert demo.returncode == 0, output
    (row,) = (line for line in output.splitlines() if line.startswith("astronaut"))
    assert "0: 0 bytes" in row
    assert "1: 25,759,104 bytes" in row
    assert row.endswith("yes")
    (logs,) = re.findall(r"Logs: (.+)$", output, re.MULTILINE)
    assert logs.endswith(f"-{demo.pid}"), "another demo would write there"
    names = {"arena-off.log", "arena-on.log"}
    assert names <= {path.name for path in Path(logs).iterdir()}
    (chart,) = re.findall(r"^Chart: (.+)$", output, re.MULTILINE)
    assert Path(chart).read_bytes().startswith(b"\x89PNG")


def test_demo_stopped_at_the_start_leaves_no_process():
    with running_demo() as demo:
        while not (started := servers(demo)):
            assert demo.poll() is None
            time.sleep(0.1)
        demo.send_signal(signal.SIGINT)
        output, _ = demo.communicate(timeout=DEMO_SECONDS)
    assert demo.returncode == 128 + signal.SIGINT, output
    assert "nothing is left" in output
    assert not [process for process in started if is_alive(process)]


def test_demo_stopped_later_leaves_no_process_and_no_shm():
    with running_demo() as demo:
        mapped: set[str] = set()
        while not mapped:
            started = servers(demo)
            mapped.update(*(mapped_shm(process.pid) for process in started))
            assert demo.poll() is None
            time.sleep(0.1)
        demo.send_signal(signal.SIGTERM)
        output, _ = demo.communicate(timeout=DEMO_SECONDS)
    assert demo.returncode == 128 + signal.SIGTERM, output
    assert not [process for process in started if is_alive(process)]
    assert not [name for name in mapped if (SHM_DIR / name).exists()]
