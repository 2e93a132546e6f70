# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The arena against a plain model: random messages, failures, reads and drops in
any order, two readers."""

from collections import deque
from dataclasses import dataclass, field
from unittest import mock

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.distributed.arena_testing import bytes_of, make_arenas, patterned
from vllm.distributed.device_communicators.shm_arena.segment import ArenaSegment

N_READER = 2
N_SLOTS = 8
SLOT_BYTES = 4096


@dataclass(eq=False)
class Run:
    """A tensor in the arena, as the model knows it."""

    slot: int
    n: int
    expected: bytes
    # Readers that have not told that they are done.
    holders: set[int] = field(default_factory=lambda: set(range(N_READER)))


@dataclass(eq=False)
class View:
    run: Run
    tensor: torch.Tensor
    start: int  # bytes of the run before it


class ArenaMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.writer, self.readers = make_arenas(N_READER, SLOT_BYTES, N_SLOTS)
        # What the writer takes for live, and which slots have pages.
        self.runs: list[Run] = []
        self.backed: set[int] = set()
        self.full = False
        self.no_space = mock.patch.object(
            ArenaSegment, "take_pages", lambda *_: not self.full
        )
        self.no_space.start()
        # Of each reader: messages that it has not read, views that it holds.
        self.inbox: list[deque[list[Run]]] = [deque() for _ in range(N_READER)]
        self.held: list[list[View]] = [[] for _ in range(N_READER)]
        self.n_written = 0
        self.message: list[Run] | None = None

    # ---- The writer

    def lowest_fit(self, n: int) -> int | None:
        taken = {
            slot for run in self.runs for slot in range(run.slot, run.slot + run.n)
        }
        for slot in range(N_SLOTS - n + 1):
            if taken.isdisjoint(range(slot, slot + n)):
                return slot
        return None

    @precondition(lambda self: self.message is None)
    @rule()
    def begin(self) -> None:
        self.message = []

    @precondition(lambda self: self.message is not None)
    @rule(nbytes=st.integers(1, N_SLOTS * SLOT_BYTES + 1), breaks=st.integers(0, 7))
    def write(self, nbytes: int, breaks: int) -> None:
        """Into the lowest run that is free, or nowhere; 1 in 8 copies fails."""
        assert self.message is not None
        self.n_written += 1
        sent = patterned(nbytes, self.n_written)
        n = -(-nbytes // SLOT_BYTES)
        self.runs = [run for run in self.runs if run.holders]
        expected = self.lowest_fit(n) if n <= N_SLOTS else None
        new = {} if expected is None else set(range(expected, expected + n))
        if not self.backed.issuperset(new) and self.full:
            expected = None
        if breaks == 0 and expected is not None:
            with mock.patch("ctypes.memmove", side_effect=MemoryError):
                try:
                    self.writer.divert(sent)
                except MemoryError:
                    self.backed |= new
                    return
            raise AssertionError("a failed copy went unnoticed")
        slot = self.writer.divert(sent)
        assert slot == expected
        if slot is not None:
            self.backed |= new
            run = Run(slot, n, bytes_of(sent))
            self.runs.append(run)
            self.message.append(run)
        sent.fill_(0xEE)  # what was sent must not follow

    @precondition(lambda self: self.message is not None)
    @rule()
    def send(self) -> None:
        assert self.message is not None
        self.writer.commit()
        for inbox in self.inbox:
            inbox.append(self.message)
        self.message = None

    @precondition(lambda self: self.message is not None)
    @rule()
    def fail(self) -> None:
        assert self.message is not None
        self.writer.rollback()
        self.runs = [run for run in self.runs if run not in self.message]
        self.message = None

    @rule(full=st.booleans())
    def fill_dev_shm(self, full: bool) -> None:
        """Somebody else takes all space, or gives it back."""
        self.full = full

    # ---- The readers

    @precondition(lambda self: any(self.inbox))
    @rule(reader=st.integers(0, N_READER - 1))
    def receive(self, reader: int) -> None:
        if not self.inbox[reader]:
            return
        arena = self.readers[reader]
        arena.before_dequeue()
        self.note_releases(reader)
        for run in self.inbox[reader].popleft():
            nbytes = len(run.expected)
            t = arena.get_tensor(run.slot, nbytes, torch.uint8, (nbytes,))
            self.held[reader].append(View(run, t, 0))

    @rule(reader=st.integers(0, N_READER - 1), i=st.integers(0), start=st.integers(0))
    def keep_a_slice(self, reader: int, i: int, start: int) -> None:
        if self.held[reader]:
            view = self.held[reader][i % len(self.held[reader])]
            start %= view.tensor.numel() + 1
            self.held[reader].append(
                View(view.run, view.tensor[start:], view.start + start)
            )

    @rule(reader=st.integers(0, N_READER - 1), i=st.integers(0))
    def drop(self, reader: int, i: int) -> None:
        if self.held[reader]:
            del self.held[reader][i % len(self.held[reader])]

    @rule(reader=st.integers(0, N_READER - 1))
    def park(self, reader: int) -> None:
        """As in `dequeue`, with no message there."""
        self.readers[reader].flush_releases()
        self.note_releases(reader)
        holds = bool(self.held[reader])
        assert (self.readers[reader].while_waiting(5000) == 25) == holds

    def note_releases(self, reader: int) -> None:
        viewed = {view.run for view in self.held[reader]}
        unread = {run for message in self.inbox[reader] for run in message}
        for run in self.runs:
            if run not in viewed | unread and run not in (self.message or []):
                run.holders.discard(reader)

    # ---- What always holds

    @invariant()
    def views_hold_what_was_sent(self) -> None:
        for views in getattr(self, "held", []):
            for view in views:
                assert bytes_of(view.tensor) == view.run.expected[view.start :]

    def teardown(self) -> None:
        if not hasattr(self, "no_space"):
            return
        try:
            self.finish()
        finally:
            self.no_space.stop()

    def finish(self) -> None:
        if self.message is not None:
            self.fail()
        for reader in range(N_READER):
            while self.inbox[reader]:
                self.receive(reader)
            self.held[reader].clear()
            self.park(reader)
        self.full = False
        # Nothing is lost: all of it fits again.
        assert self.writer.write_tensor(patterned(N_SLOTS * SLOT_BYTES)) == 0


ArenaMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, derandomize=True
)
TestArena = ArenaMachine.TestCase
