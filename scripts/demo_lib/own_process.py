# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A process of ours with all its descendants, and what they put in /dev/shm."""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

import interrupts

SHM_DIR = Path("/dev/shm")
POLL_SECONDS = 0.2
# Between the request to end and the kill.
LEADER_GRACE_SECONDS = 20.0
ORPHAN_GRACE_SECONDS = 5.0


def mapped_shm(pid: int) -> dict[str, int]:
    """Names and inodes of what the process has mapped from /dev/shm.

    By inode: a semaphore is mapped by the process that makes it under a temporary
    name, and renamed afterwards.
    """
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return {}
    # Each line: address perms offset dev inode path
    regions = (line.split(maxsplit=5) for line in maps.splitlines())
    mapped = {
        int(region[4])
        for region in regions
        if len(region) == 6 and region[5].startswith(f"{SHM_DIR}/")
    }
    found = {}
    for path in Path(SHM_DIR).iterdir():
        with contextlib.suppress(OSError):  # gone by now
            if (inode := path.stat().st_ino) in mapped:
                found[path.name] = inode
    return found


@contextlib.contextmanager
def own_process(
    command: list[str], env: dict[str, str], log: Path
) -> Iterator["OwnProcess"]:
    """Run `command`, its output in `log`; leaving the block ends all of it."""
    process = None
    try:
        with interrupts.deferred():
            process = OwnProcess(command, env, log)
        yield process
    finally:
        if process is not None:
            with interrupts.deferred():
                process.end()


class OwnProcess:
    """A command in a session of its own; made by `own_process`.

    The session tells the descendants apart from all other processes, also those
    whose parent has died, and keeps a terminal's Ctrl-C from them, so that they
    end in order.
    """

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        self.log = log
        self.leftovers: list[str] = []
        self._foreign_shm = set(os.listdir(SHM_DIR))
        self._seen_shm: dict[str, int] = {}
        with log.open("wb") as output:
            self._leader = subprocess.Popen(
                command,
                env=os.environ | env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The exit status, None while the command runs.

        To be called now and then: only what a process has mapped at such a moment
        is known to be ours.
        """
        self._look_at_shm()
        return self._leader.poll()

    def wait(self, timeout: float) -> int | None:
        """The exit status once the command has ended, None after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return status

    def end(self) -> None:
        """End every process, then remove what they left in /dev/shm.

        The names of the latter are in `leftovers` afterwards.
        """
        if self._leader.poll() is None:
            self._look_at_shm()
            self._leader.terminate()
            self.wait(LEADER_GRACE_SECONDS)
        self._look_at_shm()
        psutil.wait_procs(self._members(), ORPHAN_GRACE_SECONDS)
        # Again and again: one may be born between the look and the kill.
        while remaining := self._members():
            for process in remaining:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(remaining, POLL_SECONDS)
        self._leader.wait()
        self._remove_shm()

    def _members(self) -> list[psutil.Process]:
        members = []
        for pid in psutil.pids():
            try:
                if os.getsid(pid) != self._leader.pid:
                    continue
                process = psutil.Process(pid)
                # An orphan stays a zombie where nobody reaps; it holds nothing.
                if process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
            except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
                continue
        return members

    def _look_at_shm(self) -> None:
        for process in self._members():
            for name, inode in mapped_shm(process.pid).items():
                if name not in self._foreign_shm:
                    self._seen_shm[name] = inode

    def _remove_shm(self) -> None:
        for name, inode in sorted(self._seen_shm.items()):
            path = SHM_DIR / name
            # The name may be another's by now, the inode is not.
            if path.exists() and path.stat().st_ino == inode:
                path.unlink()
                self.leftovers.append(name)
        self._seen_shm.clear()
