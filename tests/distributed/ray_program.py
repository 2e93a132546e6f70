# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A `RayExecutorV2` with a Ray of its own on this machine, as a program.

It writes down what all workers told, as JSON. Ray is told of as many GPUs as there
are workers; nobody uses one.
"""

import argparse
import json
from pathlib import Path

import ray

from tests.distributed.call_worker import CallWorker, send_to_all
from vllm.config import ParallelConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2


def pretend_gpus() -> None:
    """Let vLLM ask Ray for GPUs. On a CPU it asks for nothing and gives up."""
    type(current_platform).ray_device_key = "GPU"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--report", type=Path, required=True)
    args = parser.parse_args()

    pretend_gpus()
    parallel_config = ParallelConfig(
        tensor_parallel_size=args.workers,
        distributed_executor_backend="ray",
        worker_cls=f"{CallWorker.__module__}.{CallWorker.__qualname__}",
        enable_shm_tensor_arena=True,
    )
    ray.init(
        num_cpus=args.workers,
        num_gpus=args.workers,
        include_dashboard=False,
        object_store_memory=100 << 20,
        # Ray has this hook for all processes of a job only.
        runtime_env={
            "worker_process_setup_hook": "tests.distributed.ray_program.pretend_gpus"
        },
        _temp_dir=str(args.folder),
    )
    try:
        executor = RayExecutorV2(VllmConfig(parallel_config=parallel_config))
        args.report.write_text(json.dumps(send_to_all(executor, args.sizes)))
        executor.shutdown()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
