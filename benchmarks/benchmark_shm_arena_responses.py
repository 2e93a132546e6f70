# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Would an arena help the queue from a worker back to the engine?

That queue has one reader. What a worker answers with, in some shapes that vLLM
has, is sent by two such queues in turn, flag off and on, in the same two processes:
how long enqueue kept the worker, when the engine had dequeued it, and when it had
read every byte, as it does to send them on. At last, what a front end takes to make
its answer of the largest ones.

Example:
  python benchmarks/benchmark_shm_arena_responses.py --json result.json

"""

import argparse
import base64
import json
import os
import signal
import sys
import tempfile
import time
from typing import Any

from arena_bench import report
from arena_bench.block import BenchmarkError, Block, run_block
from benchmark_shm_tensor_arena import machine, options, output_file, positive

GAP_S = 0.01
# Bytes of the tensors of one message. float32 embeddings, int32 token ids and ranks.
RESPONSES = {
    # 20 log probabilities and the token's own, for each token of the prompt.
    "prompt logprobs, 8k tokens": (8192 * 21 * 4, 8192 * 21 * 4, 8192 * 4),
    "prompt logprobs, 128k tokens": (131072 * 21 * 4, 131072 * 21 * 4, 131072 * 4),
    "embeddings, 256 texts of 4096 values": (4096 * 4,) * 256,
    "token embeddings, 8k tokens of 128 values": (8192 * 128 * 4,),
    "token embeddings, 2k tokens of 4096 values": (2048 * 4096 * 4,),
    "token embeddings, 8k tokens of 4096 values": (8192 * 4096 * 4,),
}
ANSWER_VALUES = 1_000_000


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        help="sets of processes for each shape, pooled (default: 3)",
    )
    parser.add_argument("--json", type=output_file, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    # Ends the block's processes, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Standard output is for the tables.
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    pairs: dict[str, list[dict[str, float]]] = {name: [] for name in RESPONSES}
    try:
        with tempfile.TemporaryDirectory() as sockets:
            os.environ["VLLM_RPC_BASE_PATH"] = sockets
            for turn in range(args.repeat):
                for name, sizes in RESPONSES.items():
                    print(f"[{turn + 1}/{args.repeat}] {name}", file=sys.stderr)
                    block = Block(name, "pairs", 1, (sizes,) * args.pairs, gap_s=GAP_S)
                    pairs[name] += run_block(block)["pairs"]
    except BenchmarkError as e:
        print(e, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    for name, rows in pairs.items():
        print(f"{name}: {sum(RESPONSES[name]) / 1e6:.1f} MB")
        print(report.pairs_table(rows) + "\n")
    answers = answer_seconds()
    for form, seconds in answers.items():
        print(f"an answer of {ANSWER_VALUES} float32 values as {form}: {seconds:.2f} s")
    if args.json:
        result: dict[str, Any] = {
            "machine": machine(),
            "options": options(args),
            "pairs": pairs,
            "answer_seconds": answers,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def answer_seconds() -> dict[str, float]:
    """What the front end does last with the values of a pooling request."""
    import torch

    values = torch.rand(ANSWER_VALUES)

    def timed(make: Any) -> float:
        best = float("inf")
        for _ in range(3):
            started = time.perf_counter()
            make()
            best = min(best, time.perf_counter() - started)
        return best

    return {
        "JSON": timed(lambda: json.dumps(values.tolist())),
        "base64": timed(lambda: base64.b64encode(values.numpy().tobytes())),
    }


if __name__ == "__main__":
    sys.exit(main())
