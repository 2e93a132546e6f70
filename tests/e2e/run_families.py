# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Real engines of several model families, every tensor of theirs in the arena.

    python tests/e2e/run_families.py            # all, one process each
    python tests/e2e/run_families.py llava ...  # these

On a CPU the models work on the arena's memory itself: copying to the device is
nothing there. Readers map it read-only, so an operation in place anywhere in a
worker ends that worker. The threshold is one byte here, so that small inputs (grids,
sizes, masks) count too. Prints for each family what arrived and how it was mapped.
`--write` has a worker write into what it gets, to show that this would be noticed.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import torch
import transformers as hf

from demo_lib import tiny_models
from demo_lib.own_process import own_process
from demo_lib.photos import photograph
from demo_lib.server import engine_environment, worker_count

FOLDER = tiny_models.CACHE_DIR / "families"
SECONDS = 1200
REPORT = "workers saw: "
Workload = tuple[dict[str, Any], list[Any]]


class MappingProbe:
    """Mixed into vLLM's worker class: how the tensors of new requests are mapped."""

    model_runner: Any

    def start_probing(self, write: bool) -> None:
        self.seen: dict[str, dict[str, int]] = {}
        execute_model = self.model_runner.execute_model

        def probing(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            for request in scheduler_output.scheduled_new_reqs:
                for name, tensor in tensors_of(request):
                    how = self.seen.setdefault(name, {})
                    mapping = permissions(tensor)
                    how[mapping] = how.get(mapping, 0) + tensor.nbytes
                    if write and self.rank == 1:
                        tensor.add_(1)
            return execute_model(scheduler_output, *args, **kwargs)

        self.model_runner.execute_model = probing

    def what_was_seen(self) -> dict[str, dict[str, int]]:
        return self.seen


def tensors_of(request: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for feature in request.mm_features or []:
        for key, elem in feature.data.items():
            for tensor in leaves(elem.data):
                yield key, tensor
    if request.prompt_embeds is not None:
        yield "prompt_embeds", request.prompt_embeds


def leaves(data: Any) -> Iterator[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, (list, tuple)):
        for item in data:
            yield from leaves(item)


def permissions(tensor: torch.Tensor) -> str:
    """The arena's memory, "read-only" or "writable", or the process's "own"."""
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, perms, *_ = line.split()
        start, end = (int(x, 16) for x in span.split("-"))
        if start <= address < end and "vllm_arena_" in line:
            return "writable" if "w" in perms else "read-only"
    return "own"


# ---- Families -----------------------------------------------------------------


def qwen2_vl(**options: Any) -> Workload:
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    return {"model": str(tiny_models.tiny_qwen2_vl())} | options, [
        prompt(image, ["astronaut"]),
        prompt(image * 2, ["chelsea", "coffee"]),
    ]


def qwen2_vl_transformers() -> Workload:
    """The model code of transformers instead of vLLM's."""
    return qwen2_vl(model_impl="transformers")


def qwen2_vl_embeds() -> Workload:
    """Embeddings in place of images: what the encoder would give."""
    options, _ = qwen2_vl()
    noise = torch.Generator().manual_seed(0)
    embeds = torch.randn(64, 64, generator=noise).to(torch.bfloat16)
    grid = torch.tensor([[1, 16, 16]])
    data = {"image": {"image_embeds": embeds, "image_grid_thw": grid}}
    text = "<|vision_start|><|image_pad|><|vision_end|>What?"
    return options | {"enable_mm_embeds": True}, [
        {"prompt": text, "multi_modal_data": data}
    ]


def prompt_embeds() -> Workload:
    options = {
        "model": str(tiny_models.tiny_qwen2()),
        "enable_prompt_embeds": True,
        "max_num_batched_tokens": 1024,
    }
    noise = torch.Generator().manual_seed(0)
    embeds = torch.randn(3000, 1024, generator=noise).to(torch.bfloat16)
    return options, [{"prompt_embeds": embeds}, {"prompt_embeds": embeds[:100]}]


def qwen3_vl() -> Workload:
    tokenizer = tiny_models._byte_level_tokenizer()
    size = {"shortest_edge": 64 * 64, "longest_edge": 2048 * 2048}
    processor = hf.Qwen3VLProcessor(
        image_processor=hf.Qwen2VLImageProcessor(size=size, patch_size=16),
        tokenizer=tokenizer,
        video_processor=hf.Qwen3VLVideoProcessor(),
        chat_template=tiny_models.CHAT_TEMPLATE,
    )
    token_id = tokenizer.convert_tokens_to_ids
    config = hf.Qwen3VLConfig(
        text_config=text_sizes(tokenizer)
        | {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [4, 6, 6],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 64,
            "out_hidden_size": 64,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
    )
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    return saved("qwen3-vl", config, processor), [
        prompt(image, ["astronaut"], 1024),
        prompt(image * 2, ["chelsea", "coffee"], 512),
    ]


def llava() -> Workload:
    tokenizer = tiny_models._byte_level_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    processor = hf.LlavaProcessor(
        image_processor=hf.CLIPImageProcessor(
            size={"shortest_edge": 336}, crop_size=336
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tiny_models.CHAT_TEMPLATE,
    )
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**text_sizes(tokenizer)),
        vision_config=hf.CLIPVisionConfig(**tower(336, 14)),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    config.architectures = ["LlavaForConditionalGeneration"]
    return saved("llava", config, processor), [
        prompt("<image>", ["astronaut"], 512),
        prompt("<image><image>", ["chelsea", "coffee"], 512),
    ]


def llava_next() -> Workload:
    """Tiles of an image, and its sizes."""
    tokenizer = tiny_models._byte_level_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    grid = [[336, 672], [672, 336], [672, 672]]
    processor = hf.LlavaNextProcessor(
        image_processor=hf.LlavaNextImageProcessor(
            size={"shortest_edge": 336}, crop_size=336, image_grid_pinpoints=grid
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tiny_models.CHAT_TEMPLATE,
    )
    config = hf.LlavaNextConfig(
        text_config=hf.LlamaConfig(**text_sizes(tokenizer)),
        vision_config=hf.CLIPVisionConfig(**tower(336, 14)),
        image_grid_pinpoints=grid,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )
    config.architectures = ["LlavaNextForConditionalGeneration"]
    return saved("llava-next", config, processor), [
        prompt("<image>", ["astronaut"], 1024),
        prompt("<image><image>", ["chelsea", "coffee"], 1024),
    ]


def idefics3() -> Workload:
    """Tiles and their mask; SigLIP-like tower."""
    tokenizer = tiny_models._byte_level_tokenizer()
    tags = [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": [
                "<fake_token_around_image>",
                "<image>",
                "<end_of_utterance>",
                "<global-img>",
                *tags,
            ]
        }
    )
    processor = hf.Idefics3Processor(
        image_processor=hf.Idefics3ImageProcessor(
            size={"longest_edge": 728}, max_image_size={"longest_edge": 364}
        ),
        tokenizer=tokenizer,
        image_seq_len=169,
        chat_template=tiny_models.CHAT_TEMPLATE,
    )
    config = hf.Idefics3Config(
        text_config=hf.LlamaConfig(**text_sizes(tokenizer)),
        vision_config=tower(364, 14),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
    )
    config.architectures = ["Idefics3ForConditionalGeneration"]
    return saved("idefics3", config, processor), [
        prompt("<image>", ["astronaut"], 728),
        prompt("<image><image>", ["chelsea", "coffee"], 728),
    ]


FAMILIES: dict[str, Callable[[], Workload]] = {
    f.__name__: f
    for f in (
        qwen2_vl,
        qwen2_vl_transformers,
        qwen2_vl_embeds,
        qwen3_vl,
        llava,
        llava_next,
        idefics3,
        prompt_embeds,
    )
}


def prompt(images: str, names: list[str], edge: int = 1024) -> dict[str, Any]:
    return {
        "prompt": f"{images}What do you see?",
        "multi_modal_data": {"image": [photograph(name, edge) for name in names]},
    }


def text_sizes(tokenizer: Any) -> dict[str, Any]:
    return tiny_models._text_sizes(tokenizer, hidden_size=64)


def tower(image_size: int, patch_size: int) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": image_size,
        "patch_size": patch_size,
    }


def saved(name: str, config: Any, processor: Any) -> dict[str, Any]:
    """The options for a model of which only the weights are not there."""
    config.dtype = torch.bfloat16
    processor.save_pretrained(FOLDER / name)
    config.save_pretrained(FOLDER / name)
    return {"model": str(FOLDER / name), "load_format": "dummy"}


# ---- One engine ---------------------------------------------------------------


def run(family: str, write: bool) -> None:
    from vllm import LLM, SamplingParams
    from vllm.distributed.device_communicators import shm_tensor_arena

    # The engine core is in this process.
    shm_tensor_arena._MIN_TENSOR_BYTES = 1
    options, prompts = FAMILIES[family]()
    llm = LLM(
        **{
            "limit_mm_per_prompt": {"image": 2, "video": 0},
            "max_num_batched_tokens": 8192,
            "max_model_len": 8192,
            "mm_processor_cache_gb": 0,
            "skip_mm_profiling": True,
            "tensor_parallel_size": worker_count(),
            "distributed_executor_backend": "mp",
            "enable_shm_tensor_arena": True,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "max_num_seqs": 4,
            "worker_extension_cls": f"{Path(__file__).stem}.{MappingProbe.__name__}",
        }
        | options
    )
    llm.collective_rpc("start_probing", args=(write,))
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    # The second time all at once, in one batch of the encoder.
    for batch in [[p] for p in prompts] + [prompts]:
        for output in llm.generate(batch, sampling, use_tqdm=False):
            assert len(output.outputs[0].token_ids) == 8
    print(REPORT + json.dumps(llm.collective_rpc("what_was_seen")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        run(args.families[0], args.write)
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    reports = {family: run_apart(family, args.write) for family in args.families}
    failed = [family for family, report in reports.items() if report is None]
    sys.exit(f"failed: {failed}" if failed else 0)


def run_apart(family: str, write: bool) -> list[dict[str, dict[str, int]]] | None:
    """What each worker saw, or None if the engine has failed; it tells in its log."""
    env = engine_environment(FOLDER / "logging.json") | {
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        ),
        "PYTHONFAULTHANDLER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    command = [sys.executable, __file__, "--here", family] + ["--write"] * write
    log = FOLDER / f"{family}.log"
    with own_process(command, env, log) as process:
        status = process.wait(SECONDS)
    lines = log.read_text(errors="replace").splitlines()
    reports = [line for line in lines if line.startswith(REPORT)]
    print(f"{family}: exit {status}", *reports, f"({log})", flush=True)
    return json.loads(reports[0].removeprefix(REPORT)) if status == 0 else None


# Spawned workers import this file again.
if __name__ == "__main__":
    main()
