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
import sys

from arena_bench import pairs, report
from arena_bench.block import Block
from benchmark_shm_tensor_arena import machine, options, output_file, positive, size


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
    pairs.add_arguments(parser, positive, "size")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    blocks = {
        name: Block(
            name,
            "pairs",
            args.local + args.remote,
            ((nbytes - nbytes % 8,),) * args.pairs,
            gap_s=pairs.GAP_S,
            n_remote=args.remote,
        )
        for name, nbytes in args.sizes
    }
    found = pairs.run(blocks, args.repeat)
    if isinstance(found, int):
        return found
    for name, rows in found.items():
        print(f"{name}, {args.local} local readers, {args.remote} remote")
        print(report.pairs_table(rows) + "\n")
    if args.json:
        result = {"machine": machine(), "options": options(args), "pairs": found}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
