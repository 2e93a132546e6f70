# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""One life of a real engine with many images in flight at once, as a program.

The scheduler runs in this process and the workers in their own, so that all
requests are there before the first step, every run schedules the same steps, and
what the scheduler and the arena know can be looked at between them.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from demo_lib.photos import photograph
from demo_lib.server import worker_count
from demo_lib.tiny_models import pixel_bytes, tiny_qwen2_vl
from vllm import LLM, SamplingParams

REQUESTS = 20
# 484 tokens, 9 MB.
EDGE = 1232
OUTPUT_TOKENS = 48
# More than an image, so that an image is encoded at a time, and less than two
# images: their outputs push each other out of the encoder cache.
STEP_TOKENS = 768
BLOCK_TOKENS = 32
# A request is 16 blocks long when it begins to answer and 18 when it ends.
TIGHT_BLOCKS = 170


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=["roomy", "tight", "speculative"])
    parser.add_argument("--arena", choices=["on", "off"], required=True)
    parser.add_argument("--report", type=Path, required=True)
    args = parser.parse_args()

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    options: dict[str, Any] = {}
    if args.workload != "roomy":
        options["num_gpu_blocks_override"] = TIGHT_BLOCKS
    if args.workload == "speculative":
        # Random weights repeat themselves soon, so that drafts are accepted, too.
        options["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    llm = LLM(
        model=str(tiny_qwen2_vl()),
        limit_mm_per_prompt={"image": 1, "video": 0},
        max_model_len=1024,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=REQUESTS,
        # Bounds the encoder cache, too.
        mm_processor_kwargs={"max_pixels": EDGE**2},
        mm_processor_cache_gb=0,
        skip_mm_profiling=True,
        block_size=BLOCK_TOKENS,
        enable_shm_tensor_arena=args.arena == "on",
        tensor_parallel_size=worker_count(),
        distributed_executor_backend="mp",
        enforce_eager=True,
        enable_prefix_caching=False,
        **options,
    )
    core = llm.llm_engine.engine_core.engine_core
    if args.arena == "on":
        from vllm.distributed.device_communicators import shm_tensor_arena

        # The gauges are looked at in every step, however short it is.
        shm_tensor_arena._GAUGES_INTERVAL_S = 0
    steps: list[dict[str, Any]] = []
    seen: set[str] = set()
    schedule, scheduler = core.scheduler.schedule, core.scheduler

    def recording(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        arena = core.model_executor.get_tensor_arena()
        stats = arena.take_stats() if arena is not None else None
        # The V2 model runner gets what resumes as it gets what is new.
        new = [request.req_id for request in output.scheduled_new_reqs]
        steps.append(
            {
                "running": len(scheduler.running),
                "prefilling": sum(n > 1 for n in output.num_scheduled_tokens.values()),
                "resumed": len(output.scheduled_cached_reqs.resumed_req_ids)
                + len(seen.intersection(new)),
                "drafted": sum(map(len, output.scheduled_spec_decode_tokens.values())),
                "encoded": sum(map(len, output.scheduled_encoder_inputs.values())),
                "preempted": sum(
                    r.num_preemptions for r in scheduler.requests.values()
                ),
                "slots_in_use": stats["slots_in_use"] if stats else None,
            }
        )
        seen.update(new)
        return output

    scheduler.schedule = recording
    photos = [photograph("astronaut", EDGE).rotate(18 * i) for i in range(REQUESTS)]
    prompts = [
        {
            "prompt": "<|vision_start|><|image_pad|><|vision_end|>What do you see?",
            "multi_modal_data": {"image": photo},
        }
        for photo in photos
    ]
    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    report = {
        "requests": REQUESTS,
        "image_bytes": pixel_bytes(tiny_qwen2_vl(), EDGE),
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "steps": steps,
    }
    args.report.write_text(json.dumps(report))


# Spawned workers import this file again.
if __name__ == "__main__":
    main()
