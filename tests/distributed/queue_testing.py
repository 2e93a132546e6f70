# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the tests of queues with an arena share."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.distributed.arena_testing import MIB, is_in_shared_memory
from vllm.distributed.device_communicators import shm_tensor_arena
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

BIG = 9 * MIB  # above the threshold of 8 MiB
N_SLOTS = 40  # four tensors of BIG and a bit
TIMEOUT = 120  # seconds; only a failure waits that long


def shrink_arenas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue's writer creates a small arena; readers learn of that."""
    real = shm_tensor_arena.ShmTensorArena.__init__

    def init(self, n_reader, slot_bytes=MIB, n_slots=N_SLOTS, *args, **kwargs):
        real(self, n_reader, slot_bytes, n_slots, *args, **kwargs)

    monkeypatch.setattr(shm_tensor_arena.ShmTensorArena, "__init__", init)


def close_queues() -> None:
    """A queue has no close. In a reference cycle (a traceback is enough) it may
    hang when it is collected: its zmq context waits for sockets that are
    collected after it."""
    for queue in [o for o in gc.get_objects() if type(o) is MessageQueue]:
        # One that could not be made has none.
        sockets = [vars(queue).get(f"{where}_socket") for where in ("local", "remote")]
        for socket in filter(None, sockets):
            socket.context.destroy(linger=0)


def pass_barrier(writer: MessageQueue, readers: list[MessageQueue]) -> None:
    with ThreadPoolExecutor(len(readers)) as threads:
        waits = [threads.submit(reader.wait_until_ready) for reader in readers]
        writer.wait_until_ready()
        for wait in waits:
            wait.result(TIMEOUT)


def is_diverted(writer: MessageQueue, t: torch.Tensor) -> bool:
    assert writer.tensor_arena is not None
    return is_in_shared_memory(t, writer.tensor_arena.shared_memory.name)
