# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Two nodes on one machine: each with a network and a /dev/shm of its own.

Both are namespaces without a name, so they end with the processes in them. A shared
/dev/shm would make the two look like one node to vLLM.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ADDRESSES = ("10.83.7.1", "10.83.7.2")
DEVICE = "node"  # name of the network device, on either node
SHM_MIB = 3072

_UNSHARE = ["unshare", "--net", "--mount", "--propagation", "private", "--"]
# Makes the node, then says so and waits to be told to go on.
_ENTER = f"""
mount -t tmpfs -o size={SHM_MIB}m tmpfs /dev/shm && ip link set lo up || exit 1
echo made && read go && exec "$@" >&2
"""


def why_not() -> str | None:
    """Why there can be no such nodes here, or None if there can be."""
    for program in ("unshare", "nsenter", "ip"):
        if shutil.which(program) is None:
            return f"there is no program {program!r}"
    script = f"ip link add {DEVICE} type veth peer name {DEVICE}0"
    probe = subprocess.run([*_UNSHARE, "sh", "-c", script], capture_output=True)
    if probe.returncode != 0:
        return f"namespaces or veth are not allowed: {probe.stderr.decode().strip()}"
    return None


@contextlib.contextmanager
def two_nodes(
    programs: Sequence[list[str]],
    logs: Sequence[Path],
    env: Mapping[str, str] | None = None,
) -> Iterator[tuple[subprocess.Popen, subprocess.Popen]]:
    """Run a program on each node, its output in a log of its own; `env` is added
    to the environment. Leaving the block kills what is left of them."""
    processes = []
    try:
        for program, log in zip(programs, logs):
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [*_UNSHARE, "sh", "-c", _ENTER, "sh", *program],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    env=os.environ | dict(env or {}),
                    start_new_session=True,
                )
            processes.append(process)
        for process, log in zip(processes, logs):
            assert process.stdout is not None
            made = process.stdout.readline()
            assert made == b"made\n", log.read_text()
        _connect(processes[0].pid, processes[1].pid)
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.flush()
        yield processes[0], processes[1]
    finally:
        for process in processes:
            # Workers are in the session of their node's first process.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _connect(pid: int, peer: int) -> None:
    def ip(node: int, *args: str) -> None:
        command = ["nsenter", "--target", str(node), "--net", "ip", *args]
        subprocess.run(command, check=True, capture_output=True)

    ip(pid, *f"link add {DEVICE} type veth peer name {DEVICE} netns {peer}".split())
    for node, address in zip((pid, peer), ADDRESSES):
        ip(node, "addr", "add", f"{address}/24", "dev", DEVICE)
        ip(node, "link", "set", DEVICE, "up")
