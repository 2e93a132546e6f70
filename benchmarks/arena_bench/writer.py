# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The writer: sends messages as EngineCore does, and measures."""

import ctypes
import itertools
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

from .block import Block
from .reader import TURNS, Report, checksum, wrapped

# A real engine's first request comes some time after it is up, and the arena
# may use that time.
SETTLE_S = 2
ANSWER_TIMEOUT_S = 120
LIMIT_THREADS = (1, 2, 4, 8, 16)
LIMIT_CHUNK_BYTES = 4 << 20
TEXT_REQUESTS = 256

# Expected checksum, tensors, and what else the message carries.
Message = tuple[int, list[torch.Tensor], Any]


class Call(NamedTuple):
    """One `enqueue`."""

    queue: int
    start: float
    """`time.monotonic()`"""
    ms: float
    cpu_ms: float
    """Of the calling thread: what is left when others kept it off the CPUs."""


class Channel:
    """The queue, or the two that take turns, and the readers' answers."""

    def __init__(self, block: Block, links: list[Connection], flags: tuple[bool, ...]):
        self._links = links
        self.gap_s = block.gap_s
        self.queues = [
            MessageQueue(
                block.n_reader,
                block.n_reader - block.n_remote,
                connect_ip="127.0.0.1",
                enable_shm_tensor_arena=flag,
            )
            for flag in flags
        ]
        self._turns = itertools.cycle(TURNS if len(flags) > 1 else (0,))
        handles = [queue.export_handle() for queue in self.queues]
        for link in links:
            link.send(handles)
        for queue in self.queues:
            queue.wait_until_ready()
        time.sleep(SETTLE_S)

    def enqueue(self, message: Message | None) -> Call:
        turn = next(self._turns)
        cpu_start, start = time.thread_time(), time.monotonic()
        self.queues[turn].enqueue(message)
        end, cpu_end = time.monotonic(), time.thread_time()
        return Call(turn, start, (end - start) * 1e3, (cpu_end - cpu_start) * 1e3)

    def answers(self) -> list[Report]:
        """Wait until every reader has dealt with the message."""
        reports = []
        for rank, link in enumerate(self._links):
            if not link.poll(ANSWER_TIMEOUT_S):
                sys.exit(f"Reader {rank} gave no answer in {ANSWER_TIMEOUT_S} s.")
            reports.append(link.recv())
        return reports

    def arena_bytes(self) -> int:
        """Resident bytes of this process's shared memory but for the rings.

        By file descriptor: the arena's name is gone by the time it is used.
        """
        rings = {queue.buffer.shared_memory.name for queue in self.queues}
        blocks = {}
        for fd in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{fd}")
                status = os.fstat(int(fd))
            except OSError:  # that of listdir
                continue
            name = os.path.basename(target).removesuffix(" (deleted)")
            if target.startswith("/dev/shm/") and name not in rings:
                blocks[status.st_ino] = status.st_blocks
        return sum(blocks.values()) * 512


def run(block: Block, links: list[Connection], results: Connection, warm: Any) -> None:
    # EngineCore has one.
    torch.set_num_threads(1)
    jobs: dict[str, Callable[[], tuple[Channel, dict[str, Any]]]] = {
        "tensors": lambda: _send_tensors(block, links),
        "limit": lambda: _measure_limit(block, links, warm),
        "text": lambda: _compare_text(block, links),
        "pairs": lambda: _compare_tensors(block, links),
    }
    try:
        channel, result = jobs[block.job]()
    except (EOFError, ConnectionError):
        # A reader is gone, and our parent knows which.
        return
    results.send(result)
    channel.enqueue(None)


def _message(sizes: tuple[int, ...]) -> Message:
    tensors = [
        torch.randint(-(2**62), 2**62, (nbytes // 8,)).view(torch.uint8)
        for nbytes in sizes
    ]
    return wrapped(sum(checksum(t) for t in tensors)), tensors, None


def _send_tensors(
    block: Block, links: list[Connection]
) -> tuple[Channel, dict[str, Any]]:
    # Two contents, so that a reader that sees an earlier message is found out.
    plan = [(sizes, i % 2) for i, sizes in enumerate(block.messages)]
    messages = {key: _message(key[0]) for key in set(plan)}
    channel = Channel(block, links, (block.use_arena,))
    resident_before = channel.arena_bytes()
    samples = []
    for number, key in enumerate(plan, 1):
        time.sleep(channel.gap_s)
        call = channel.enqueue(messages[key])
        reports = channel.answers()
        samples.append(
            {
                "message": number,
                "bytes": sum(key[0]),
                "enqueue_ms": call.ms,
                "dequeued_ms": (max(r.dequeued for r in reports) - call.start) * 1e3,
                "device_ms": (max(r.on_device for r in reports) - call.start) * 1e3,
                "shared": min(r.shared_bytes for r in reports) / sum(key[0]),
            }
        )
    return channel, {
        "samples": samples,
        "resident_before": resident_before,
        "resident_after": channel.arena_bytes(),
    }


def _measure_limit(
    block: Block, links: list[Connection], warm: Any
) -> tuple[Channel, dict[str, Any]]:
    """Copy into warm shared memory, and have the readers read it from there.

    The readers are in the state in which the other arms find them, since they
    learn by a message through the queue when to read. What that message takes
    is not counted.
    """
    nbytes = block.messages[0][0]
    messages = [_message((nbytes,)) for _ in range(2)]
    target = ctypes.addressof(warm)
    channel = Channel(block, links, (False,))
    samples = []
    cpus = len(os.sched_getaffinity(0))
    for threads in (n for n in LIMIT_THREADS if n <= cpus):
        with ThreadPoolExecutor(threads) as pool:
            for number in range(len(block.messages) + 1):
                expected, (tensor,), _ = messages[number % 2]
                time.sleep(channel.gap_s)
                start = time.monotonic()
                _copy(target, tensor.data_ptr(), nbytes, threads, pool)
                copied = time.monotonic() - start
                channel.enqueue((expected, [], None))
                read = max(r.on_device - r.dequeued for r in channel.answers())
                # The first starts the threads and maps the pages.
                if number > 0:
                    samples.append(
                        {
                            "message": number,
                            "threads": threads,
                            "enqueue_ms": copied * 1e3,
                            "dequeued_ms": copied * 1e3,
                            "device_ms": (copied + read) * 1e3,
                        }
                    )
    return channel, {"samples": samples}


def _copy(
    target: int, source: int, nbytes: int, threads: int, pool: ThreadPoolExecutor
) -> None:
    if threads == 1:
        ctypes.memmove(target, source, nbytes)
        return

    def move(offset: int) -> None:
        n = min(LIMIT_CHUNK_BYTES, nbytes - offset)
        ctypes.memmove(target + offset, source + offset, n)

    # Consumed, so that all are done.
    list(pool.map(move, range(0, nbytes, LIMIT_CHUNK_BYTES)))


def _compare_text(
    block: Block, links: list[Connection]
) -> tuple[Channel, dict[str, Any]]:
    """Enqueue the same by both queues in turn: pairs a few ms apart, so that
    what else the machine does meets both."""
    outputs = scheduler_outputs()
    channel = Channel(block, links, (False, True))
    pairs: dict[str, list[dict[str, float]]] = {}
    for kind, output in outputs.items():
        pairs[kind] = []
        for _ in block.messages:
            pair = {}
            for _ in range(2):
                call = channel.enqueue((0, [], output))
                flag = "on" if call.queue else "off"
                pair |= {f"{flag}_ms": call.ms, f"{flag}_cpu_ms": call.cpu_ms}
                channel.answers()
            pairs[kind].append(pair)
    return channel, {"pairs": pairs}


def _compare_tensors(
    block: Block, links: list[Connection]
) -> tuple[Channel, dict[str, Any]]:
    """As `_compare_text`, with tensors and what becomes of them."""
    messages = {sizes: _message(sizes) for sizes in set(block.messages)}
    channel = Channel(block, links, (False, True))
    pairs: list[dict[str, float]] = []
    for sizes in block.messages:
        pair: dict[str, float] = {}
        for _ in range(2):
            time.sleep(channel.gap_s)
            call = channel.enqueue(messages[sizes])
            reports = channel.answers()
            flag = "on" if call.queue else "off"
            local = reports[: block.n_reader - block.n_remote]
            pair |= {
                f"{flag}_enqueue_ms": call.ms,
                f"{flag}_dequeued_ms": _until([r.dequeued for r in local], call),
                f"{flag}_device_ms": _until([r.on_device for r in local], call),
                f"{flag}_shared": min(r.shared_bytes for r in local) / sum(sizes),
            }
            if remote := reports[len(local) :]:
                read = [r.on_device for r in remote]
                pair[f"{flag}_remote_ms"] = _until(read, call)
        pairs.append(pair)
    return channel, {"pairs": pairs}


def _until(times: list[float], call: Call) -> float:
    """Milliseconds from the start of a call until the last of these times."""
    return (max(times) - call.start) * 1e3


def scheduler_outputs() -> dict[str, Any]:
    # Here, because they need much more of vllm than the queue does.
    try:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.sched.output import (
            CachedRequestData,
            NewRequestData,
            SchedulerOutput,
        )
    except (ImportError, OSError, RuntimeError) as e:
        sys.exit(f"The text-only messages need all of vllm to import: {e}")
    ids = [f"chatcmpl-{i:032x}" for i in range(TEXT_REQUESTS)]
    new = [
        NewRequestData(
            req_id=req_id,
            prompt_token_ids=list(range(512)),
            mm_features=[],
            sampling_params=SamplingParams(temperature=0.7, max_tokens=256),
            pooling_params=None,
            block_ids=(list(range(32)),),
            num_computed_tokens=0,
            lora_request=None,
        )
        for req_id in ids
    ]
    running = CachedRequestData(
        req_ids=ids,
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[([i],) if i % 16 == 0 else None for i in range(len(ids))],
        num_computed_tokens=[600] * len(ids),
        num_output_tokens=[88] * len(ids),
    )

    def output(new: list, cached: Any, tokens: int) -> Any:
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict.fromkeys(ids, tokens),
            total_num_scheduled_tokens=tokens * len(ids),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[0],
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
        )

    return {
        f"{TEXT_REQUESTS} new requests": output(
            new, CachedRequestData.make_empty(), 512
        ),
        f"{TEXT_REQUESTS} running requests": output([], running, 1),
    }
