# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Benchmark of the shm tensor arena: a real MessageQueue, one writer, N readers.

Arms, in blocks that take turns in one run, each block in fresh processes:

  off    the fork, flag off: upstream's out-of-band path
  on     the fork with its arena
  peer   another vLLM with its own arena (--peer)
  limit  no queue: the best multi-threaded memmove into warm shared memory, and
         each reader reading from there (CUDA: one copy from pinned memory)

For each message: how long enqueue kept the writer, when the last reader had
dequeued it, and when it was on the device of the last reader (CPU: every byte
was read, since a CPU worker's .to(device) copies nothing). Every reader checks
what it got. The table tells message 1 of the processes of a block, messages
1-10 (cold) and 20-60 (warm) apart.

Example, on a CPU machine:
  python benchmarks/benchmark_shm_tensor_arena.py --sizes 100MB --readers 2 \\
      --peer 0.33.0 --json result.json --plot result.png
"""

import argparse
import datetime
import json
import mmap
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from arena_bench import report
from arena_bench.block import BenchmarkError, Block, run_block
from arena_bench.peer import peer_tree

UNITS = {"MiB": 1 << 20, "MB": 10**6}
LIMIT_MESSAGES = 20
BURST = {
    "40 x 24 MB": (24 * 10**6,) * 40,
    "600 MB": (600 * 10**6,),
    "1500 MB": (1500 * 10**6,),
}


def size(text: str) -> tuple[str, int]:
    for unit, factor in UNITS.items():
        number = text.removesuffix(unit)
        if number != text and number.isdecimal() and int(number) > 0:
            return text, int(number) * factor
    raise argparse.ArgumentTypeError(f"{text!r} is not like 100MB or 200MiB")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def output_file(text: str) -> Path:
    path = Path(text)
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written")
    return path


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--text-only",
        action="store_true",
        help="instead: what the flag costs a SchedulerOutput of 256 new and of 256 "
        "running requests, enqueued off and on in turn (--messages pairs of each)",
    )
    mode.add_argument(
        "--burst",
        action="store_true",
        help=f"instead: one message each of {', '.join(BURST)}, and the share of it "
        "that went through shared memory",
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=size,
        default=[size("100MB")],
        metavar="SIZE",
        help="bytes of the tensor of a message, as 100MB or 200MiB (default: 100MB)",
    )
    parser.add_argument(
        "--readers",
        nargs="+",
        type=positive,
        default=[2],
        metavar="N",
        help="reader processes; on CUDA they share the GPUs in turn (default: 2)",
    )
    parser.add_argument(
        "--messages",
        type=positive,
        metavar="N",
        help="messages in a block (default: 60; with --text-only 1000)",
    )
    parser.add_argument(
        "--repeat",
        type=positive,
        default=3,
        metavar="N",
        help="blocks of each arm, pooled (default: 3)",
    )
    parser.add_argument(
        "--gap-ms",
        type=float,
        default=10,
        metavar="MS",
        help="pause after all readers are done with a message and before the next, "
        "in which readers release memory (default: 10)",
    )
    parser.add_argument(
        "--peer",
        metavar="VERSION|DIR",
        help="a release that patches/upstream.toml pins as a peer (fetched from the "
        "package index), or a folder that holds its vllm/; default: no such arm",
    )
    parser.add_argument(
        "--touch-gib",
        type=positive,
        metavar="N",
        help="touch and free so much memory first: where a virtual machine's memory "
        "grows when it is first used, all cold figures are too high otherwise",
    )
    parser.add_argument("--json", type=output_file, metavar="FILE")
    parser.add_argument("--plot", type=output_file, metavar="FILE.png")
    args = parser.parse_args()
    if args.plot and (args.text_only or args.burst):
        parser.error("--plot goes with neither --text-only nor --burst")
    if args.peer and args.text_only:
        parser.error("--peer does not go with --text-only")
    if args.gap_ms < 0:
        parser.error("--gap-ms must not be negative")
    if args.messages is None:
        args.messages = 1000 if args.text_only else 60
    return args


def main() -> int:
    args = parse_args()
    # Ends the block's processes, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # Standard output is for the table.
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    try:
        tree = peer_tree(args.peer) if args.peer else None
        if args.touch_gib:
            touch(args.touch_gib << 30)
        with tempfile.TemporaryDirectory() as sockets:
            os.environ["VLLM_RPC_BASE_PATH"] = sockets
            if args.text_only:
                result = run_text(args)
            elif args.burst:
                result = run_burst(args, tree)
            else:
                result = run_sizes(args, tree)
    except BenchmarkError as e:
        print(e, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    if args.json:
        result = {"machine": machine(), "options": options(args), **result}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def touch(nbytes: int) -> None:
    with mmap.mmap(-1, nbytes) as memory:
        for offset in range(0, nbytes, mmap.PAGESIZE):
            memory[offset] = 1


def arm_blocks(
    messages: tuple[tuple[int, ...], ...],
    n_reader: int,
    args: argparse.Namespace,
    tree: Path | None,
) -> list[Block]:
    def block(arm: str, use_arena: bool, tree: Path | None = None) -> Block:
        return Block(
            arm, "tensors", n_reader, messages, use_arena, tree, args.gap_ms / 1e3
        )

    blocks = [block("off", False), block("on", True)]
    return blocks if tree is None else [*blocks, block("peer", True, tree)]


def run_turns(plan: list[Block], repeat: int) -> list[dict[str, Any]]:
    """Run each block so many times, back and forth, and return their results."""
    results = []
    for turn in range(repeat):
        # Whatever drifts in the machine meets the arms from both sides.
        for block in plan if turn % 2 == 0 else reversed(plan):
            print(
                f"[{len(results) + 1}/{len(plan) * repeat}] {block.arm}, "
                f"{block.n_reader} readers, {sum(block.messages[0]) / 1e6:.0f} MB",
                file=sys.stderr,
            )
            results.append(
                {"arm": block.arm, "readers": block.n_reader, "turn": turn}
                | run_block(block)
            )
    return results


def pooled(results: list[dict[str, Any]]) -> list[report.Sample]:
    return [{"arm": r["arm"], **s} for r in results for s in r["samples"]]


def run_sizes(args: argparse.Namespace, tree: Path | None) -> dict[str, Any]:
    groups: dict[str, list[report.Sample]] = {}
    blocks: list[dict[str, Any]] = []
    summary = {}
    for size_name, nbytes in args.sizes:
        nbytes -= nbytes % 8
        for n_reader in args.readers:
            plan = arm_blocks(((nbytes,),) * args.messages, n_reader, args, tree)
            limit = ((nbytes,),) * min(LIMIT_MESSAGES, args.messages)
            gap_s = args.gap_ms / 1e3
            plan.append(Block("limit", "limit", n_reader, limit, gap_s=gap_s))
            arms = [block.arm for block in plan]
            results = run_turns(plan, args.repeat)
            title = f"{size_name}, {n_reader} readers"
            groups[title] = pooled(results)
            summary[title] = report.summarize(groups[title])
            blocks += [{"size": size_name, **r} for r in results]
            print(report.table(title, groups[title], arms))
            print(report.resident_line(results, arms) + "\n", flush=True)
    if args.plot:
        try:
            report.plot(args.plot, groups, arms)
        except ImportError:
            print("No plot was made: matplotlib is not installed.", file=sys.stderr)
    return {"summary": summary, "blocks": blocks}


def run_burst(args: argparse.Namespace, tree: Path | None) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    for n_reader in args.readers:
        plan = arm_blocks(tuple(BURST.values()), n_reader, args, tree)
        arms = [block.arm for block in plan]
        results = run_turns(plan, args.repeat)
        blocks += results
        print(f"{n_reader} readers")
        print(report.burst_table(list(BURST), pooled(results), arms))
        print(report.resident_line(results, arms) + "\n", flush=True)
    return {"blocks": blocks}


def run_text(args: argparse.Namespace) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    for n_reader in args.readers:
        plan = [Block("off and on", "text", n_reader, ((),) * args.messages)]
        results = run_turns(plan, args.repeat)
        blocks += results
        pairs: dict[str, list[dict[str, float]]] = {}
        for result in results:
            for kind, rows in result["pairs"].items():
                pairs.setdefault(kind, []).extend(rows)
        print(f"{n_reader} readers")
        print(report.text_table(pairs) + "\n", flush=True)
    return {"blocks": blocks}


def options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        key: str(value) if isinstance(value, Path) else value
        for key, value in vars(args).items()
    }


def machine() -> dict[str, Any]:
    # At the end: it must not take part in what is measured.
    import torch

    with open("/proc/cpuinfo") as cpuinfo:
        models = [line.partition(": ")[2] for line in cpuinfo if "model name" in line]
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "command": sys.argv,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": models[0].strip() if models else platform.machine(),
        "cpus": os.cpu_count(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gpus": gpus,
        "driver": nvidia_driver() if gpus else None,
    }


def nvidia_driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return lines[0] if lines else None


if __name__ == "__main__":
    sys.exit(main())
