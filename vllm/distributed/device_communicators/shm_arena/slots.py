# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which slots of the arena are free: the writer's private book."""

import time
from bisect import bisect_left


class SlotBook:
    """Free and live runs of consecutive slots.

    Only the writer keeps one, in its own memory: readers learn a run from the
    message that carries it. First fit from the lowest address keeps the same
    few pages in use, so a server that carries one image at a time stays
    resident with one image.

    Not thread-safe; the arena calls it under its lock.

    Args:
        n_slots: Slots in the arena.

    """

    def __init__(self, n_slots: int):
        # First slot of every live run -> its length in slots.
        self.live: dict[int, int] = {}
        # The same runs, oldest first -> when they were taken.
        self._taken_at: dict[int, float] = {}
        # Slots that are live.
        self.n_live = 0
        # Most slots that were live and had memory at a time.
        self.peak = 0
        # (start, end) of every free run, ascending, never two adjacent ones.
        self._free: list[tuple[int, int]] = [(0, n_slots)]

    def take(self, n: int) -> int | None:
        """Take the lowest free run of `n` slots and return its first slot, or
        None if there is no such run."""
        for i, (start, end) in enumerate(self._free):
            if end - start >= n:
                if end - start == n:
                    del self._free[i]
                else:
                    self._free[i] = (start + n, end)
                self.live[start] = n
                self._taken_at[start] = time.monotonic()
                self.n_live += n
                return start
        return None

    def count_peak(self) -> None:
        """The run that was taken last has got memory."""
        self.peak = max(self.peak, self.n_live)

    def give_back(self, first: int) -> None:
        """Free the live run that starts at slot `first`.

        Raises:
            KeyError: If no live run starts there.

        """
        length = self.live.pop(first)
        del self._taken_at[first]
        self.n_live -= length
        start, end = first, first + length
        i = bisect_left(self._free, (start, end))
        if i < len(self._free) and self._free[i][0] == end:
            end = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, end))

    @property
    def largest_free(self) -> int:
        """Slots of the longest free run."""
        return max((end - start for start, end in self._free), default=0)

    @property
    def oldest_age(self) -> float:
        """Seconds since the oldest live run was taken; 0 if none is live."""
        oldest = next(iter(self._taken_at.values()), None)
        return 0.0 if oldest is None else time.monotonic() - oldest
