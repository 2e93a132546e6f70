# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What a request's tensors go through inside an engine, noted from outside it.

A vLLM general plugin: every process of an engine calls `register`, which wraps a
few methods of whatever vLLM is installed there. An event is one JSON line

    [start, end, what, {facts}]

in the process's own file, with times of the monotonic clock in seconds, which all
processes of a host share:

    core     EngineCore has taken a request with tensors from the frontend
    step     EngineCore has sent a step to the workers (`MessageQueue.enqueue`)
    dequeue  a worker has a message with tensors
    h2d      a worker has tensors on its device; waits for the device around the
             copy, and sums what arrived
"""

import functools
import json
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRACE_FOLDER = "SERVING_BENCH_TRACE"

# Levels: what a process notes at present. DEVICE waits for the device, so steps
# no longer overlap.
OFF, HOST, DEVICE = 0, 1, 2

# Smaller tensors (grid sizes and the like) are left out.
MIN_BYTES = 1 << 20
_ROW = 4096


class Trace:
    """The events of this process.

    Args:
        folder: Of one engine; holds a file for each process, and one whose single
            byte is the level.

    """

    def __init__(self, folder: Path):
        self._folder = folder
        with (folder / "level").open("r+b") as file:
            self._level = mmap.mmap(file.fileno(), 1)
        self._file = None
        self._pid = 0

    @staticmethod
    def prepare(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "level").write_bytes(b"\x00")

    @property
    def level(self) -> int:
        return self._level[0]

    @level.setter
    def level(self, level: int) -> None:
        self._level[0] = level

    def note(self, start: float, end: float, what: str, **facts: Any) -> None:
        if self._pid != os.getpid():  # the first event, or forked since
            self._pid = os.getpid()
            self._file = (self._folder / f"{self._pid}.jsonl").open("a", buffering=1)
        print(json.dumps([start, end, what, facts]), file=self._file)


def read_events(folder: Path) -> list[list]:
    """All events of an engine, in order of their start."""
    events = []
    for path in folder.glob("*.jsonl"):
        pid = int(path.stem)
        for line in path.read_text().splitlines():
            start, end, what, facts = json.loads(line)
            events.append([start, end, what, {**facts, "pid": pid}])
    return sorted(events, key=lambda event: event[:2])


def checksum(tensor: Any) -> int:
    """Of all bytes; tells bytes at another place apart. Equal on any device."""
    import torch

    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = raw.numel() // _ROW * _ROW
    table = raw[:whole].view(-1, _ROW)
    total = raw[whole:].sum(dtype=torch.int64)
    for axis in (0, 1):
        sums = table.sum(axis, dtype=torch.int64)
        weights = torch.arange(1, sums.numel() + 1, device=sums.device)
        total = total + (sums * weights).sum()
    return int(total)


def register() -> None:
    """Called by vLLM in each of its processes."""
    folder = os.environ.get(TRACE_FOLDER)
    if folder is None:
        return
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.multimodal.inputs import BaseMultiModalField
    from vllm.v1.engine.core import EngineCore

    trace = Trace(Path(folder))
    _wrap(EngineCore, "preprocess_add_request", _noting_core(trace))
    _wrap(MessageQueue, "enqueue", _noting_steps(trace))
    _wrap(MessageQueue, "dequeue", _noting_dequeue(trace))
    _wrap(BaseMultiModalField, "reduce_data", _noting_h2d(trace))


def _wrap(owner: type, name: str, wrapper: Callable) -> None:
    method = getattr(owner, name)
    setattr(owner, name, functools.wraps(method)(wrapper(method)))


def _noting_core(trace: Trace) -> Callable:
    def wrapper(method: Callable) -> Callable:
        def preprocess_add_request(self: Any, request: Any, *args: Any) -> Any:
            start = time.monotonic()
            result = method(self, request, *args)
            if trace.level and (nbytes := sum(t.nbytes for t in _tensors(request))):
                trace.note(start, time.monotonic(), "core", bytes=nbytes)
            return result

        return preprocess_add_request

    return wrapper


def _noting_steps(trace: Trace) -> Callable:
    def wrapper(method: Callable) -> Callable:
        def enqueue(self: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
            output = _scheduler_output(message) if trace.level else None
            if output is None:
                return method(self, message, *args, **kwargs)
            _arena_use(self)
            start = time.monotonic()
            result = method(self, message, *args, **kwargs)
            end = time.monotonic()
            new = output.scheduled_new_reqs
            facts = {
                "bytes": sum(t.nbytes for r in new for t in _tensors(r)),
                "requests": len(output.num_scheduled_tokens),
            }
            trace.note(start, end, "step", **facts, **_arena_use(self))
            return result

        return enqueue

    return wrapper


def _noting_dequeue(trace: Trace) -> Callable:
    def wrapper(method: Callable) -> Callable:
        def dequeue(self: Any, *args: Any, **kwargs: Any) -> Any:
            message = method(self, *args, **kwargs)
            end = time.monotonic()
            output = _scheduler_output(message) if trace.level else None
            if output is not None:
                new = output.scheduled_new_reqs
                nbytes = sum(t.nbytes for r in new for t in _tensors(r))
                if nbytes:
                    trace.note(end, end, "dequeue", bytes=nbytes)
            return message

        return dequeue

    return wrapper


def _noting_h2d(trace: Trace) -> Callable:
    def wrapper(method: Callable) -> Callable:
        def reduce_data(self: Any, elems: list, **kwargs: Any) -> Any:
            sizes = [getattr(e.data, "nbytes", 0) for e in elems]
            if trace.level < DEVICE or sum(sizes) < MIN_BYTES:
                return method(self, elems, **kwargs)
            import torch

            on_device = str(kwargs.get("device") or "cpu") != "cpu"
            if on_device:
                torch.accelerator.synchronize()
            start = time.monotonic()
            out = method(self, elems, **kwargs)
            issued = time.monotonic()
            if on_device:
                torch.accelerator.synchronize()
            end = time.monotonic()
            flat = out.view(-1).split([e.data.numel() for e in elems])
            sums = [checksum(part) for part in flat]
            facts = {"bytes": sum(sizes), "issued": issued, "sums": sums}
            trace.note(start, end, "h2d", **facts)
            return out

        return reduce_data

    return wrapper


def _scheduler_output(message: Any) -> Any:
    """Of a message that asks workers to execute a step, else None."""
    try:
        output = message[1][0]
    except (IndexError, KeyError, TypeError):
        return None
    return output if hasattr(output, "scheduled_new_reqs") else None


def _tensors(request: Any) -> list:
    """The large tensors of a new request."""
    found = [request.prompt_embeds]
    for feature in request.mm_features or []:
        if feature.data is not None:
            found += [elem.data for elem in feature.data.values()]
    return [t for t in found if getattr(t, "nbytes", 0) >= MIN_BYTES]


def _arena_use(queue: Any) -> dict[str, int]:
    """If the queue has this fork's arena: slots that some reader still uses, and
    the bytes diverted since the last call."""
    arena = getattr(queue, "tensor_arena", None)
    book = getattr(arena, "_book", None)
    if book is None:
        return {}
    if not hasattr(arena, "probe_diverted"):
        arena.probe_diverted = 0
        write_tensor = arena.write_tensor

        def counting(tensor: Any) -> Any:
            slot = write_tensor(tensor)
            if slot is not None:
                arena.probe_diverted += tensor.nbytes
            return slot

        arena.write_tensor = counting
    diverted, arena.probe_diverted = arena.probe_diverted, 0
    done = set(arena._flags.done_slots())
    in_use = sum(n for slot, n in book.live.items() if slot not in done)
    return {"slots_in_use": in_use, "diverted": diverted}
