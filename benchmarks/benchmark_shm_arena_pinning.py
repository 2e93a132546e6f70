# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What pinning the arena delays: a tiny CUDA operation in another process.

N readers pin the arena at the same time, one preparation step after the other,
as workers do after the barrier and in a burst. Meanwhile another process does
tiny operations on the same GPU, one at a time, and keeps the slowest.

Example, on a machine with a GPU:
  python benchmarks/benchmark_shm_arena_pinning.py --readers 1 4 8
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 120
QUIET_S = 2.0
# Preparing a step took 0.2 s.
PREPARE_S = 1.0


def bystander(link: Connection) -> None:
    """Send [(start, ms)] of tiny operations on GPU 0 until told to stop."""
    import torch

    x = torch.zeros(1, device="cuda:0")
    samples = []
    link.send("ready")
    while not link.poll():
        start = time.monotonic()
        x.add_(1)
        torch.cuda.synchronize()
        samples.append((start, (time.monotonic() - start) * 1e3))
    link.send(samples)


def reader(link: Connection) -> None:
    """Pin when told to; answer with (start, end, bytes pinned)."""
    import torch

    rank, handle = link.recv()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    from vllm.distributed.device_communicators.shm_tensor_arena import ShmTensorArena

    arena = ShmTensorArena(*handle, reader_rank=rank)
    link.send("ready")
    first = True
    while link.recv():
        start = time.monotonic()
        if first:
            arena.on_barrier()
        else:
            arena.while_waiting(None)
        first = False
        link.send((start, time.monotonic(), arena._prefixes.pinned_bytes))


def receive(link: Connection) -> Any:
    if not link.poll(TIMEOUT_S):
        sys.exit(f"No answer from a process in {TIMEOUT_S} s.")
    return link.recv()


def measure(n_reader: int) -> list[dict[str, Any]]:
    import torch

    from vllm.distributed.device_communicators.shm_tensor_arena import ShmTensorArena

    spawn = multiprocessing.get_context("spawn")

    def start(target: Any) -> Connection:
        ours, theirs = spawn.Pipe()
        spawn.Process(target=target, args=(theirs,), daemon=True).start()
        return ours

    writer = ShmTensorArena(n_reader)
    links = [start(reader) for _ in range(n_reader)]
    for rank, link in enumerate(links):
        link.send((rank, writer.handle()))
    watch = start(bystander)
    for link in [*links, watch]:
        receive(link)
    time.sleep(QUIET_S)
    quiet_end = time.monotonic()
    writer.on_barrier()
    windows = []
    for step in range(4):
        if step > 0:
            # Use that calls for the next step.
            writer.write_tensor(torch.zeros(500 << 20, dtype=torch.uint8))
            time.sleep(PREPARE_S)
        for link in links:
            link.send(True)
        windows.append([receive(link) for link in links])
        time.sleep(0.2)
    for link in [*links, watch]:
        link.send(False)
    samples = receive(watch)
    quiet = [ms for t, ms in samples if t < quiet_end]
    rows = [
        {
            "readers": n_reader,
            "pinned_mib": 0,
            "pin_ms": 0.0,
            "median_ms": statistics.median(quiet),
            "worst_ms": max(quiet),
        }
    ]
    for window in windows:
        begin, end = min(w[0] for w in window), max(w[1] for w in window)
        during = [ms for t, ms in samples if begin - ms / 1e3 <= t <= end]
        rows.append(
            {
                "readers": n_reader,
                "pinned_mib": min(w[2] for w in window) >> 20,
                "pin_ms": max(w[1] - w[0] for w in window) * 1e3,
                "median_ms": statistics.median(during) if during else 0.0,
                "worst_ms": max(during, default=0.0),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("This needs a CUDA device.")
    rows = [row for n in args.readers for row in measure(n)]
    print("readers  pinned MiB  slowest pin  tiny operation: median   worst (ms)")
    for row in rows:
        print(
            f"{row['readers']:7}  {row['pinned_mib']:10}  {row['pin_ms']:8.1f} ms"
            f"  {row['median_ms']:22.3f}  {row['worst_ms']:6.2f}"
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"gpu": torch.cuda.get_device_name(0), "rows": rows}, file)


if __name__ == "__main__":
    main()
