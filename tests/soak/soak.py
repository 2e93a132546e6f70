# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Drive queues with an arena through random load and faults, and count.

    .venv/bin/python -m tests.soak.soak --minutes 60 --report soak.json

A *rig* is a writer and its readers, each a process, with settings drawn at random.
One long rig shows whether memory grows; short ones follow, which end cleanly or
by SIGKILL of a process or of all. Every reader checks every tensor, byte for byte,
when it arrives and again before it drops it. The exit code is 1 if anything was
wrong, lost or left behind.

It runs on a /dev/shm of its own where mount namespaces are allowed; elsewhere the
faults that fill /dev/shm are left out.
"""

import argparse
import ctypes
import errno
import gc
import json
import mmap
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

# Before vLLM is imported: in most rigs a full arena is a warning.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch

from tests.distributed import private_shm
from tests.distributed.arena_testing import MIB, free_slots
from tests.distributed.process_groups import (
    kill_group,
    run_in_group,
    wait_for_end_of,
)
from vllm.distributed.device_communicators import shm_tensor_arena
from vllm.distributed.device_communicators.shm_arena import backing
from vllm.distributed.device_communicators.shm_broadcast import Handle, MessageQueue

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")
FILLER = SHM / "soak_filler"
# What a segment may hold that is left behind before the barrier.
MAX_SPARSE_BYTES = MIB
# How long slots may take to come back when every reader has dropped everything.
# Generous: the machine may be busy with something else.
SLOTS_BACK_S = 30
TIMEOUT = 120  # seconds; only a failure waits that long
# Private memory that may come and go with the allocator.
MAX_GROWTH_MIB = 32

ENDS = ("kill all", "kill a reader", "kill the tracker", "kill the writer", "clean")

# Sums over all processes.
COUNTERS = (
    "messages sent",
    "messages received",
    "tensors received",
    "bytes received",
    "checks of a tensor",
    "tensors put into the arena",
    "tensors that the arena declined",
    "sources changed after enqueue",
    "pickles failed",
    "sends timed out",
    "readers stuck",
    "/dev/shm filled",
    "looks for lost slots",
    "mismatches",
    "messages lost",
    "slots lost",
)
MUST_BE_ZERO = ("mismatches", "messages lost", "slots lost")
FLAGS = ("past the barrier", "tracker's pid")
N_SAMPLES = 8192

DTYPES = (
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.complex64,
    torch.float8_e4m3fn,
)

_M_MMAP_THRESHOLD = -3
_libc = ctypes.CDLL(None)


@dataclass
class Settings:
    """Of one rig."""

    seed: int
    seconds: float
    end: str
    # When to kill, in seconds after the start.
    kill_after: float
    n_reader: int
    slot_bytes: int
    n_slots: int
    min_tensor_bytes: int
    prepare_step_bytes: int
    chunk_bytes: int
    n_chunks: int
    may_fill: bool
    full_at_barrier: bool

    @property
    def arena_bytes(self) -> int:
        return self.slot_bytes * self.n_slots


def draw_settings(
    rng: random.Random, seconds: float, end: str, may_fill: bool
) -> Settings:
    settings = Settings(
        seed=rng.getrandbits(32),
        seconds=seconds,
        end=end,
        kill_after=rng.choice([rng.uniform(0, 0.5), rng.uniform(0.5, seconds)]),
        n_reader=rng.choice([1, 2, 2, 3]),
        slot_bytes=rng.choice([64 << 10, 256 << 10, MIB, 2 * MIB]),
        n_slots=0,
        min_tensor_bytes=rng.choice([256 << 10, 256 << 10, 8 * MIB]),
        # Small, so that most of a small arena is taken late.
        prepare_step_bytes=16 * MIB,
        chunk_bytes=rng.choice([256 << 10, MIB, 4 * MIB]),
        n_chunks=rng.randrange(2, 8),
        may_fill=may_fill,
        full_at_barrier=may_fill and rng.random() < 0.2,
    )
    settings.n_slots = rng.randrange(48, 200) * MIB // settings.slot_bytes
    if rng.random() < 0.15:  # as in production
        settings.slot_bytes, settings.n_slots = 2 * MIB, 1024
        settings.min_tensor_bytes = 8 * MIB
        settings.prepare_step_bytes = 512 * MIB
    return settings


class Shared:
    """Memory that outlives whoever is killed. Process 0 is the writer."""

    def __init__(self, n_processes: int):
        self.counters = self._array(n_processes, len(COUNTERS))
        self.flags = self._array(1, len(FLAGS))[0]
        self.samples = self._array(n_processes, N_SAMPLES)
        self.n_samples = self._array(1, n_processes)[0]

    @staticmethod
    def _array(*shape: int) -> np.ndarray:
        memory = mmap.mmap(-1, int(np.prod(shape)) * 8)
        return np.frombuffer(memory, dtype=np.int64).reshape(shape)

    def add(self, process: int, counter: str, n: int = 1) -> None:
        self.counters[process, COUNTERS.index(counter)] += n

    def set(self, flag: str, value: int) -> None:
        self.flags[FLAGS.index(flag)] = value

    def get(self, flag: str) -> int:
        return int(self.flags[FLAGS.index(flag)])

    def sample_memory(self, process: int) -> None:
        """Take this process's private bytes."""
        gc.collect()
        _libc.malloc_trim(0)
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:") and self.n_samples[process] < N_SAMPLES:
                self.samples[process, self.n_samples[process]] = int(line.split()[1])
                self.n_samples[process] += 1

    def growth_mib(self, process: int) -> float:
        """By how much the last third of the samples exceeds the middle one; the
        first is for warming up."""
        samples = self.samples[process, : self.n_samples[process]].tolist()
        third = len(samples) // 3
        if third == 0:
            return 0.0
        middle, last = samples[third : 2 * third], samples[-third:]
        return round((statistics.median(last) - statistics.median(middle)) / 1024, 1)


# ---- What is sent -------------------------------------------------------------


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("soak: not to be pickled")


class Goods:
    """Tensors of random bytes, cut from a stock that all processes share, and
    stamped in every page so that no two are alike."""

    def __init__(self, rng: random.Random, stock: np.ndarray):
        self._rng = rng
        self._stock = stock
        self._n_made = 0

    def tensor(self, nbytes: int) -> torch.Tensor:
        rng = self._rng
        dtype = rng.choice(DTYPES)
        rows = rng.choice([1, 1, 2, 3, 7])
        nbytes -= nbytes % (dtype.itemsize * rows)
        start = rng.randrange(self._stock.size - nbytes)
        raw = self._stock[start : start + nbytes].copy()
        self._n_made += 1
        for i, byte in enumerate(self._n_made.to_bytes(8, "little")):
            raw[i::4096] = byte
        t = torch.from_numpy(raw).view(dtype).view(rows, -1)
        kind = rng.randrange(12)
        if kind == 0:
            return torch.nn.Parameter(t, requires_grad=False)
        if kind == 1:
            return t.t()  # of several rows: not contiguous
        if kind == 2:
            return t.view(-1)[3:]
        return t


def raw_bytes(t: torch.Tensor) -> np.ndarray:
    return t.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def description(t: torch.Tensor) -> tuple:
    return type(t).__name__, str(t.dtype), tuple(t.shape), zlib.crc32(raw_bytes(t))


# ---- The writer ---------------------------------------------------------------


class Writer:
    def __init__(self, settings: Settings, shared: Shared, stock: np.ndarray):
        self.settings = settings
        self.shared = shared
        self.rng = random.Random(settings.seed)
        self.goods = Goods(self.rng, stock)
        self.n_sent = 0
        # Of the message being sent.
        self.diverted: list[torch.Tensor] = []

    def run(self, pipes: list[Connection]) -> None:
        settings, shared = self.settings, self.shared
        start_process(settings)
        self.queue = MessageQueue(
            settings.n_reader,
            settings.n_reader,
            max_chunk_bytes=settings.chunk_bytes,
            max_chunks=settings.n_chunks,
            enable_shm_tensor_arena=True,
        )
        shared.set("tracker's pid", resource_tracker._resource_tracker._pid or 0)
        for pipe in pipes:
            pipe.send(self.queue.export_handle())
        if settings.full_at_barrier:
            self.fill(0)
        self.queue.wait_until_ready()
        shared.set("past the barrier", 1)
        arena = self.queue.tensor_arena
        assert arena is not None
        self.arena, self.write_tensor = arena, arena.write_tensor
        arena.write_tensor = self.write_and_count  # type: ignore[method-assign]

        end = time.monotonic() + settings.seconds
        while time.monotonic() < end:
            self.act()
        self.look_for_lost_slots()
        self.queue.enqueue({"kind": "end", "i": self.n_sent}, timeout=TIMEOUT)
        # The sockets go with this process.
        for pipe in pipes:
            pipe.poll(TIMEOUT)

    def write_and_count(self, t: torch.Tensor) -> int | None:
        slot = self.write_tensor(t)
        if slot is None:
            self.shared.add(0, "tensors that the arena declined")
        else:
            self.shared.add(0, "tensors put into the arena")
            self.diverted.append(t)
        return slot

    def act(self) -> None:
        what = self.rng.random()
        if what < 0.82:
            self.send(self.message())
        elif what < 0.88:
            self.fail_to_pickle()
        elif what < 0.91:
            self.let_time_out()
        elif what < 0.95:
            if FILLER.exists():
                FILLER.unlink()
            elif self.settings.may_fill:
                self.fill(self.rng.choice([0, 1, 7, 300, 20_000]))
        else:
            self.look_for_lost_slots()

    def message(self) -> dict:
        rng, settings = self.rng, self.settings
        least = settings.min_tensor_bytes
        most = min(settings.arena_bytes // 2, 48 * MIB)
        items = []
        for _ in range(rng.choice([0, 1, 1, 1, 2, 3, 6])):
            # Small ones are the most frequent.
            nbytes = int(least / 2 * (2 * most / least) ** rng.random() ** 3)
            items.append(self.goods.tensor(nbytes + rng.randrange(1000)))
        readers = range(settings.n_reader)
        return {
            "kind": "data",
            "i": self.n_sent,
            "items": items,
            "expected": [description(t) for t in items],
            # For each reader: messages for which it keeps the tensors, what of
            # them it keeps, and seconds that it takes.
            "keep": [rng.choice([0, 0, 1, 3, 10, 40]) for _ in readers],
            "part": [rng.choice(["all", "view"]) for _ in readers],
            "delay": [rng.choice([0.0] * 20 + [0.02]) for _ in readers],
        }

    def send(self, message: dict, timeout: float = TIMEOUT) -> bool:
        self.diverted.clear()
        try:
            self.queue.enqueue(message, timeout=timeout)
        except TimeoutError:
            self.shared.add(0, "sends timed out")
            return False
        if message["kind"] == "data":
            self.n_sent += 1
            self.shared.add(0, "messages sent")
        for t in self.diverted:
            if self.rng.random() < 0.1:
                raw_bytes(t)[:] = 0xEE
                self.shared.add(0, "sources changed after enqueue")
        return True

    def fail_to_pickle(self) -> None:
        message = self.message()
        message["items"].append(Unpicklable())
        try:
            self.queue.enqueue(message, timeout=TIMEOUT)
        except RuntimeError:
            self.shared.add(0, "pickles failed")

    def let_time_out(self) -> None:
        """Stop one reader and send until the ring is full."""
        message = self.message()
        stuck = self.rng.randrange(self.settings.n_reader)
        message["delay"][stuck] = self.rng.uniform(0.3, 1.0)
        self.send(message)
        self.shared.add(0, "readers stuck")
        while self.send(self.message(), timeout=0.01):
            pass

    def fill(self, leave_pages: int) -> None:
        # The ring takes its pages late and without asking, and would die of
        # SIGBUS on a full /dev/shm, with or without an arena.
        for i in range(self.queue.buffer.max_chunks):
            with self.queue.buffer.get_data(i) as chunk:
                chunk[:: mmap.PAGESIZE] = chunk[:: mmap.PAGESIZE].tobytes()
        fs = os.statvfs(SHM)
        free = (fs.f_bavail - leave_pages) * fs.f_bsize
        if free <= 0:
            return
        try:
            with open(FILLER, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, free)
        except OSError as e:
            # The arena has prepared some of it meanwhile.
            assert e.errno == errno.ENOSPC
            FILLER.unlink(missing_ok=True)
        else:
            self.shared.add(0, "/dev/shm filled")

    def look_for_lost_slots(self) -> None:
        """All readers drop everything; then every slot must be free again."""
        self.send({"kind": "drop"})
        FILLER.unlink(missing_ok=True)
        self.arena.write_tensor = self.write_tensor  # type: ignore[method-assign]
        deadline = time.monotonic() + SLOTS_BACK_S
        while lost := self.settings.n_slots - free_slots(self.arena):
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        self.arena.write_tensor = self.write_and_count  # type: ignore[method-assign]
        self.shared.add(0, "looks for lost slots")
        self.shared.add(0, "slots lost", lost)
        if lost:
            raise RuntimeError(f"{lost} slots lost")
        self.shared.sample_memory(0)


# ---- A reader -----------------------------------------------------------------


@dataclass(eq=False)
class Kept:
    until: int
    tensor: torch.Tensor
    crc: int


class Reader:
    def __init__(self, settings: Settings, shared: Shared, rank: int):
        self.settings = settings
        self.shared = shared
        self.rank = rank
        self.process = 1 + rank
        self.kept: list[Kept] = []

    def run(self, pipe: Connection) -> None:
        start_process(self.settings)
        # Finalizers must work in any thread.
        garbage: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=drop_all, args=(garbage,), daemon=True).start()

        handle: Handle = pipe.recv()
        queue = MessageQueue.create_from_handle(handle, self.rank)
        queue.wait_until_ready()
        n_received = 0
        while True:
            message = queue.dequeue(indefinite=True)
            if message["kind"] == "end":
                self.shared.add(
                    self.process, "messages lost", message["i"] - n_received
                )
                pipe.send("done")
                return
            if message["kind"] == "drop":
                self.drop(sys.maxsize, garbage)
                self.shared.sample_memory(self.process)
                continue
            if message["i"] != n_received:
                self.shared.add(self.process, "messages lost")
            n_received += 1
            self.receive(message)
            del message["items"]
            self.keep_less()
            self.drop(n_received, garbage)

    def receive(self, message: dict) -> None:
        add, me = self.shared.add, self.process
        add(me, "messages received")
        for t, expected in zip(message["items"], message["expected"], strict=True):
            add(me, "tensors received")
            add(me, "bytes received", t.nbytes)
            add(me, "checks of a tensor")
            if description(t) != tuple(expected):
                add(me, "mismatches")
            if keep := message["keep"][self.rank]:
                if message["part"][self.rank] == "view":
                    t = t.detach().reshape(-1)[t.numel() // 3 :]
                crc = zlib.crc32(raw_bytes(t))
                self.kept.append(Kept(message["i"] + keep, t, crc))
        time.sleep(message["delay"][self.rank])

    def keep_less(self) -> None:
        # No more than twice the arena, for the sake of the machine.
        held = 0
        for kept in reversed(self.kept):
            held += kept.tensor.untyped_storage().nbytes()
            if held > 2 * self.settings.arena_bytes:
                kept.until = 0

    def drop(self, now: int, garbage: SimpleQueue) -> None:
        """Drop what was to be kept until now: half of it here, half in a thread."""
        for kept in [kept for kept in self.kept if kept.until <= now]:
            self.shared.add(self.process, "checks of a tensor")
            if zlib.crc32(raw_bytes(kept.tensor)) != kept.crc:
                self.shared.add(self.process, "mismatches")
            if kept.crc % 2:
                garbage.put(kept.tensor)
            self.kept.remove(kept)


def drop_all(garbage: SimpleQueue) -> None:
    while True:
        garbage.get()


def start_process(settings: Settings) -> None:
    # Memory that is freed is to be given back, or growth could not be seen.
    _libc.mallopt(_M_MMAP_THRESHOLD, MIB)
    torch.set_num_threads(1)
    shm_tensor_arena._MIN_TENSOR_BYTES = settings.min_tensor_bytes
    for module in (shm_tensor_arena, backing):
        module.PREPARE_STEP_BYTES = settings.prepare_step_bytes
    init = shm_tensor_arena.ShmTensorArena.__init__

    def with_settings(self, n_reader, slot_bytes=None, n_slots=None, *args, **kwargs):
        slot_bytes = slot_bytes or settings.slot_bytes
        n_slots = n_slots or settings.n_slots
        init(self, n_reader, slot_bytes, n_slots, *args, **kwargs)

    shm_tensor_arena.ShmTensorArena.__init__ = with_settings  # type: ignore[method-assign]


# ---- Rigs ---------------------------------------------------------------------


@dataclass
class Outcome:
    """What all rigs together have come to."""

    private_shm: bool
    counts: Counter = field(default_factory=Counter)
    ends: Counter = field(default_factory=Counter)
    killed_before_the_barrier: int = 0
    names_left_before_the_barrier: int = 0
    most_bytes_left_before_the_barrier: int = 0
    # Of the long rig, by process.
    growth_mib: dict[str, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def problems(self) -> list[str]:
        found = [f"{self.counts[c]} {c}" for c in MUST_BE_ZERO if self.counts[c]]
        found += [
            f"the long rig's {process} grew by {mib} MiB"
            for process, mib in self.growth_mib.items()
            if mib > MAX_GROWTH_MIB
        ]
        return found + self.failures


def run_rig(settings: Settings, outcome: Outcome, stock: np.ndarray) -> Shared:
    if outcome.private_shm:
        resize_shm(settings)
    before = set(os.listdir(SHM))
    shared = Shared(1 + settings.n_reader)
    # Fork: an import of vLLM for each process would be most of the time.
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in range(settings.n_reader)]
    writer = Writer(settings, shared, stock)
    processes = [
        context.Process(target=run_in_group, args=(writer.run, [p[0] for p in pipes]))
    ]
    for rank, (_, pipe) in enumerate(pipes):
        reader = Reader(settings, shared, rank)
        processes.append(context.Process(target=run_in_group, args=(reader.run, pipe)))
    for process in processes:
        process.start()
    try:
        end_rig(settings, shared, processes, outcome)
    finally:
        for process in processes:
            kill_group(process.pid)
            process.join()
            process.close()
        # Its segments are kept by nobody else, but it may still unlink them.
        if tracker := shared.get("tracker's pid"):
            wait_for_end_of(tracker, TIMEOUT)
    for process_counts in shared.counters:
        for counter, n in zip(COUNTERS, process_counts.tolist()):
            outcome.counts[counter] += n
    FILLER.unlink(missing_ok=True)
    look_for_leftovers(settings, shared, before, outcome)
    return shared


def end_rig(
    settings: Settings, shared: Shared, processes: list, outcome: Outcome
) -> None:
    outcome.ends[settings.end] += 1
    writer, readers = processes[0], processes[1:]
    if settings.end not in ("clean", "kill the tracker"):
        time.sleep(settings.kill_after)
        victims = {
            "kill all": processes,
            "kill a reader": readers[:1],
            "kill the writer": [writer],
        }[settings.end]
        for process in victims:
            if settings.end == "kill all":
                kill_group(process.pid)
            else:
                os.kill(process.pid, signal.SIGKILL)
        # The others may wait for ever, but not fall.
        for process in processes:
            process.join(0.2)
            if process not in victims and process.exitcode:
                outcome.failures.append(f"{process.exitcode=} in {settings}")
        return
    if settings.end == "kill the tracker":
        time.sleep(settings.kill_after)
        if pid := shared.get("tracker's pid"):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + settings.seconds + 2 * TIMEOUT
    running = {process.sentinel: process for process in processes}
    while running and time.monotonic() < deadline:
        for sentinel in wait(list(running), timeout=TIMEOUT):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                outcome.failures.append(f"{process.exitcode=} in {settings}")
                return
    if running:
        outcome.failures.append(f"did not end: {settings}")


def look_for_leftovers(
    settings: Settings, shared: Shared, before: set[str], outcome: Outcome
) -> None:
    passed = shared.get("past the barrier")
    if not passed:
        outcome.killed_before_the_barrier += 1
    # Others use a /dev/shm that is not ours alone.
    ours = (lambda name: True) if outcome.private_shm else is_arena
    for name in filter(ours, set(os.listdir(SHM)) - before):
        path = SHM / name
        nbytes = path.stat().st_blocks * 512
        if settings.full_at_barrier and not passed and not is_arena(name):
            nbytes = 0  # the ring's, touched by `Writer.fill`
        if passed or nbytes > MAX_SPARSE_BYTES:
            outcome.failures.append(f"{nbytes} bytes of {name} left by {settings}")
        outcome.names_left_before_the_barrier += 1
        outcome.most_bytes_left_before_the_barrier = max(
            outcome.most_bytes_left_before_the_barrier, nbytes
        )
        path.unlink()


def is_arena(name: str) -> bool:
    return name.startswith("vllm_arena_")


def resize_shm(settings: Settings) -> None:
    """Little more than the rig needs, so that filling it costs little."""
    mib = (settings.arena_bytes >> 20) + 256 + 64
    subprocess.run(
        ["mount", "-o", f"remount,size={mib}m", str(SHM)], check=True, timeout=TIMEOUT
    )


def soak(minutes: float, seed: int, private: bool) -> Outcome:
    rng = random.Random(seed)
    stock = np.random.default_rng(seed).integers(0, 256, 64 * MIB, dtype=np.uint8)
    outcome = Outcome(private_shm=private)
    start = time.monotonic()
    end = start + minutes * 60

    long = draw_settings(rng, minutes * 60 / 2, "clean", private)
    long.n_reader, long.slot_bytes, long.n_slots = 2, MIB, 96
    shared = run_rig(long, outcome, stock)
    names = ["writer", *(f"reader {rank}" for rank in range(long.n_reader))]
    outcome.growth_mib = {name: shared.growth_mib(i) for i, name in enumerate(names)}

    i = 0
    while (left := end - time.monotonic()) > 1:
        seconds = min(left, rng.uniform(1, min(20, minutes * 4)))
        run_rig(
            draw_settings(rng, seconds, ENDS[i % len(ENDS)], private), outcome, stock
        )
        i += 1
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="Exit code 1 if anything was wrong, lost or left behind.",
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", type=Path, help="where the numbers go, as JSON")
    parser.add_argument("--in-private-shm", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.minutes <= 0:
        parser.error("--minutes must be positive")
    if not args.in_private_shm and private_shm.is_allowed():
        again = [sys.executable, "-m", "tests.soak.soak", *sys.argv[1:]]
        again = private_shm.command(4096, [*again, "--in-private-shm"])
        os.execvp(again[0], again)

    outcome = soak(args.minutes, args.seed, args.in_private_shm)
    problems = outcome.problems()
    report = {
        "minutes": args.minutes,
        "seed": args.seed,
        "rigs": sum(outcome.ends.values()),
        **vars(outcome),
        "problems": problems,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.report is not None:
        args.report.write_text(text + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
