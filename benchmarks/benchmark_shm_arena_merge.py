# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Several images in one batch: joined by each worker's CPU, or on its device.

For each arm there is an arena and N workers, which pin it as vLLM's workers do.
A call hands all workers of an arm the same images through the arena; they merge
them (`BaseMultiModalField.reduce_data`) at the same time. Calls of the two arms
take turns:

  off   the base's way: join on the CPU in new pinned memory, then one copy
  on    each image from the arena to its place on the device

For each call, over all workers: the longest time until the batch is on the device,
the longest that the call kept its thread, and the most CPU time that a worker
took. Each worker's first call is told apart, and every worker checks its batch.
Workers run torch with one thread, as vLLM's do, and share the GPUs in turn.

Example, on a machine with a GPU:
  python benchmarks/benchmark_shm_arena_merge.py --workers 1 2 4 8 --json out.json
"""

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_S = 120
ARMS = ("off", "on")
# As Qwen2-VL's images are merged, as most others', and where a place on the device
# is not contiguous. An image has the bytes asked for, in bfloat16.
FIELDS = ("flat", "batched", "flat-1")


def shape(field: str, image_bytes: int) -> tuple[int, ...]:
    elements = image_bytes // 2
    if field == "flat":
        return elements // 1176, 1176
    if field == "flat-1":
        return 1176, elements // 1176
    side = math.isqrt(elements // 3)
    return 3, side, side


def worker(link: Connection, barrier: Any) -> None:
    """Merge when told to; answer with ms: on device, kept its thread, CPU time."""
    import torch

    torch.set_num_threads(1)
    arm, rank, handle, field_name = link.recv()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.zeros(1, device="cuda")
    from vllm.distributed.device_communicators.shm_tensor_arena import ShmTensorArena
    from vllm.multimodal.inputs import (
        BaseMultiModalField,
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalFlatField,
    )

    BaseMultiModalField.merge_pinned_on_device = arm == "on"
    field: Any
    if field_name == "batched":
        field = MultiModalBatchedField()
    else:
        field = MultiModalFlatField(slices=[], dim=int(field_name == "flat-1"))
    arena = ShmTensorArena(*handle, reader_rank=rank)
    expected = None
    link.send(None)
    while (stubs := link.recv()) is not None:
        arena.on_barrier()  # pins what is prepared, at the first call
        images = [arena.get_tensor(*stub) for stub in stubs]
        elems = [MultiModalFieldElem(data=image, field=field) for image in images]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        barrier.wait(TIMEOUT_S)
        cpu, start = time.process_time(), time.perf_counter()
        merged = field.reduce_data(elems, device="cuda", pin_memory=True)
        issued = time.perf_counter()
        # Waiting as a model runner would, without spinning on the CPU.
        done = torch.cuda.Event(blocking=True)
        done.record()
        done.synchronize()
        on_device = time.perf_counter()
        cpu = time.process_time() - cpu
        peak = torch.cuda.max_memory_allocated() - before
        if expected is None:
            join = torch.stack if field_name == "batched" else torch.cat
            dim = 1 if field_name == "flat-1" else 0
            expected = join(images, dim=dim).cuda()
        if not torch.equal(merged, expected):
            sys.exit("the batch is not what was sent")
        pinned = all(image.is_pinned() for image in images)
        del images, elems, merged
        arena.flush_releases()
        link.send(
            {
                "device_ms": (on_device - start) * 1e3,
                "thread_ms": (issued - start) * 1e3,
                "cpu_ms": cpu * 1e3,
                "peak_device_mib": peak / (1 << 20),
                "pinned": pinned,
            }
        )
    link.send(None)


def receive(link: Connection) -> Any:
    if not link.poll(TIMEOUT_S):
        sys.exit(f"No answer from a worker in {TIMEOUT_S} s.")
    return link.recv()


class Arm:
    """An arena and the workers that read it."""

    def __init__(self, name: str, n_worker: int, field: str):
        from vllm.distributed.device_communicators.shm_tensor_arena import (
            ShmTensorArena,
        )

        self.arena = ShmTensorArena(n_worker)
        spawn = multiprocessing.get_context("spawn")
        # Held: its semaphores go with it, perhaps before a worker opens them.
        self.barrier = spawn.Barrier(n_worker)
        self.links: list[Connection] = []
        self.processes = []
        for rank in range(n_worker):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(
                target=worker, args=(theirs, self.barrier), daemon=True
            )
            process.start()
            self.links.append(ours)
            self.processes.append(process)
            ours.send((name, rank, self.arena.handle(), field))

    def wait_until_ready(self) -> None:
        for link in self.links:
            receive(link)
        self.arena.on_barrier()

    def call(self, images: list) -> dict[str, float]:
        stubs = []
        for image in images:
            slot = self.arena.write_tensor(image)
            if slot is None:
                sys.exit("the arena had no room")
            stubs.append((slot, image.nbytes, image.dtype, tuple(image.shape)))
        for link in self.links:
            link.send(stubs)
        answers = [receive(link) for link in self.links]
        if not all(answer.pop("pinned") for answer in answers):
            sys.exit("the images are not in pinned memory")
        return {key: max(answer[key] for answer in answers) for key in answers[0]}

    def end(self) -> None:
        for link in self.links:
            link.send(None)
            receive(link)
        for process in self.processes:
            process.join(TIMEOUT_S)


def measure(
    n_worker: int, field: str, n_image: int, image_bytes: int, calls: int
) -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    images = [
        torch.rand(shape(field, image_bytes), generator=generator).bfloat16()
        for _ in range(n_image)
    ]
    arms = {name: Arm(name, n_worker, field) for name in ARMS}
    for arm in arms.values():
        arm.wait_until_ready()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    for i in range(calls):
        # The arm that goes first has the other's memory traffic behind it.
        for name in ARMS[:: 1 if i % 2 else -1]:
            results[name].append(arms[name].call(images))
    for arm in arms.values():
        arm.end()
    return [
        {"workers": n_worker, "field": field, "arm": name, "calls": results[name]}
        for name in ARMS
    ]


def quantiles(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"{statistics.median(values):7.2f} [{low:.2f}-{high:.2f}]"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--fields", nargs="+", choices=FIELDS, default=list(FIELDS))
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--image-mb", type=int, default=24, help="10^6 bytes each")
    parser.add_argument("--calls", type=int, default=31, help="of each arm, at least 5")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.calls < 5:
        parser.error("--calls must be at least 5")
    import torch

    if not torch.cuda.is_available():
        print("Skipped: this needs a CUDA device.")
        return
    rows = []
    print(
        f"{args.images} images of {args.image_mb} MB; ms, median [quartiles] of "
        f"{args.calls - 1} calls; the first call apart"
    )
    print(
        f"{'field':8} {'workers':7} {'arm':4} {'on device':>22} {'thread':>22} "
        f"{'CPU time':>22} {'first: on device, CPU':>24} {'peak MiB':>9}"
    )
    for field in args.fields:
        for n in args.workers:
            for row in measure(
                n, field, args.images, args.image_mb * 10**6, args.calls
            ):
                first, *later = row["calls"]
                columns = [
                    quantiles([call[key] for call in later])
                    for key in ("device_ms", "thread_ms", "cpu_ms")
                ]
                peak = max(call["peak_device_mib"] for call in row["calls"])
                print(
                    f"{field:8} {n:7} {row['arm']:4} "
                    + " ".join(f"{column:>22}" for column in columns)
                    + f" {first['device_ms']:14.1f} {first['cpu_ms']:9.1f}"
                    + f" {peak:9.0f}",
                    flush=True,
                )
                rows.append(row)
    if args.json:
        result = {
            "gpu": torch.cuda.get_device_name(0),
            "gpus": torch.cuda.device_count(),
            "torch": torch.__version__,
            "images": args.images,
            "image_mb": args.image_mb,
            "rows": rows,
        }
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
