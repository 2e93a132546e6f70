# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A queue whose readers are on this node and, over TCP, on another.

Messages with one large tensor go by two such queues in turn, flag off and on, in the
same processes: how long enqueue kept the engine, when the last local reader had
dequeued and read it, and when the last remote one had. "Another node" is the loopback
device: what a network takes is not in it.

Example:
  python benchmarks/benchmark_shm_arena_remote.py --sizes 50MB 200MB --local 2

"""

import argparse
import json
import os
import signal
import sys
import tempfile

from arena_bench import report
from arena_bench.block import BenchmarkError, Block, run_block
from benchmark_shm_tensor_arena import machine, options, output_file, positive, size

GAP_S = 0.01


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=size,
        default=[size("50MB")],
        metavar="SIZE",
        help="bytes of the tensor of a message, as 50MB or 200MiB (default: 50MB)",
    )
    for kind in ("local", "remote"):
        parser.add_argument(
            f"--{kind}",
            type=positive,
            default=1,
            metavar="N",
            help=f"{kind} reader processes (default: 1)",
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
        help="sets of processes for each size, pooled (default: 3)",
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
    pairs: dict[str, list[dict[str, float]]] = {name: [] for name, _ in args.sizes}
    try:
        with tempfile.TemporaryDirectory() as sockets:
            os.environ["VLLM_RPC_BASE_PATH"] = sockets
            for turn in range(args.repeat):
                for name, nbytes in args.sizes:
                    print(f"[{turn + 1}/{args.repeat}] {name}", file=sys.stderr)
                    block = Block(
                        name,
                        "pairs",
                        args.local + args.remote,
                        ((nbytes - nbytes % 8,),) * args.pairs,
                        gap_s=GAP_S,
                        n_remote=args.remote,
                    )
                    pairs[name] += run_block(block)["pairs"]
    except BenchmarkError as e:
        print(e, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    for name, rows in pairs.items():
        print(f"{name}, {args.local} local readers, {args.remote} remote")
        print(report.pairs_table(rows) + "\n")
    if args.json:
        result = {"machine": machine(), "options": options(args), "pairs": pairs}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
