# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The flag: command line, configuration, and what it cannot be combined with."""

from unittest import mock

import pytest

from vllm.config import parallel
from vllm.config.parallel import ParallelConfig
from vllm.config.utils import get_attr_docs
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


def test_flag_is_not_in_the_hash():
    off, on = (ParallelConfig(enable_shm_tensor_arena=flag) for flag in (False, True))
    assert off.compute_hash() == on.compute_hash()


@pytest.mark.parametrize("backend", ["ray", "external_launcher"])
def test_executor_without_the_queue_is_refused(backend: str):
    with pytest.raises(ValueError, match="needs the multiprocessing executor"):
        ParallelConfig(
            enable_shm_tensor_arena=True, distributed_executor_backend=backend
        )


@pytest.mark.parametrize(("backend", "warns"), [("uni", True), ("mp", False)])
def test_single_worker_without_a_queue_is_warned_about(backend: str, warns: bool):
    with mock.patch.object(parallel.logger, "warning") as warning:
        ParallelConfig(
            enable_shm_tensor_arena=True, distributed_executor_backend=backend
        )
    messages = [call.args[0] for call in warning.call_args_list]
    assert any("no effect" in message for message in messages) is warns
