# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What it costs that readers map the tensor arena read-only.

Two readers of one arena in turn and in both orders, one as it is and one that maps
it writable: opening it, the barrier (where the first step is mapped), building a
tensor, and copying it out, the first time and later. On a CPU; what a device makes of
it is in tests/distributed/test_shm_arena_cuda.py.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from vllm.distributed.device_communicators.shm_arena.segment import ArenaSegment
from vllm.distributed.device_communicators.shm_tensor_arena import ShmTensorArena

ARMS = ("writable", "read-only")
LATER = 5

_map = ArenaSegment.map


def map_writable(self: ArenaSegment, nbytes: int, read_only: bool = False) -> Any:
    return _map(self, nbytes)


def page_table_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if "VmPTE" in line)


def measure(arms: list[str], nbytes: int) -> dict[str, dict[str, float]]:
    """One round: each arm's reader of one arena, in this order."""
    source = torch.full((nbytes,), 1, dtype=torch.uint8)
    target = torch.zeros_like(source)
    writer = ShmTensorArena(len(arms))
    figures: dict[str, dict[str, float]] = defaultdict(dict)
    readers = []
    for rank, arm in enumerate(arms):
        with mock.patch.object(
            ArenaSegment, "map", _map if arm == "read-only" else map_writable
        ):
            figures[arm]["open"], reader = timed(
                lambda rank=rank: ShmTensorArena(*writer.handle(), reader_rank=rank)
            )
        readers.append(reader)
    writer.on_barrier()
    for arm, reader in zip(arms, readers):
        tables = page_table_kib()
        figures[arm]["barrier"], _ = timed(reader.on_barrier)
        figures[arm]["page tables, KiB"] = page_table_kib() - tables
    slot = writer.write_tensor(source)
    assert slot is not None
    stub = (slot, nbytes, torch.uint8, (nbytes,))
    views = []
    for arm, reader in zip(arms, readers):
        figures[arm]["build"], view = timed(lambda r=reader: r.get_tensor(*stub))
        figures[arm]["first copy"], _ = timed(lambda v=view: target.copy_(v))
        views.append(view)
    later = defaultdict(list)
    for _ in range(LATER):
        for arm, view in zip(arms, views):
            later[arm].append(timed(lambda v=view: target.copy_(v))[0])
    for arm in arms:
        figures[arm]["later copy"] = statistics.median(later[arm])
    return figures


def batched(values: list[float]) -> list[tuple[float, float]]:
    return list(zip(values[::2], values[1::2]))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds, and what it returned."""
    started = time.perf_counter()
    result = call()
    return (time.perf_counter() - started) * 1e3, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    measure(list(ARMS), 10**6)  # imports, threads
    rounds = [
        measure(list(ARMS if i % 2 else reversed(ARMS)), args.mb * 10**6)
        for i in range(2 * args.pairs)
    ]
    out: dict[str, dict[str, float]] = {}
    for figure in rounds[0][ARMS[0]]:
        of = {arm: [r[arm][figure] for r in rounds] for arm in ARMS}
        # Of two rounds, one in each order: the second reader has it easier.
        a, b = ([sum(pair) for pair in batched(of[arm])] for arm in ARMS)
        out[figure] = {arm: statistics.median(of[arm]) for arm in ARMS}
        out[figure]["ratio"] = statistics.median(y / x for x, y in zip(a, b) if x)
    if args.json:
        print(json.dumps(out, indent=1))
        return
    for figure, values in out.items():
        print(f"{figure:18}", *(f"{k} {v:8.3f}" for k, v in values.items()))


if __name__ == "__main__":
    main()
