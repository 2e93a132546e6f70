# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A node of a `MultiprocExecutor` over two nodes, as a program.

The first node writes down what all workers told, as JSON.
"""

import argparse
import json
import os
from pathlib import Path

from tests.distributed.call_worker import CallWorker, send_to_all
from tests.distributed.network_nodes import ADDRESSES, DEVICE
from vllm.config import ParallelConfig, VllmConfig
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

N_NODES = 2


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
        # By their number vLLM tells which ranks share a node.
        assigned_physical_gpu_ids=list(range(args.workers // N_NODES)),
        worker_cls=f"{CallWorker.__module__}.{CallWorker.__qualname__}",
        enable_shm_tensor_arena=True,
    )
    vllm_config = VllmConfig(parallel_config=parallel_config)
    # One import for all processes of a node. Now, as CPUs are given "spawn".
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    leads = args.node == 0
    executor = MultiprocExecutor(vllm_config, monitor_workers=leads)
    if not leads:
        # Returns when a worker ends.
        executor.start_worker_monitor(inline=True)
        return
    args.report.write_text(json.dumps(send_to_all(executor, args.sizes)))
    executor.shutdown()


if __name__ == "__main__":
    main()
