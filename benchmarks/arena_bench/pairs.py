# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Benchmarks whose blocks send each message by two queues in turn, flag off and on."""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping

from arena_bench.block import BenchmarkError, Block, run_block

GAP_S = 0.01

Pairs = dict[str, list[dict[str, float]]]


def add_arguments(
    parser: argparse.ArgumentParser, positive: Callable[[str], int], of_each: str
) -> None:
    """How much is measured; `of_each` names what a set of processes is for."""
    parser.add_argument(
        "--pairs",
        type=positive,
        default=20,
        metavar="N",
        help="messages by each of the two queues, in a set of processes (default: 20)",
    )
    parser.add_argument(
        "--repeat",
        type=positive,
        default=3,
        metavar="N",
        help=f"sets of processes for each {of_each}, pooled (default: 3)",
    )


def run(blocks: Mapping[str, Block], repeat: int) -> Pairs | int:
    """Run the blocks in turn, `repeat` times each. Returns their pairs by name, or
    the exit code after a failure, of which the user has been told."""
    # Ends the block's processes, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Standard output is for the tables.
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    pairs: Pairs = {name: [] for name in blocks}
    try:
        with tempfile.TemporaryDirectory() as sockets:
            os.environ["VLLM_RPC_BASE_PATH"] = sockets
            for turn in range(repeat):
                for name, block in blocks.items():
                    print(f"[{turn + 1}/{repeat}] {name}", file=sys.stderr)
                    pairs[name] += run_block(block)["pairs"]
    except BenchmarkError as e:
        print(e, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    return pairs
