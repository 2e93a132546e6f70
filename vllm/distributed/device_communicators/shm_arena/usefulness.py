# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Whether a configuration gives the arena anything to carry.

Imports nothing of the arena: configurations are made where there is none.
"""

from typing import TYPE_CHECKING

from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = init_logger(__name__)


def warn_if_useless(vllm_config: "VllmConfig") -> None:
    """Warn once, and say what would help, if `enable_shm_tensor_arena` is on and
    no large tensor will go through the queue. Called by `VllmConfig`. Which nodes
    the workers are on is known to the queue only, which warns itself."""
    if reason := _useless_reason(vllm_config):
        logger.warning_once("enable_shm_tensor_arena has no effect: %s", reason)


def _useless_reason(vllm_config: "VllmConfig") -> str | None:
    parallel_config = vllm_config.parallel_config
    if parallel_config.distributed_executor_backend == "uni":
        return (
            "a single worker gets its inputs without a message queue. Use "
            "--tensor-parallel-size 2 or more, or --distributed-executor-backend mp."
        )
    model_config = vllm_config.model_config
    if model_config is None or model_config.enable_prompt_embeds:
        return None
    if model_config.runner_type == "draft":
        return None  # workers make a configuration of their own for it
    mm_config = model_config.multimodal_config
    if mm_config is None or not _takes_multimodal(model_config):
        return (
            "with text alone no tensor of 8 MiB is sent to the workers. It carries "
            "multi-modal inputs, where the model has them and neither "
            "--language-model-only nor --limit-mm-per-prompt rules them out, or "
            "prompt embeddings with --enable-prompt-embeds; without either, leave "
            "it out."
        )
    # Several API servers, or engines behind one, do not share this cache.
    if (
        mm_config.mm_processor_cache_type == "shm"
        and mm_config.mm_processor_cache_gb > 0
        and parallel_config._api_process_count == 1
        and (
            parallel_config.data_parallel_size == 1
            or parallel_config.data_parallel_external_lb
        )
    ):
        return (
            "with --mm-processor-cache-type shm multi-modal inputs reach the workers "
            "through that cache, except those above "
            "--mm-shm-cache-max-object-size-mb "
            f"({mm_config.mm_shm_cache_max_object_size_mb}). "
            "Use --mm-processor-cache-type lru."
        )
    return None


def _takes_multimodal(model_config: "ModelConfig") -> bool:
    mm_config = model_config.get_multimodal_config()
    if mm_config.enable_mm_embeds:
        return True  # embeddings pass whatever the limits
    if mm_config.language_model_only:
        return False
    limits = mm_config.limit_per_prompt
    if not limits or any(mm_config.get_limit_per_prompt(name) for name in limits):
        return True
    # What is not limited by name has no limit, if the model knows it.
    from vllm.multimodal import MULTIMODAL_REGISTRY

    try:
        info = MULTIMODAL_REGISTRY.get_processing_info(model_config)
    except Exception:
        # No processor (a part of a model, such as its language model), or one that
        # cannot be made now. Whatever it is, no warning ends a start.
        return True
    return any(info.allowed_mm_limits.values())
