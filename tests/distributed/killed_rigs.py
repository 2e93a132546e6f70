# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Kill queues with an arena at every moment, all on one /dev/shm; run by
test_shm_arena_sigkill.py, which says what is expected.

A *rig* is a writer and two readers, each a process. One of them stops at the
moment in question, the victims get SIGKILL, the others go on for a while, and then
all are killed. Prints a line of JSON for each.
"""

import ctypes
import json
import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from tests.distributed.arena_testing import MIB
from tests.distributed.process_groups import (
    kill_group,
    run_in_group,
    wait_for_end_of,
)
from vllm.distributed.device_communicators import shm_tensor_arena
from vllm.distributed.device_communicators.shm_arena import (
    backing,
    layout,
    segment,
)
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

SHM = Path("/dev/shm")
N_READER = 2
N_MESSAGES = 4
BIG = 9 * MIB  # above the threshold of 8 MiB
N_SLOTS = 40
TIMEOUT = 60  # seconds; only a failure waits that long
# How long the survivors are watched.
AFTERWARDS_S = 0.2

# In order. The first four are before the end of the barrier.
MOMENTS = (
    "creating",
    "created",
    "attaching",
    "preparing",
    "copying",
    "loading",
    "in flight",
    "closing",
)
BEFORE_BARRIER = MOMENTS[:4]
VICTIMS = ("all", "writer", "reader", "tracker")


class Rig:
    def __init__(self, moment: str | None):
        self.moment = moment
        self.here = os.pipe()
        self.go = os.pipe()
        # Outlives whoever is killed.
        self.tracker_pid = memoryview(mmap.mmap(-1, 8)).cast("q")
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe() for _ in range(N_READER)]
        self.processes = [
            context.Process(
                target=run_in_group, args=(self.write, [pipe[0] for pipe in pipes])
            )
        ]
        for rank, (_, pipe) in enumerate(pipes):
            self.processes.append(
                context.Process(target=run_in_group, args=(self.read, rank, pipe))
            )
        for process in self.processes:
            process.start()

    def close(self) -> None:
        for process in self.processes:
            assert process.pid is not None
            kill_group(process.pid)
            process.join()
        for end in (*self.here, *self.go):
            os.close(end)

    # ---- In the rig's processes

    def stop_at(self, moment: str) -> None:
        if self.moment == moment:
            self.moment = None
            os.write(self.here[1], b"!")
            os.read(self.go[0], 1)

    def stop_before(self, owner: Any, function: str, moment: str) -> None:
        original: Callable = getattr(owner, function)

        def stop(*args: Any, **kwargs: Any) -> Any:
            self.stop_at(moment)
            return original(*args, **kwargs)

        setattr(owner, function, stop)

    def write(self, pipes: list) -> None:
        take_pages = segment.ArenaSegment.take_pages

        def take_and_stop(*args: Any) -> bool:
            self.tracker_pid[0] = resource_tracker._resource_tracker._pid or 0
            taken = take_pages(*args)
            self.stop_at("creating")
            return taken

        segment.ArenaSegment.take_pages = take_and_stop  # type: ignore[method-assign]
        init = shm_tensor_arena.ShmTensorArena.__init__
        shm_tensor_arena.ShmTensorArena.__init__ = (  # type: ignore[method-assign]
            lambda arena, n: init(arena, n, MIB, N_SLOTS)  # type: ignore[misc]
        )
        queue = MessageQueue(
            N_READER, N_READER, max_chunk_bytes=MIB, enable_shm_tensor_arena=True
        )
        self.stop_at("created")
        for pipe in pipes:
            pipe.send(queue.export_handle())
        self.stop_before(backing.PageBacking, "_touch", "preparing")
        queue.wait_until_ready()

        memmove = ctypes.memmove

        def move_and_stop(*args: Any) -> None:
            memmove(*args)
            self.stop_at("copying")

        ctypes.memmove = move_and_stop  # type: ignore[assignment]
        for i in range(N_MESSAGES):
            queue.enqueue(torch.full((BIG,), i, dtype=torch.uint8))
        self.stop_before(segment.ArenaSegment, "close", "closing")
        for pipe in pipes:
            pipe.recv()
        del queue
        for pipe in pipes:
            pipe.send("closed")

    def read(self, rank: int, pipe: Any) -> None:
        handle = pipe.recv()
        if rank == 0:
            self.stop_before(layout.ArenaFlags, "attach", "attaching")
            self.stop_before(shm_tensor_arena.ShmTensorArena, "get_tensor", "loading")
        queue = MessageQueue.create_from_handle(handle, rank)
        queue.wait_until_ready()
        kept = [queue.dequeue() for _ in range(N_MESSAGES)]
        if rank == 0:
            self.stop_at("in flight")
        for i, t in enumerate(kept):
            assert (t.numpy() == i).all()
        pipe.send("read")
        # Its tensors are still here when the writer closes the arena.
        pipe.recv()


def kill(moment: str, victim: str) -> dict:
    before = os.listdir(SHM)
    rig = Rig(moment)
    try:
        sentinels = [process.sentinel for process in rig.processes]
        if rig.here[0] not in wait([rig.here[0], *sentinels], TIMEOUT):
            raise RuntimeError(f"a process of the rig ended before {moment!r}")
        writer, reader, other = rig.processes
        victims = {
            "all": rig.processes,
            "writer": [writer],
            "reader": [reader if moment not in ("attaching", "loading") else other],
            "tracker": [],
        }[victim]
        tracker = rig.tracker_pid[0]
        assert tracker > 0
        if victim in ("all", "tracker"):
            os.kill(tracker, signal.SIGKILL)
        for process in victims:
            os.kill(process.pid, signal.SIGKILL)
        for process in victims:
            process.join()
        if victim == "writer":
            wait_for_end_of(tracker, TIMEOUT)
        os.write(rig.go[1], b"!")
        if victim != "all":
            time.sleep(AFTERWARDS_S)
        fallen = [
            process.exitcode
            for process in rig.processes
            if process not in victims and process.exitcode
        ]
    finally:
        rig.close()
    left = {
        name: (SHM / name).stat().st_blocks * 512
        for name in os.listdir(SHM)
        if name not in before
    }
    return {"moment": moment, "victim": victim, "left": left, "fallen": fallen}


def run_cleanly() -> list[int | None]:
    rig = Rig(None)
    try:
        for process in rig.processes:
            process.join(TIMEOUT)
        return [process.exitcode for process in rig.processes]
    finally:
        rig.close()


def main() -> None:
    for moment in MOMENTS:
        for victim in VICTIMS:
            print(json.dumps(kill(moment, victim)), flush=True)
    print(json.dumps({"moment": None, "exit codes": run_cleanly()}))


if __name__ == "__main__":
    main()
