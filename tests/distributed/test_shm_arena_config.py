# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The flag: command line, configuration, and what it cannot be combined with."""

from types import SimpleNamespace
from unittest import mock

import pytest

from vllm.config import VllmConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.utils import get_attr_docs
from vllm.distributed.device_communicators.shm_arena import usefulness
from vllm.distributed.device_communicators.shm_arena.layout import ArenaLayout
from vllm.distributed.device_communicators.shm_tensor_arena import (
    _N_SLOTS,
    _SLOT_BYTES,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], False),
        (["--enable-shm-tensor-arena"], True),
        (["--no-enable-shm-tensor-arena"], False),
    ],
    ids=str,
)
def test_command_line(argv: list[str], expected: bool):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = EngineArgs.from_cli_args(parser.parse_args(argv))
    assert args.enable_shm_tensor_arena is expected


def test_help_says_that_it_is_experimental():
    docs = get_attr_docs(ParallelConfig)["enable_shm_tensor_arena"]
    assert docs.startswith("Experimental")


def test_help_names_the_space_that_is_needed():
    layout = ArenaLayout(8, _SLOT_BYTES, _N_SLOTS)
    needed = (layout.total_bytes + layout.reserve_bytes) / (1 << 30)
    docs = get_attr_docs(ParallelConfig)["enable_shm_tensor_arena"]
    assert f"{needed:.2f} GiB" in docs


def test_flag_is_not_in_the_hash():
    off, on = (ParallelConfig(enable_shm_tensor_arena=flag) for flag in (False, True))
    assert off.compute_hash() == on.compute_hash()


@pytest.mark.parametrize("backend", ["ray", "external_launcher"])
def test_executor_without_the_queue_is_refused(backend: str):
    with pytest.raises(ValueError, match="--distributed-executor-backend mp"):
        ParallelConfig(
            enable_shm_tensor_arena=True, distributed_executor_backend=backend
        )


def config_for(
    *,
    backend: str = "mp",
    embeds: bool = False,
    api_servers: int = 1,
    **multimodal: object,
) -> SimpleNamespace:
    """What the warning looks at; without keywords a text-only model."""
    mm_config = None
    if multimodal:
        mm_config = SimpleNamespace(
            **dict(
                language_model_only=False,
                mm_processor_cache_type="lru",
                mm_processor_cache_gb=4,
                mm_shm_cache_max_object_size_mb=128,
            )
            | multimodal
        )
    return SimpleNamespace(
        parallel_config=ParallelConfig(
            enable_shm_tensor_arena=True,
            distributed_executor_backend=backend,
            _api_process_count=api_servers,
        ),
        model_config=SimpleNamespace(
            enable_prompt_embeds=embeds, multimodal_config=mm_config
        ),
    )


SHM_CACHE = {"mm_processor_cache_type": "shm"}


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        (config_for(backend="uni", **SHM_CACHE), "--tensor-parallel-size 2"),
        (config_for(), "--enable-prompt-embeds"),
        (config_for(language_model_only=True), "--enable-prompt-embeds"),
        (config_for(**SHM_CACHE), "--mm-processor-cache-type lru"),
    ],
    ids=["one worker", "text model", "language model only", "shm cache"],
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
        config_for(embeds=True, **SHM_CACHE),
        # The cache is off, or not used between several API servers and an engine.
        config_for(mm_processor_cache_gb=0, **SHM_CACHE),
        config_for(api_servers=2, **SHM_CACHE),
    ],
    ids=["lru", "embeds", "embeds beside shm", "shm of 0 GB", "two API servers"],
)
def test_no_warning_where_it_helps(config: SimpleNamespace):
    with mock.patch.object(usefulness.logger, "warning_once") as warning:
        usefulness.warn_if_useless(config)
    warning.assert_not_called()


@pytest.mark.parametrize("flag", [True, False])
def test_vllm_config_warns_only_with_the_flag(flag: bool):
    with mock.patch.object(usefulness.logger, "warning_once") as warning:
        VllmConfig(
            parallel_config=ParallelConfig(
                enable_shm_tensor_arena=flag, distributed_executor_backend="uni"
            )
        )
    assert warning.called is flag
