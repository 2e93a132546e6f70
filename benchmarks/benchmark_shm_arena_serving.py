# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Benchmark of the shm tensor arena in a whole engine: frontend, EngineCore, workers.

Arms, each with an engine of its own, all up at once on the same devices and
asked in turn; an engine that nobody asks sleeps:

  off, on                the fork, flag off and on
  peer-off, peer-on      another vLLM with an arena behind the same flag (--peer)
  ported-off, ported-on  the fork on the peer's release (--ported)

A block is a fresh set of engines. In it, in this order: the first image; single
requests (--single ROUNDS: one of each --inputs, arms in turn, the order rotating);
text among images at fixed rates (--mix SECONDS for each arm, twice, in turn);
20 requests in flight (--in-flight ROUNDS: with an image each, and with text alone);
a closed loop (--busy SECONDS).

Runs where there is no network. Where there is one, `vllm serve` and `vllm bench
serve --dataset-name random-mm`, flag off and on, measure the same from a client.

Example, on two GPUs:
  python benchmarks/benchmark_shm_arena_serving.py MODEL --tensor-parallel-size 2 \\
      --arms off on --single 30 --mix 60 --json serving.json
"""

import argparse
import datetime
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arena_bench.block import BenchmarkError
from arena_bench.peer import peer_tree
from serving_bench import inputs, report, workloads
from serving_bench.engines import Arm, Engine, EngineError

INPUTS = ("1024", "2048", "3072", "4096", "6x2048")
CONCURRENCY = 8
# Image and text requests a second.
RATES = (1.0, 4.0)

# One image at a time must fit a step whole. Caches off: a prompt is sent again
# under a new identity, and must go all the way. The sizes of the memory are given,
# since engines that start at once cannot measure what is free.
ENGINE_ARGS: dict[str, Any] = {
    "distributed_executor_backend": "mp",
    "max_model_len": 32768,
    "max_num_batched_tokens": 32768,
    "max_num_seqs": 32,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "mm_processor_cache_gb": 0,
    "limit_mm_per_prompt": {"image": 6, "video": 0},
    "skip_mm_profiling": True,
    "kv_cache_memory_bytes": 10 << 30,
    "gpu_memory_utilization": 0.2,
    "seed": 0,
}


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def engine_args(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def input_name(text: str) -> str:
    try:
        return inputs.parse(text).name
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a model of the Qwen-VL families")
    parser.add_argument("--tensor-parallel-size", type=int, default=2, metavar="N")
    parser.add_argument("--arms", nargs="+", choices=report.ARMS, default=["off", "on"])
    parser.add_argument(
        "--peer",
        metavar="DIR",
        help="folder with the other vllm/, as `pip install --target DIR --no-deps "
        "vllm==0.33.0` makes it",
    )
    parser.add_argument(
        "--ported",
        metavar="DIR",
        help="folder with the vllm/ of the fork on the peer's release",
    )
    parser.add_argument("--blocks", type=int, default=1, metavar="N")
    parser.add_argument("--single", type=int, default=0, metavar="ROUNDS")
    parser.add_argument(
        "--inputs", nargs="+", type=input_name, default=INPUTS, metavar="INPUT"
    )
    parser.add_argument("--mix", type=positive, metavar="SECONDS")
    parser.add_argument("--rates", nargs=2, type=positive, default=RATES)
    parser.add_argument("--in-flight", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--busy", type=positive, metavar="SECONDS")
    parser.add_argument(
        "--deadline",
        type=positive,
        default=float("inf"),
        metavar="SECONDS",
        help="begin no further round after this time; what there is is written",
    )
    parser.add_argument("--engine-args", type=engine_args, default={}, metavar="JSON")
    parser.add_argument(
        "--logs", type=Path, metavar="DIR", help="keep engine logs there"
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    for name in ("peer", "ported"):
        wanted = any(arm.startswith(name) for arm in args.arms)
        if wanted and getattr(args, name) is None:
            parser.error(f"the arms {name}-off and {name}-on need --{name}")
    return args


def make_arms(args: argparse.Namespace) -> list[Arm]:
    shared = {
        **ENGINE_ARGS,
        "model": args.model,
        "tensor_parallel_size": args.tensor_parallel_size,
        **args.engine_args,
    }
    trees = {
        name: peer_tree(folder)
        for name, folder in (("peer", args.peer), ("ported", args.ported))
        if folder
    }
    return [
        Arm(
            name,
            {**shared, "enable_shm_tensor_arena": name.endswith("on")},
            trees.get(name.partition("-")[0]),
        )
        for name in args.arms
    ]


class Block:
    """A fresh set of engines and what was measured on it.

    Args:
        args: The command line.
        arms: What is compared.
        index: Of the block; rotates the order of the arms.
        folder: For logs and events.

    """

    def __init__(
        self, args: argparse.Namespace, arms: list[Arm], index: int, folder: Path
    ):
        self._args = args
        self._index = index
        self._engines = [Engine(arm, folder / arm.name) for arm in arms]
        self.results: dict[str, Any] = {
            "index": index,
            "single": [],
            "mix": [],
            "in_flight": [],
        }

    def stop(self) -> None:
        for engine in self._engines:
            engine.hang_up()
        for engine in self._engines:
            engine.wait_for_end()

    def _in_turn(self, shift: int) -> list[Engine]:
        n = (self._index + shift) % len(self._engines)
        return self._engines[n:] + self._engines[:n]

    def run(self, out_of_time: Callable[[], bool]) -> None:
        args, results = self._args, self.results
        results["start_s"] = {
            e.arm.name: round(e.wait_until_up()["start_s"], 1) for e in self._engines
        }
        say(f"block {self._index}: engines up, {results['start_s']}")
        mixed = ["text", workloads.MIX_IMAGE] if args.mix or args.in_flight else []
        names = list(dict.fromkeys([*args.inputs, *mixed]))
        results["prepared"] = {
            e.arm.name: e.ask("prepare", names=names, seed=self._index)
            for e in self._engines
        }
        say(f"{names} rendered")
        first = max(args.inputs, key=lambda name: name == workloads.MIX_IMAGE)
        results["first"] = {e.arm.name: self._one(e, first) for e in self._in_turn(0)}
        for arm, record in results["first"].items():
            say(f"first request, {arm}: {record}")
        if args.single:
            self._single(out_of_time)
        if args.mix:
            self._mix(out_of_time)
        if args.in_flight:
            self._in_flight(out_of_time)
        if args.busy:
            results["busy"] = {
                e.arm.name: workloads.busy(
                    e, list(args.inputs), CONCURRENCY, args.busy, self._index
                )
                for e in self._in_turn(0)
            }

    def _one(self, engine: Engine, name: str) -> dict[str, Any]:
        prepared = self.results["prepared"][engine.arm.name][name]
        return workloads.one(engine, name, prepared["sums"])

    def _single(self, out_of_time: Callable[[], bool]) -> None:
        # A round that is not kept: kernels are compiled for each size.
        for number in range(-1, self._args.single):
            if out_of_time():
                say(f"deadline after {number} rounds")
                return
            for name in self._args.inputs:
                for engine in self._in_turn(number + 1):
                    record = self._one(engine, name)
                    if number >= 0:
                        self.results["single"].append(
                            {"arm": engine.arm.name, "round": number, **record}
                        )
            say(f"single requests, round {number + 1} of {self._args.single}")

    def _mix(self, out_of_time: Callable[[], bool]) -> None:
        for half in range(2):
            for engine in self._in_turn(half):
                if out_of_time():
                    say("deadline in the mix")
                    return
                seed = 2 * self._index + half
                result = workloads.mix(
                    engine, self._args.mix / 2, *self._args.rates, seed
                )
                self.results["mix"].append({"arm": engine.arm.name, **result})
                say(f"mix, {engine.arm.name}")

    def _in_flight(self, out_of_time: Callable[[], bool]) -> None:
        for number in range(self._args.in_flight):
            for name in (workloads.MIX_IMAGE, "text"):
                for engine in self._in_turn(number + 1):
                    if out_of_time():
                        say("deadline with requests in flight")
                        return
                    arm, result = engine.arm.name, workloads.in_flight(engine, name)
                    self.results["in_flight"].append(
                        {"arm": arm, "round": number, "input": name, **result}
                    )
                    say(f"in flight, {name}, {arm}: {result['seconds']:.1f} s")


def machine() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "cpus": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": shlex.join(["python", *sys.argv]),
    }
    # Without a context on the devices, which would take memory there.
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        facts["devices"] = [torch.cuda.get_device_name(i) for i in range(count)]
    return facts


def say(text: str) -> None:
    print(f"{time.monotonic() - STARTED:6.1f} s  {text}", flush=True)


STARTED = time.monotonic()


def main() -> int:
    args = parse_args()
    try:
        arms = make_arms(args)
    except BenchmarkError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    blocks: list[dict[str, Any]] = []
    error = None

    facts = machine()

    def out_of_time() -> bool:
        # Asked between any two rounds: what is measured is also kept then.
        args.json.write_text(json.dumps({"machine": facts, "blocks": blocks}))
        return time.monotonic() - STARTED > args.deadline

    with tempfile.TemporaryDirectory(prefix="serving-bench-") as scratch:
        folder = args.logs or Path(scratch)
        for index in range(args.blocks):
            block = Block(args, arms, index, folder / str(index))
            blocks.append(block.results)
            try:
                block.run(out_of_time)
            except EngineError as e:
                error = str(e)
            finally:
                stopping = out_of_time()
                block.stop()
            if error or stopping:
                break
    if error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(report.report(blocks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
