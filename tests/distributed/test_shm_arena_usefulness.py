# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The warning where the flag has nothing to carry."""

from types import SimpleNamespace
from unittest import mock

import pytest

from vllm.config import MultiModalConfig, VllmConfig
from vllm.config.parallel import ParallelConfig
from vllm.distributed.device_communicators.shm_arena import usefulness
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.platforms import current_platform


def config_for(
    *,
    backend: str = "mp",
    embeds: bool = False,
    runner: str = "generate",
    api_servers: int = 1,
    **multimodal: object,
) -> SimpleNamespace:
    """What the warning looks at; without keywords a text-only model."""
    mm_config = None
    if multimodal:
        mm_config = MultiModalConfig(**multimodal)
    return SimpleNamespace(
        parallel_config=ParallelConfig(
            enable_shm_tensor_arena=True,
            distributed_executor_backend=backend,
            _api_process_count=api_servers,
        ),
        model_config=SimpleNamespace(
            enable_prompt_embeds=embeds,
            multimodal_config=mm_config,
            get_multimodal_config=lambda: mm_config,
            runner_type=runner,
        ),
    )


@pytest.fixture(autouse=True)
def model_of_images_and_videos(monkeypatch: pytest.MonkeyPatch):
    """What the registry knows of a model, without one."""

    def processing_info(model_config: SimpleNamespace) -> SimpleNamespace:
        limit = model_config.get_multimodal_config().get_limit_per_prompt
        names = ("image", "video")
        return SimpleNamespace(allowed_mm_limits={name: limit(name) for name in names})

    monkeypatch.setattr(MULTIMODAL_REGISTRY, "get_processing_info", processing_info)


SHM_CACHE = {"mm_processor_cache_type": "shm"}
NO_IMAGE = {"limit_per_prompt": {"image": 0}}
NOTHING = {"limit_per_prompt": {"image": 0, "video": 0}}


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        (config_for(backend="uni", **SHM_CACHE), "--tensor-parallel-size 2"),
        (config_for(), "--enable-prompt-embeds"),
        (config_for(language_model_only=True), "--enable-prompt-embeds"),
        (config_for(**NOTHING), "--limit-mm-per-prompt"),
        (config_for(**SHM_CACHE), "--mm-processor-cache-type lru"),
    ],
    ids=["one worker", "text model", "language model only", "limits of 0", "shm cache"],
)
def test_warning_says_what_would_help(config: SimpleNamespace, remedy: str):
    with mock.patch.object(usefulness.logger, "warning_once") as warning:
        usefulness.warn_if_useless(config)
    message, *args = warning.call_args.args
    assert "has no effect" in message
    assert remedy in message % tuple(args)


@pytest.mark.parametrize(
    "config",
    [
        config_for(mm_processor_cache_type="lru"),
        config_for(embeds=True),
        config_for(**NO_IMAGE),
        config_for(**NOTHING, enable_mm_embeds=True),
        config_for(language_model_only=True, enable_mm_embeds=True),
        config_for(runner="draft"),
        config_for(embeds=True, **SHM_CACHE),
        # The cache is off, or not used between several API servers and an engine.
        config_for(mm_processor_cache_gb=0, **SHM_CACHE),
        config_for(api_servers=2, **SHM_CACHE),
    ],
    ids=[
        "lru",
        "embeds",
        "videos",
        "mm embeds",
        "mm embeds of a language model",
        "draft model",
        "embeds beside shm",
        "shm of 0 GB",
        "two API servers",
    ],
)
def test_no_warning_where_it_helps(config: SimpleNamespace):
    with mock.patch.object(usefulness.logger, "warning_once") as warning:
        usefulness.warn_if_useless(config)
    warning.assert_not_called()


def made_config_warns(
    *, flag: bool, platform_chooses: str | None, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Whether making a configuration with a single worker warns."""

    def check_and_update_config(config: VllmConfig) -> None:
        if platform_chooses is not None:
            config.parallel_config.distributed_executor_backend = platform_chooses

    monkeypatch.setattr(
        current_platform, "check_and_update_config", check_and_update_config
    )
    with mock.patch.object(usefulness.logger, "warning_once") as warning:
        VllmConfig(
            parallel_config=ParallelConfig(
                enable_shm_tensor_arena=flag, distributed_executor_backend="uni"
            )
        )
    return warning.called


@pytest.mark.parametrize("flag", [True, False])
def test_vllm_config_warns_only_with_the_flag(
    flag: bool, monkeypatch: pytest.MonkeyPatch
):
    warns = made_config_warns(flag=flag, platform_chooses=None, monkeypatch=monkeypatch)
    assert warns is flag


def test_no_warning_where_the_platform_chooses_an_executor_with_a_queue(
    monkeypatch: pytest.MonkeyPatch,
):
    """As on a CPU: its single worker is a process of its own."""
    assert not made_config_warns(
        flag=True, platform_chooses="mp", monkeypatch=monkeypatch
    )
