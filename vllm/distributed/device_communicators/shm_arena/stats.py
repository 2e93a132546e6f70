# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the writer counts, and says when a tensor does not fit (writer)."""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from enum import Enum
from typing import Any

from vllm.logger import init_logger

logger = init_logger(__name__)

# One line a minute and reason: a server that is short of room would otherwise
# log every large image.
_LOG_INTERVAL_S = 60.0
# More copies than one engine step can make: 2 GiB hold 256 tensors of 8 MiB.
# Bounds what is kept where nobody takes the stats (`disable_log_stats`).
_MAX_COPY_SECONDS = 1024


class DeclineReason(Enum):
    """Why a tensor took the out-of-band path; the value of the metric's label."""

    TOO_LARGE = "too_large"
    NO_ROOM = "no_room"
    NO_SPACE = "no_space"
    NOT_ATTACHED = "not_attached"
    NOT_ELIGIBLE = "not_eligible"


_EXPLANATION = {
    DeclineReason.TOO_LARGE: (
        "it is larger than the whole arena; only a smaller input would fit"
    ),
    DeclineReason.NO_ROOM: (
        "no run of free slots is long enough, because workers still keep the inputs "
        "of others; fewer large ones at a time (--max-num-seqs) would fit"
    ),
    DeclineReason.NO_SPACE: (
        "no memory for its pages in /dev/shm or under the memory cgroup's limit; "
        "raise --shm-size, or the limit"
    ),
    DeclineReason.NOT_ELIGIBLE: (
        "it is not a contiguous CPU tensor that its bytes, dtype and shape describe; "
        "the model's processor makes it so, and there is nothing to set"
    ),
}


class ArenaStats:
    """Counts since they were last taken. Thread-safe: several threads may
    enqueue.

    Called for tensors of 8 MiB and more only, so a lock costs nothing that
    shows.
    """

    def __init__(self) -> None:
        # Whether there is something to take. True at first: what a new arena
        # has not carried is news too.
        self.changed = True
        self._lock = threading.Lock()
        # Reason -> when it was last logged, and what has come since.
        self._logged_at: dict[DeclineReason, float] = {}
        self._unlogged: Counter[DeclineReason] = Counter()
        self._unlogged_bytes: Counter[DeclineReason] = Counter()
        self._reset()

    def _reset(self) -> None:
        self._tensors = 0
        self._bytes = 0
        self._declined: Counter[str] = Counter()
        self._declined_bytes: Counter[str] = Counter()
        self._copy_seconds: deque[float] = deque(maxlen=_MAX_COPY_SECONDS)

    def on_divert(self, nbytes: int, seconds: float) -> None:
        """A tensor of `nbytes` bytes went through the arena; taking its pages and
        copying it held its thread for `seconds`."""
        with self._lock:
            self._tensors += 1
            self._bytes += nbytes
            self._copy_seconds.append(seconds)
            self.changed = True

    def on_decline(
        self,
        nbytes: int,
        reason: DeclineReason,
        describe: Callable[[], str] | None = None,
    ) -> None:
        """A tensor of `nbytes` bytes took the out-of-band path. Logs the first of
        each reason, then what has come since, at most once a minute.

        Args:
            nbytes: Of the tensor.
            reason: Why.
            describe: Called if this is logged, for what is special to this time.

        """
        now = time.monotonic()
        with self._lock:
            self._declined[reason.value] += 1
            self._declined_bytes[reason.value] += nbytes
            self.changed = True
            if reason is DeclineReason.NOT_ATTACHED:
                return  # said at the barrier
            self._unlogged[reason] += 1
            self._unlogged_bytes[reason] += nbytes
            logged_at = self._logged_at.get(reason)
            if logged_at is not None and now - logged_at < _LOG_INTERVAL_S:
                return
            self._logged_at[reason] = now
            count = self._unlogged.pop(reason)
            total = self._unlogged_bytes.pop(reason)
        explanation = _EXPLANATION[reason] + (describe() if describe else "")
        if logged_at is None:
            logger.warning(
                "Shm tensor arena: a tensor of %.1f MiB takes the out-of-band path "
                "(%s): %s. Others are counted, and reported with the next one "
                "after a minute.",
                total / (1 << 20),
                reason.value,
                explanation,
            )
        else:
            logger.warning(
                "Shm tensor arena: %d more tensors (%.1f MiB) took the out-of-band "
                "path in the last %.0f s (%s): %s.",
                count,
                total / (1 << 20),
                now - logged_at,
                reason.value,
                explanation,
            )

    def take(self) -> dict[str, Any]:
        """The counts since the last call, as plain values that msgpack carries.
        `metrics.py` says what each is."""
        with self._lock:
            counts = {
                "tensors": self._tensors,
                "bytes": self._bytes,
                "declined": dict(self._declined),
                "declined_bytes": dict(self._declined_bytes),
                "copy_seconds": list(self._copy_seconds),
            }
            self._reset()
            self.changed = False
        return counts
