# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A worker for tests of executors: without a model, it tells what reached it."""

import os
import sys
import zlib
from typing import Any

import torch

from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.v1.worker import worker_base

ARENA_MODULE = "vllm.distributed.device_communicators.shm_tensor_arena"

# It would ask the model. An executor imports the worker's module before.
worker_base.worker_receiver_cache_from_config = lambda *_: None


class CallWorker(worker_base.WorkerBase):
    """A worker that has no model and no device."""

    def init_device(self) -> None:
        config = self.parallel_config
        init_distributed_environment(
            config.world_size,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            "gloo",
        )
        ensure_model_parallel_initialized(
            config.tensor_parallel_size, config.pipeline_parallel_size
        )

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def keep(self, t: torch.Tensor) -> dict[str, Any]:
        """Keep a tensor until the next call; tell of it."""
        self.kept = t
        return {
            "rank": self.rank,
            "address": os.environ.get("VLLM_HOST_IP"),
            "shared": _is_in_arena(t),
            "checksum": checksum(t),
            "has_arena_module": ARENA_MODULE in sys.modules,
        }


def send_to_all(executor: Any, sizes: list[int]) -> dict[str, Any]:
    """Send tensors of so many bytes to all workers, one after the other: what
    they told of each, and the arena's statistics."""
    calls = []
    noise = torch.Generator().manual_seed(0)
    for nbytes in sizes:
        sent = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=noise)
        told = executor.collective_rpc("keep", args=(sent,))
        calls.append({"checksum": checksum(sent), "workers": told})
    arena = executor.get_tensor_arena()
    assert arena is not None
    return {"calls": calls, "stats": arena.take_stats()}


def checksum(t: torch.Tensor) -> int:
    # Not torch's sum: its OpenMP threads do not survive a fork.
    return zlib.crc32(t.numpy())


def _is_in_arena(t: torch.Tensor) -> bool:
    """By address, and the prefix of an arena's name, which the worker is not told."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, rest = line.partition(" ")
            start, end = (int(x, 16) for x in span.split("-"))
            if start <= t.data_ptr() < end:
                return "vllm_arena_" in rest
    return False
