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
import sys
import time
from typing import Any

from arena_bench import pairs, report
from arena_bench.block import Block
from benchmark_shm_tensor_arena import machine, options, output_file, positive

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
    pairs.add_arguments(parser, positive, "shape")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    blocks = {
        name: Block(name, "pairs", 1, (sizes,) * args.pairs, gap_s=pairs.GAP_S)
        for name, sizes in RESPONSES.items()
    }
    found = pairs.run(blocks, args.repeat)
    if isinstance(found, int):
        return found
    for name, rows in found.items():
        print(f"{name}: {sum(RESPONSES[name]) / 1e6:.1f} MB")
        print(report.pairs_table(rows) + "\n")
    answers = answer_seconds()
    for form, seconds in answers.items():
        print(f"an answer of {ANSWER_VALUES} float32 values as {form}: {seconds:.2f} s")
    if args.json:
        result: dict[str, Any] = {
            "machine": machine(),
            "options": options(args),
            "pairs": found,
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
