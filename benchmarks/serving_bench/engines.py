# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The engines of one block: one for each arm, all up at once."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving_bench.probe import TRACE_FOLDER, Trace, read_events

HERE = Path(__file__).resolve().parent
END_TIMEOUT_S = 60


class EngineError(Exception):
    """A sentence for the user."""


@dataclass(frozen=True)
class Arm:
    """What is compared.

    Args:
        name: In the results.
        engine_args: Of `AsyncEngineArgs`.
        tree: Folder with another `vllm/`; None is the environment's.

    """

    name: str
    engine_args: dict[str, Any]
    tree: Path | None = None


class Engine:
    """An arm's engine in a process of its own, and the events it notes.

    Args:
        arm: What it runs.
        folder: For its log and its events; made here.

    """

    def __init__(self, arm: Arm, folder: Path):
        self.arm = arm
        self._trace = folder / "trace"
        Trace.prepare(self._trace)
        plugin = folder / "plugin"
        _write_entry_point(plugin)
        path = [plugin, HERE.parent, *([arm.tree] if arm.tree else [])]
        inherited = os.environ.get("PYTHONPATH")
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*map(str, path), inherited or ""]).strip(
                os.pathsep
            ),
            TRACE_FOLDER: str(self._trace),
        }
        self.log = folder / "log.txt"
        ours, theirs = socket.socketpair()
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "serving_bench.driver",
                    f"--socket={theirs.fileno()}",
                    f"--engine-args={json.dumps(arm.engine_args)}",
                ],
                env=env,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        theirs.close()
        self._socket = ours
        self._stream = ours.makefile("rw")

    def wait_until_up(self) -> dict[str, Any]:
        return self._answer()

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        command = {"do": what, **arguments}
        print(json.dumps(command), file=self._stream, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._stream.readline()
        if not line:
            # The log may lie in a folder that is about to be removed.
            said = self.log.read_text(errors="replace").strip().splitlines()
            raise EngineError(
                f"The engine of arm {self.arm.name} ended: {said[-1] if said else ''}"
            )
        return json.loads(line)

    def events(self) -> list[list]:
        return read_events(self._trace)

    def hang_up(self) -> None:
        """Let it end."""
        self._stream.close()
        self._socket.close()

    def wait_for_end(self) -> None:
        """See it and its children end, after `hang_up`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        # Its session: also what a driver that died has left.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _write_entry_point(folder: Path) -> None:
    """Make vLLM find the probe as a plugin, as if it were installed."""
    info = folder / "serving_bench_probe-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: serving-bench-probe\nVersion: 0\n"
    )
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nserving_bench_probe = serving_bench.probe:register\n"
    )
