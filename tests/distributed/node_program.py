# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A node of a `MultiprocExecutor` over two nodes, as a program.

Its workers have no model: they run one call and tell what reached them. The first
node writes down what all of them told, as JSON.
"""

import argparse
import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import torch

from tests.distributed.network_nodes import ADDRESSES, DEVICE
from vllm.config import ParallelConfig, VllmConfig
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.worker import worker_base

N_NODES = 2
ARENA_MODULE = "vllm.distributed.device_communicators.shm_tensor_arena"


class CallWorker(worker_base.WorkerBase):
    """A worker that has no model and no device."""

    def init_device(self) -> None:
        config = self.parallel_config
        init_distributed_environment(
            config.world_size, self.rank, "env://", self.local_rank, "gloo"
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
            "address": os.environ["VLLM_HOST_IP"],
            "shared": _is_in_shared_memory(t),
            "checksum": checksum(t),
            "has_arena_module": ARENA_MODULE in sys.modules,
        }


def checksum(t: torch.Tensor) -> int:
    # Not torch's sum: its OpenMP threads do not survive the fork.
    return zlib.crc32(t.numpy())


def _is_in_shared_memory(t: torch.Tensor) -> bool:
    """By address: after the barrier the arena's mapping has no name but this."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, rest = line.partition(" ")
            start, end = (int(x, 16) for x in span.split("-"))
            if start <= t.data_ptr() < end:
                return "vllm_arena_" in rest
    return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("node", type=int)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--report", type=Path, required=True)
    args = parser.parse_args()

    os.environ |= {
        "VLLM_HOST_IP": ADDRESSES[args.node],
        "GLOO_SOCKET_IFNAME": DEVICE,
        # The workers compute nothing.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    parallel_config = ParallelConfig(
        tensor_parallel_size=args.workers,
        distributed_executor_backend="mp",
        nnodes=N_NODES,
        node_rank=args.node,
        master_addr=ADDRESSES[0],
        # How many ranks share a node is told by this.
        assigned_physical_gpu_ids=list(range(args.workers // N_NODES)),
        worker_cls=f"{CallWorker.__module__}.{CallWorker.__qualname__}",
        enable_shm_tensor_arena=True,
    )
    # It would ask the model. Forked workers inherit this.
    worker_base.worker_receiver_cache_from_config = lambda *_: None
    vllm_config = VllmConfig(parallel_config=parallel_config)
    # One import for all processes of a node. Now, as CPUs are given "spawn".
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    leads = args.node == 0
    executor = MultiprocExecutor(vllm_config, monitor_workers=leads)
    if not leads:
        # Returns when a worker ends.
        executor.start_worker_monitor(inline=True)
        return
    calls = []
    noise = torch.Generator().manual_seed(0)
    for nbytes in args.sizes:
        sent = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=noise)
        told = executor.collective_rpc("keep", args=(sent,))
        calls.append({"checksum": checksum(sent), "workers": told})
    arena = executor.get_tensor_arena()
    assert arena is not None
    args.report.write_text(json.dumps({"calls": calls, "stats": arena.take_stats()}))
    executor.shutdown()


if __name__ == "__main__":
    # The workers' class is found by the module's name.
    from tests.distributed import node_program

    node_program.main()
