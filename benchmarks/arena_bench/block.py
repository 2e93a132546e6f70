# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One block of the benchmark: a fresh writer, its readers, and their end.

This module runs in the benchmark's own process and imports neither torch nor
vllm: each arm has its own vllm, and only the processes of a block load it.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

END_TIMEOUT_S = 30


class BenchmarkError(Exception):
    """A sentence for the user."""


@dataclass(frozen=True)
class Block:
    """What one set of processes does.

    Args:
        arm: Name in the results.
        job: "tensors": send `messages`, one at a time. "limit": copy the one
            tensor of `messages[0]` without the queue. "text": send messages
            without tensors by two queues in turn, flag off and on. "pairs":
            each of `messages` by two queues in turn, flag off and on.
        n_reader: Reader processes.
        messages: Bytes of the tensors of each message; for "text" its length
            alone counts.
        use_arena: The queue's flag.
        tree: Folder with another `vllm/`; None is the environment's.
        gap_s: Pause before each message.
        n_remote: Of the readers, the last so many get all over TCP (loopback), as
            if they were on another node.

    """

    arm: str
    job: Literal["tensors", "limit", "text", "pairs"]
    n_reader: int
    messages: tuple[tuple[int, ...], ...]
    use_arena: bool = False
    tree: Path | None = None
    gap_s: float = 0.0
    n_remote: int = 0


def run_block(block: Block) -> dict[str, Any]:
    """Start the processes, return the writer's result, and see them end.

    Raises:
        BenchmarkError: If one of them ended too early.

    """
    spawn = multiprocessing.get_context("spawn")
    results, writer_results = spawn.Pipe(duplex=False)
    links = [spawn.Pipe() for _ in range(block.n_reader)]
    # Touched here by its initialization; without a name, so nothing is left.
    warm = (
        spawn.RawArray(ctypes.c_uint8, block.messages[0][0])
        if block.job == "limit"
        else None
    )
    processes: list[BaseProcess] = [
        spawn.Process(
            target=_run_writer,
            name="The writer",
            args=(block, [link for link, _ in links], writer_results, warm),
        )
    ]
    for rank, (_, link) in enumerate(links):
        processes.append(
            spawn.Process(
                target=_run_reader,
                name=f"Reader {rank}",
                args=(block, rank, link, warm),
            )
        )
    # Python's tracker of shared memory, started with the first process, would
    # unblock the signal.
    resource_tracker.ensure_running()
    try:
        # Ctrl-C reaches every process of the terminal. They inherit this mask
        # and leave it to us to end them, in order and without tracebacks.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for process in processes:
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        # An end that stays open here would hide that its process is gone.
        for end in (writer_results, *(end for pair in links for end in pair)):
            end.close()
        result = _await_result(block, results, processes)
        for process in processes:
            process.join(END_TIMEOUT_S)
            if process.exitcode != 0:
                print(
                    f"{process.name} of arm {block.arm!r} did not end as it should "
                    f"(exit status {process.exitcode}); what it measured is used.",
                    file=sys.stderr,
                )
        return result
    finally:
        _stop(processes)


def _await_result(
    block: Block, results: Connection, processes: list[BaseProcess]
) -> dict[str, Any]:
    """Wait for the writer's result; no process ends before it is sent."""
    ready = wait([results, *(process.sentinel for process in processes)])
    if results in ready:
        try:
            return results.recv()
        except EOFError:
            processes[0].join(END_TIMEOUT_S)
    # Whoever misses the other end of a pipe returns quietly with status 0, so
    # what else there is tells who was the first.
    for process in processes:
        process.join(1)
    culprit = next((p for p in processes if p.exitcode), processes[0])
    raise BenchmarkError(
        f"{culprit.name} of arm {block.arm!r} with {block.n_reader} readers ended "
        f"before its work was done (exit status {culprit.exitcode})."
    )


def _stop(processes: list[BaseProcess]) -> None:
    started = [process for process in processes if process.pid is not None]
    for process in started:
        if process.is_alive():
            process.terminate()
    for process in started:
        process.join(END_TIMEOUT_S)
        if process.is_alive():
            process.kill()
            process.join()


def _run_writer(
    block: Block, links: list[Connection], results: Connection, warm: Any
) -> None:
    _enter(block.tree)
    from . import writer

    writer.run(block, links, results, warm)


def _run_reader(block: Block, rank: int, link: Connection, warm: Any) -> None:
    _enter(block.tree)
    from . import reader

    reader.run(block, rank, link, warm)


def _enter(tree: Path | None) -> None:
    """Prepare a process of the block, before it imports vllm."""
    # So that finalizers remove shared memory when the block is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # A source tree has no compiled modules, and the queue needs none.
    stub = "vllm._C_stable_libtorch"
    sys.modules.setdefault(stub, ModuleType(stub))
    if tree is not None:
        sys.path.insert(0, str(tree))
    try:
        import vllm.distributed.device_communicators.shm_broadcast as queue_module
    except ImportError as e:
        sys.exit(f"vllm{f' in {tree}' if tree else ''} cannot be imported: {e}")
    if tree is not None and not Path(queue_module.__file__).is_relative_to(tree):
        sys.exit(f"{queue_module.__file__} was imported in place of that in {tree}")


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
