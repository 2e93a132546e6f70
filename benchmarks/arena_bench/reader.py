# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A reader: what a worker does with the tensors of a message."""

import itertools
import os
import sys
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from .block import Block

# The queue that each message goes by where there are two, so that neither is
# always the first of a pair. Writer and readers must agree.
TURNS = (0, 1, 1, 0)


class Report(NamedTuple):
    dequeued: float
    """`time.monotonic()`, one clock for all processes of a Linux machine."""
    on_device: float
    shared_bytes: int
    """Bytes of the message's tensors that lie in a shared mapping."""


class CpuDevice:
    """A CPU worker's `.to(device)` copies nothing: the bytes are "on the device"
    when its model has read them, once. So all are summed here."""

    def __init__(self, n_reader: int):
        # A worker has its share of the CPUs.
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // n_reader))
        self._sum = 0

    def take(self, tensors: list[torch.Tensor]) -> None:
        """Bring all bytes to where the worker computes; return when there."""
        self._sum = sum(checksum(t) for t in tensors)

    def checksum(self) -> int:
        """Sum of what was taken last, as 64-bit integers."""
        return wrapped(self._sum)


class CudaDevice:
    """Copies into device memory that is there before: a worker's allocator has
    it cached."""

    def __init__(self, rank: int, nbytes: int):
        torch.cuda.set_device(rank % torch.cuda.device_count())
        self._buffer = torch.zeros(max(8, nbytes), dtype=torch.uint8, device="cuda")
        self._used = 0
        self.checksum()

    def take(self, tensors: list[torch.Tensor]) -> None:
        self._used = 0
        for t in tensors:
            end = self._used + t.numel()
            self._buffer[self._used : end].copy_(t, non_blocking=True)
            self._used = end
        torch.cuda.synchronize()

    def checksum(self) -> int:
        return wrapped(checksum(self._buffer[: self._used]))


def checksum(t: torch.Tensor) -> int:
    return int(t.view(torch.int64).sum())


def wrapped(total: int) -> int:
    return total & 0xFFFF_FFFF_FFFF_FFFF


def run(block: Block, rank: int, link: Connection, warm: Any) -> None:
    # Before the queue is opened, as a worker has CUDA up by then.
    device: CpuDevice | CudaDevice
    if torch.cuda.is_available():
        device = CudaDevice(rank, max(map(sum, block.messages)))
    else:
        device = CpuDevice(block.n_reader)
    warm_tensors = [] if warm is None else [_registered(warm)]
    try:
        handles = link.recv()
    except EOFError:
        return
    queues = [MessageQueue.create_from_handle(handle, rank) for handle in handles]
    for queue in queues:
        queue.wait_until_ready()
    for turn in itertools.cycle(TURNS if len(queues) > 1 else (0,)):
        message = queues[turn].dequeue(indefinite=True)
        dequeued = time.monotonic()
        if message is None:
            return
        expected, tensors, _ = message
        tensors = tensors or warm_tensors
        device.take(tensors)
        on_device = time.monotonic()
        if device.checksum() != expected:
            sys.exit(f"Reader {rank} of arm {block.arm!r} got wrong bytes.")
        report = Report(dequeued, on_device, _shared_bytes(tensors))
        # The arena's slots are free again when nothing refers to the tensors.
        del message, tensors
        link.send(report)


def _registered(warm: Any) -> torch.Tensor:
    t = torch.frombuffer(warm, dtype=torch.uint8)
    if torch.cuda.is_available():
        error = torch.cuda.cudart().cudaHostRegister(t.data_ptr(), t.numel(), 0)
        if int(error) != 0:
            sys.exit(f"The limit needs pinned memory: cudaHostRegister says {error}.")
    return t


def _shared_bytes(tensors: list[torch.Tensor]) -> int:
    if not tensors:
        return 0
    ranges = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, permissions, *_ = line.split(maxsplit=2)
            if permissions.endswith("s"):
                start, _, end = addresses.partition("-")
                ranges.append((int(start, 16), int(end, 16)))
    return sum(
        t.numel()
        for t in tensors
        if any(start <= t.data_ptr() < end for start, end in ranges)
    )
