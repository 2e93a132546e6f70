# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The flag: command line, configuration, and what it cannot be combined with."""

import pytest

from vllm import envs
from vllm.config.parallel import ParallelConfig
from vllm.config.utils import get_attr_docs
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
def test_executor_without_the_queue_is_refused(backend: str, monkeypatch):
    # Ray's first executor, which 0.33.0 has no longer.
    if backend == "ray" and not hasattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND"):
        pytest.skip("this release has Ray's second executor only")
    monkeypatch.setenv("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "0")
    with pytest.raises(ValueError, match="--distributed-executor-backend mp"):
        ParallelConfig(
            enable_shm_tensor_arena=True, distributed_executor_backend=backend
        )
