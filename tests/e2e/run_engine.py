# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One life of a real engine, as a program: starts, answers, reports, ends.

A program and not a fixture, because only a process that ends shows what an engine
leaves behind, and because two engines in one process share state.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from worker_recorder import digest, mm_digests

from demo_lib.photos import photograph
from demo_lib.server import worker_count
from demo_lib.tiny_models import tiny_qwen2, tiny_qwen2_vl
from vllm import LLM, SamplingParams

CHUNK_TOKENS = 1024
EMBEDS_TOKENS = 6000


def images(n_workers: int) -> tuple[dict[str, Any], list[Any]]:
    """A prompt with one photograph, one with two."""
    model = tiny_qwen2_vl(max(2, n_workers))
    options = {
        "model": str(model),
        "limit_mm_per_prompt": {"image": 2, "video": 0},
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
        "mm_processor_cache_gb": 0,
        "skip_mm_profiling": True,
    }
    names = [["astronaut"], ["chelsea", "coffee"]]
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    prompts = [
        {
            "prompt": f"{image * len(photos)}What do you see?",
            "multi_modal_data": {"image": [photograph(p, 2048) for p in photos]},
        }
        for photos in names
    ]
    return options, prompts


def prompt_embeds() -> tuple[dict[str, Any], list[Any]]:
    """A prompt of embeddings, several chunks long."""
    options = {
        "model": str(tiny_qwen2()),
        "enable_prompt_embeds": True,
        "max_model_len": 8192,
        "max_num_batched_tokens": CHUNK_TOKENS,
    }
    noise = torch.Generator().manual_seed(0)
    embeds = torch.randn(EMBEDS_TOKENS, 1024, generator=noise).to(torch.bfloat16)
    return options, [{"prompt_embeds": embeds}]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=["images", "prompt_embeds"])
    parser.add_argument("--arena", choices=["on", "off"], required=True)
    parser.add_argument("--report", type=Path, required=True)
    # More than worker_count() needs one CPU each in VLLM_CPU_OMP_THREADS_BIND.
    parser.add_argument("--workers", type=int, default=worker_count())
    args = parser.parse_args()

    images_wanted = args.workload == "images"
    options, prompts = images(args.workers) if images_wanted else prompt_embeds()
    llm = LLM(
        **options,
        enable_shm_tensor_arena=args.arena == "on",
        tensor_parallel_size=args.workers,
        distributed_executor_backend="mp",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=4,
        worker_extension_cls="worker_recorder.WorkerRecorder",
    )

    sent: list[str] = []
    engine_core = llm.llm_engine.engine_core
    add_request = engine_core.add_request

    def recording(request: Any) -> None:
        sent.extend(mm_digests(request.mm_features or []))
        if request.prompt_embeds is not None:
            sent.append(digest(request.prompt_embeds))
        add_request(request)

    engine_core.add_request = recording
    llm.collective_rpc("start_recording")
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    # One after the other: a batch's order of arrival would be left to chance.
    tokens = [
        list(llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0].token_ids)
        for prompt in prompts
    ]
    report = {
        "tokens": tokens,
        "sent": sent,
        "arrived": llm.collective_rpc("what_arrived"),
        "workers_with_arena_module": llm.collective_rpc("has_arena_module"),
    }
    args.report.write_text(json.dumps(report))


# Spawned workers import this file again.
if __name__ == "__main__":
    main()
