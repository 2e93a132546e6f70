# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""When a reader is done with a slot."""

import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable

import numpy as np

from vllm.distributed.device_communicators.shm_arena import pinning

# A waiting reader passes its loop up to a million times a second; a look at the
# device takes the driver's lock.
_QUERY_INTERVAL_S = 0.001


class SlotReleases:
    """Books, for one reader, which slots are viewed and which are done with.

    A slot is done when the storage of every tensor made over it is freed and,
    if its memory is pinned, when the device has finished the work issued until
    then: a DMA copy reads the slot after the call that started it returned.

    Args:
        set_done: Called with the slot, on the thread that flushes.

    """

    def __init__(self, set_done: Callable[[int], None]):
        self._set_done = set_done
        # Slots of freed storages. Finalizers run in any thread, at any
        # allocation, under any lock: they append here and do nothing else.
        self._freed: deque[int] = deque()
        # Pinned slots of which nothing is viewed: those an event is still to be
        # recorded for, and the others behind the event they wait for.
        self._unrecorded: list[int] = []
        self._in_flight: deque[tuple[pinning.Event, list[int]]] = deque()
        # Slot -> how often it is in these two.
        self._unfinished: Counter[int] = Counter()
        # Slot -> storages over it that live. A message that is loaded twice
        # makes two.
        self._viewed: Counter[int] = Counter()
        # Viewed slots of which some view was pinned.
        self._pinned: set[int] = set()
        self._next_query = 0.0
        self._lock = threading.Lock()
        # A forked child inherits views; freeing them there must not free the
        # parent's slots.
        self._pid = os.getpid()

    def watch(self, owner: np.ndarray, slot: int, pinned: bool) -> None:
        """Release `slot` after `owner`, which only a storage refers to, dies."""
        with self._lock:
            self._viewed[slot] += 1
            if pinned:
                self._pinned.add(slot)
        weakref.finalize(owner, self._freed.append, slot).atexit = False

    @property
    def outstanding(self) -> bool:
        """Whether some slot is viewed or waits for the device."""
        return bool(self._viewed or self._unrecorded or self._in_flight)

    def flush(self, spinning: bool = False) -> None:
        """Mark slots done that are. Cheap if there is none. Called by the thread
        that dequeues.

        Args:
            spinning: The caller calls all the time, so the device is asked only
                once a millisecond.

        """
        if not (self._freed or self._unrecorded or self._in_flight):
            return
        if spinning and not self._freed:
            now = time.monotonic()
            if now < self._next_query:
                return
            self._next_query = now + _QUERY_INTERVAL_S
        # An event recorded or queried in a capture would break it.
        if self._pid != os.getpid() or pinning.is_capturing():
            return
        # Two threads may flush; one is enough, and none waits.
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._flush()
        finally:
            self._lock.release()

    def _flush(self) -> None:
        while self._freed:
            slot = self._freed.popleft()
            self._viewed[slot] -= 1
            if self._viewed[slot] > 0:
                continue
            del self._viewed[slot]
            if slot in self._pinned:
                self._pinned.remove(slot)
                self._unrecorded.append(slot)
                self._unfinished[slot] += 1
            elif slot not in self._unfinished:
                self._set_done(slot)
        # Kept if recording fails or raises: a slot must not be lost, nor
        # reused under a copy.
        if self._unrecorded and (event := pinning.record_event()) is not None:
            self._in_flight.append((event, self._unrecorded))
            self._unrecorded = []
        while self._in_flight and self._in_flight[0][0].query():
            for slot in self._in_flight.popleft()[1]:
                self._unfinished[slot] -= 1
                if self._unfinished[slot] == 0:
                    del self._unfinished[slot]
                    if slot not in self._viewed:
                        self._set_done(slot)
