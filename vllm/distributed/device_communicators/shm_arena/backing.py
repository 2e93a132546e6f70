# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Taking /dev/shm pages for slots, before use and ahead of use (writer)."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from vllm.distributed.device_communicators.shm_arena.cgroup import memory_room
from vllm.distributed.device_communicators.shm_arena.copy_pool import CopyPool
from vllm.distributed.device_communicators.shm_arena.layout import ArenaLayout
from vllm.distributed.device_communicators.shm_arena.segment import (
    ArenaSegment,
    MappedBytes,
)
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv

logger = init_logger(__name__)

# Memory is prepared in steps of this size: taken and touched by the writer,
# then pinned by the readers. Registering 512 MiB of touched pages took 80 ms on
# H200 (driver 580), of untouched ones 360 ms.
PREPARE_STEP_BYTES = 512 << 20
# The next step begins when less than this is prepared beyond the highest
# slot used so far.
_PREPARE_AHEAD_BYTES = 256 << 20
# Taken per lock hold while preparing, so that a request never waits for more
# than about 10 ms of somebody else's page taking.
_PREPARE_CHUNK_BYTES = 32 << 20
# Left free under a cgroup's memory limit: going over it is an OOM kill that no
# error code announces.
_CGROUP_RESERVE_BYTES = 256 << 20
# Where there was no room for a step, each large tensor would start another thread
# to find none.
_RETRY_S = 5.0


class PageBacking:
    """Makes sure that slots have pages before anybody touches them.

    Args:
        segment: The arena's segment.
        layout: Its layout.
        mapped: The writer's mapping of the data.
        pool: Threads for touching pages.
        on_prepared: Called, on any thread, with the number of steps prepared.

    """

    def __init__(
        self,
        segment: ArenaSegment,
        layout: ArenaLayout,
        mapped: MappedBytes,
        pool: CopyPool,
        on_prepared: Callable[[int], None],
    ):
        self._segment = segment
        self._layout = layout
        # Held: preparation may go on for a moment after the arena is gone.
        self._mapped = mapped
        self._pool = pool
        self._on_prepared = on_prepared
        self._backed = bytearray(layout.n_slots)
        # Guards `_backed`, and the segment against `stop`.
        # Reentrant: a collection while it is held may find the arena and stop.
        self._lock = threading.RLock()
        self._stopped = False
        self._pid = os.getpid()
        self._prepared_steps = 0
        self._prepared_slots = 0
        self._thread: threading.Thread | None = None
        # When a step may be begun: not before the barrier, nor just after one
        # that found no room.
        self._not_before = float("inf")
        self._warned = False

    def take(self, first: int, n: int) -> bool:
        """Take pages for slots `first` to `first + n`. False if /dev/shm or the
        memory cgroup has no room for them."""
        end = first + n
        # Without the lock, behind which somebody else may be taking pages.
        if not self._stopped and self._backed.find(0, first, end) == -1:
            return True
        with self._lock:
            if self._stopped:
                return False
            start = self._backed.find(0, first, end)
            while start != -1:
                stop = self._backed.find(1, start, end)
                stop = end if stop == -1 else stop
                nbytes = (stop - start) * self._layout.slot_stride
                # One call for each gap: a failing call also drops pages that
                # an earlier one took and nobody has written yet.
                if not self._has_room(nbytes) or not self._segment.take_pages(
                    self._layout.offset(start), nbytes
                ):
                    return False
                self._backed[start:stop] = b"\x01" * (stop - start)
                start = self._backed.find(0, stop, end)
        return True

    def _has_room(self, nbytes: int) -> bool:
        fs = os.fstatvfs(self._segment.fd)
        if fs.f_bavail * fs.f_frsize < nbytes + self._layout.reserve_bytes:
            return False
        room = memory_room()
        return room is None or room >= nbytes + _CGROUP_RESERVE_BYTES

    def prepare_first_step(self) -> None:
        """Prepare the first step, in the calling thread. Called once, at the
        barrier: before it nothing large may be taken."""
        self._not_before = 0.0
        self._prepare_next_step()

    def prepare_ahead(self, high_slot: int, peak_slots: int) -> None:
        """Begin the next step, in the background, if use up to `high_slot` calls
        for it. Never raises: this is an optimisation.

        Args:
            high_slot: End of the run that was taken last.
            peak_slots: Most slots that were live at a time. No step is begun
                that would make more than a step resident beyond them: where
                live runs are scattered, the highest slot says little.

        """
        # Not waited for: who holds it is taking pages, and the next tensor asks
        # again.
        if not self._lock.acquire(blocking=False):
            return
        try:
            is_preparing = self._thread is not None and self._thread.is_alive()
            if not is_preparing and self._is_step_due(high_slot, peak_slots):
                self._thread = threading.Thread(
                    target=self._prepare_next_step,
                    daemon=True,
                    name="ShmTensorArenaPrepare",
                )
                # No more threads, or the interpreter is ending.
                with suppress(RuntimeError):
                    self._thread.start()
        finally:
            self._lock.release()

    def _is_step_due(self, high_slot: int, peak_slots: int) -> bool:
        offset = self._layout.offset
        ahead = offset(self._prepared_slots - high_slot)
        bound = cdiv(offset(peak_slots), PREPARE_STEP_BYTES) + 1
        resident = offset(self._backed.count(1)) + PREPARE_STEP_BYTES
        return (
            self._prepared_slots < self._layout.n_slots
            and ahead < _PREPARE_AHEAD_BYTES
            and resident <= bound * PREPARE_STEP_BYTES
            and time.monotonic() >= self._not_before
        )

    def _prepare_next_step(self) -> None:
        stride = self._layout.slot_stride
        per_chunk = max(1, _PREPARE_CHUNK_BYTES // stride)
        end = min(
            self._layout.n_slots,
            cdiv((self._prepared_steps + 1) * PREPARE_STEP_BYTES, stride),
        )
        for first in range(self._prepared_slots, end, per_chunk):
            n = min(per_chunk, end - first)
            if not self.take(first, n):
                self._not_before = time.monotonic() + _RETRY_S
                if not self._stopped and not self._warned:
                    self._warned = True
                    logger.warning(
                        "Shm tensor arena: only %d MiB prepared, no room for more in "
                        "/dev/shm or under the memory cgroup's limit; tensors that "
                        "find no room take the out-of-band path. Raise --shm-size, or "
                        "the limit",
                        self._layout.offset(first) >> 20,
                    )
                return
            self._touch(self._layout.offset(first), n * stride)
        self._prepared_slots = end
        self._prepared_steps += 1
        with self._lock:
            if not self._stopped:
                self._on_prepared(self._prepared_steps)

    def _touch(self, offset: int, nbytes: int) -> None:
        # Changes no byte, so slots in this range may be in use.
        self._pool.for_each_chunk(
            nbytes,
            lambda start, size: self._mapped.populate(offset + start, size, write=True),
        )

    def stop(self) -> None:
        """End preparation. When this returns, nothing here uses the segment's
        descriptor any more. Waits for no thread: a collection may call it
        in one that preparation itself waits for."""
        # In a forked child nothing is prepared, and the lock may be held by a
        # thread that the child does not have.
        if self._pid == os.getpid():
            with self._lock:
                self._stopped = True
