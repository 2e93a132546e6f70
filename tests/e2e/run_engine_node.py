# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One of the two nodes of a real engine, as a program.

The first one asks it something with prompt embeddings, and reports; the second one
serves until it is killed.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import worker_recorder
from run_engine import prompt_embeds

from demo_lib.server import engine_environment
from tests.distributed.network_nodes import ADDRESSES, DEVICE
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.executor.multiproc_executor import MultiprocExecutor


def lead(options: dict[str, Any], prompts: list[Any], report: Path) -> None:
    llm = LLM(**options)
    llm.collective_rpc("start_recording")
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    llm.generate(prompts, sampling, use_tqdm=False)
    result = {
        "sent": [worker_recorder.digest(prompt["prompt_embeds"]) for prompt in prompts],
        "arrived": llm.collective_rpc("what_arrived"),
        "workers_with_arena_module": llm.collective_rpc("has_arena_module"),
    }
    report.write_text(json.dumps(result))


def follow(options: dict[str, Any]) -> None:
    config = EngineArgs(**options).create_engine_config(headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("node", type=int, choices=[0, 1])
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()

    cpus = sorted(os.sched_getaffinity(0))
    os.environ |= engine_environment(args.folder / f"logging{args.node}.json") | {
        "VLLM_HOST_IP": ADDRESSES[args.node],
        "GLOO_SOCKET_IFNAME": DEVICE,
        "VLLM_CPU_OMP_THREADS_BIND": str(cpus[args.node]),
    }
    options, prompts = prompt_embeds()
    options |= {
        "nnodes": 2,
        "node_rank": args.node,
        "master_addr": ADDRESSES[0],
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "enable_shm_tensor_arena": True,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_num_seqs": 4,
        "worker_extension_cls": "worker_recorder.WorkerRecorder",
    }
    if args.node == 0:
        lead(options, prompts, args.folder / "report.json")
    else:
        follow(options)


# Spawned workers import this file again.
if __name__ == "__main__":
    main()
