# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The flags' protocol, model-checked: one writer reuses one slot, readers wait for
its flags and read it.

The threads' steps are what `ArenaFlags` does: its methods run on memory that
records each load, store and fence, and the checker runs them in every order. In
the *weak* model, as on Arm, stores become visible in any order and loads take
any value that was there since the thread's last fence, or, if nothing depends on
them, that comes before its next; *in order*, as on x86, stores only wait.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest

from vllm.distributed.device_communicators.shm_arena import layout as layout_module
from vllm.distributed.device_communicators.shm_arena.layout import (
    ArenaFlags,
    ArenaLayout,
)

Op = tuple  # ("load", address) | ("store", address, value) | ("fence",) | ...


class Violation(Exception):
    """The protocol let somebody see what it must not."""


class _Next(BaseException):
    """Ends a replay at the first operation that has not happened yet."""

    def __init__(self, op: Op):
        self.op = op


class Mutation(NamedTuple):
    """A change to the operations of one method: without its i-th fence, or with
    its i-th and next store exchanged."""

    method: str
    what: str
    i: int


class Recorder:
    """Replays a thread's past operations and then stops at the next one."""

    def __init__(self, past: tuple, mutation: Mutation | None):
        self._past = past
        self._n_done = 0
        self._mutation = mutation
        self._method = ""
        self._n_fences = 0
        # The operations of a method that is run to see all of them.
        self._all: list[Op] | None = None

    def do(self, *op: Any) -> Any:
        if self._all is not None:
            assert op[0] in ("store", "fence")
            self._all.append(op)
            return None
        if self._n_done == len(self._past):
            raise _Next(op)
        self._n_done += 1
        return self._past[self._n_done - 1]

    def fence(self) -> None:
        i, self._n_fences = self._n_fences, self._n_fences + 1
        if self._mutation != (self._method, "drop fence", i):
            self.do("fence")

    def call(self, method: Callable, *args: Any) -> Any:
        """Run a method of the flags, mutated."""
        self._method, self._n_fences = method.__name__, 0
        if self._mutation is None or self._mutation[:2] != (
            self._method,
            "swap stores",
        ):
            return method(*args)
        self._all = []
        assert method(*args) is None
        ops, self._all = self._all, None
        stores = [at for at, op in enumerate(ops) if op[0] == "store"]
        a, b = stores[self._mutation.i : self._mutation.i + 2]
        ops[a], ops[b] = ops[b], ops[a]
        for op in ops:
            self.do(*op)
        return None


class RecordedBytes:
    """Stands for a memoryview of shared bytes."""

    def __init__(self, recorder: Recorder, name: str):
        self._recorder, self._name = recorder, name

    def __getitem__(self, i: int) -> int:
        return self._recorder.do("load", (self._name, i))

    def __setitem__(self, where: int | slice, value: Any) -> None:
        if isinstance(where, slice):
            for i, byte in zip(range(where.start, where.stop), value, strict=True):
                self._recorder.do("store", (self._name, i), byte)
        else:
            self._recorder.do("store", (self._name, where), value)


class RecordedLength(RecordedBytes):
    """Of one slot. A single cell, for fewer states: its bytes are all guarded in
    the same way."""

    def __getitem__(self, where: Any) -> Any:
        return self._recorder.do("load", ("length", 0))

    def __setitem__(self, where: Any, value: Any) -> None:
        self._recorder.do("store", ("length", 0), value)


class RecordedTable:
    def __init__(self, flags: RecordedBytes, n: int):
        self._flags, self._n = flags, n

    def all(self, axis: int) -> np.ndarray:
        assert axis == 1
        # No short cut: all are loaded.
        values = [self._flags[i] for i in range(self._n)]
        return np.array([all(values)])


def recorded_flags(recorder: Recorder, n_reader: int) -> ArenaFlags:
    shape = ArenaLayout(n_reader, slot_bytes=1, n_slots=1)
    flags = ArenaFlags(memoryview(bytearray(shape.control_bytes)), shape)
    slots: Any = RecordedBytes(recorder, "flag")
    length: Any = RecordedLength(recorder, "length")
    table: Any = RecordedTable(slots, shape.flags_per_slot)
    flags._slots, flags._lengths, flags._table = slots, length, table
    return flags


# ---- The threads --------------------------------------------------------------

# A thread is a list of steps. A step that returns False is begun again.
Step = Callable[[Recorder, ArenaFlags], bool]
DATA = ("data", 0)


def writer_steps(n_messages: int) -> Iterator[Step]:
    for k in range(1, n_messages + 1):

        def wait_for_readers(recorder: Recorder, flags: ArenaFlags) -> bool:
            return recorder.call(flags.done_slots) == [0]

        def write(recorder: Recorder, flags: ArenaFlags, k: int = k) -> bool:
            if k > 1:
                recorder.call(flags.retract, 0)
            recorder.do("store", DATA, k)
            recorder.call(flags.publish, 0, k)
            return True

        if k > 1:
            yield wait_for_readers
        yield write


def reader_steps(n_messages: int, rank: int) -> Iterator[Step]:
    for k in range(1, n_messages + 1):

        def wait_for_message(recorder: Recorder, flags: ArenaFlags, k: int = k) -> bool:
            length = recorder.call(flags.published_length, 0, rank)
            if length not in (0, k):
                raise Violation(f"message {k} has the length of message {length}")
            return length == k

        def read(recorder: Recorder, flags: ArenaFlags, k: int = k) -> bool:
            recorder.do("read data", k)
            recorder.call(flags.set_done, 0, rank)
            return True

        yield wait_for_message
        yield read


# ---- The checker --------------------------------------------------------------


class Thread(NamedTuple):
    step: int = 0
    # What the operations of this step have returned.
    past: tuple = ()
    # Stores that nobody else sees yet: (address, value), oldest first.
    buffer: tuple = ()
    # What else a load may return than what is there: (address, older values).
    older: tuple = ()
    # The message whose data is being read, by loads that are not over.
    reading: int = 0


def check(
    n_reader: int,
    n_messages: int,
    weak: bool,
    mutation: Mutation | None = None,
) -> int:
    """Run every order; return the number of states.

    Raises:
        Violation: If some order breaks the protocol.

    """
    programs = [list(writer_steps(n_messages))]
    programs += [list(reader_steps(n_messages, r)) for r in range(n_reader)]
    loads: list[set] = [{("flag", 1 + r) for r in range(n_reader)}]
    loads += [
        {("flag", 0), ("flag", 1 + r), ("length", 0), DATA} for r in range(n_reader)
    ]

    @cache
    def next_op(i: int, step: int, past: tuple) -> Op:
        recorder = Recorder(past, mutation)
        flags = recorded_flags(recorder, n_reader)
        fence, layout_module.memory_fence = layout_module.memory_fence, recorder.fence
        try:
            return "end", programs[i][step](recorder, flags)
        except _Next as e:
            return e.op
        finally:
            layout_module.memory_fence = fence

    def settle(i: int, t: Thread) -> Thread:
        """Do what no other thread can notice."""
        while t.step < len(programs[i]):
            op = next_op(i, t.step, t.past)
            if op == ("end", True):
                t = t._replace(step=t.step + 1, past=())
            elif op == ("end", False):
                return t._replace(past=())
            elif op[0] == "store":
                t = t._replace(past=(*t.past, None), buffer=(*t.buffer, op[1:]))
            elif op[0] == "read data" and weak:
                t = t._replace(past=(*t.past, None), reading=op[1])
            elif op[0] == "fence" and not t.buffer and not t.reading:
                t = t._replace(past=(*t.past, None), older=())
            else:
                return t
        return t

    def moves(i: int, t: Thread, memory: dict) -> Iterator[Thread]:
        """The thread's next operation, except that a store becomes visible."""
        if t.step == len(programs[i]):
            return
        op = next_op(i, t.step, t.past)
        if op[0] == "fence" and not t.buffer:
            yield t._replace(past=(*t.past, None), older=(), reading=0)
        elif op[0] == "read data":
            if memory.get(DATA, 0) != op[1]:
                raise Violation(f"a reader of message {op[1]} sees {memory}")
            yield t._replace(past=(*t.past, None))
        elif op[0] == "load":
            own = [value for address, value in t.buffer if address == op[1]]
            older = dict(t.older)
            values = own[-1:] or [*older.get(op[1], ()), memory.get(op[1], 0)]
            for at, value in enumerate(values):
                if not own:  # later loads see nothing older
                    older[op[1]] = tuple(values[at:-1])
                yield t._replace(past=(*t.past, value), older=packed(older))

    def packed(older: dict) -> tuple:
        return tuple(sorted((a, values) for a, values in older.items() if values))

    def stores(t: Thread) -> Iterator[tuple[Thread, tuple, Any]]:
        """Each store of the thread that may become visible now."""
        addresses = [address for address, _ in t.buffer]
        for at, (address, value) in enumerate(t.buffer):
            if at == 0 or (weak and address not in addresses[:at]):
                older = dict(t.older)
                older.pop(address, None)
                buffer = t.buffer[:at] + t.buffer[at + 1 :]
                yield t._replace(buffer=buffer, older=packed(older)), address, value

    def overwritten(i: int, t: Thread, address: tuple, value: Any) -> Thread:
        """A thread that may still see what was there until now."""
        if not weak or address not in loads[i]:
            return t
        older = dict(t.older)
        older[address] = (*older.get(address, ()), value)
        return t._replace(older=packed(older))

    def successors(memory: dict, threads: tuple) -> Iterator[tuple[dict, tuple]]:
        for i, t in enumerate(threads):
            for moved in moves(i, t, memory):
                yield memory, (*threads[:i], moved, *threads[i + 1 :])
            for moved, address, value in stores(t):
                before = memory.get(address, 0)
                others = [
                    overwritten(j, o, address, before) for j, o in enumerate(threads)
                ]
                yield (
                    memory | {address: value},
                    (*others[:i], moved, *others[i + 1 :]),
                )

    def settled(threads: tuple) -> tuple:
        return tuple(settle(i, t) for i, t in enumerate(threads))

    start: tuple[dict, tuple] = ({}, settled((Thread(),) * (1 + n_reader)))
    seen = set()
    todo = [start]
    ended = False
    while todo:
        memory, threads = todo.pop()
        key = (tuple(sorted(memory.items())), threads)
        if key in seen:
            continue
        seen.add(key)
        for t in threads:
            if t.reading:
                values = {*dict(t.older).get(DATA, ()), memory.get(DATA, 0)}
                if values != {t.reading}:
                    raise Violation(f"a reader of message {t.reading} sees {values}")
        ended = ended or all(
            t.step == len(program) for t, program in zip(threads, programs)
        )
        todo += [(m, settled(ts)) for m, ts in successors(memory, threads)]
    assert ended, "no order comes to an end"
    return len(seen)


@pytest.mark.parametrize("weak", [False, True], ids=["in order", "weak"])
@pytest.mark.parametrize(("n_reader", "n_messages"), [(2, 3), (3, 2)])
def test_protocol_holds_in_every_order(n_reader: int, n_messages: int, weak: bool):
    assert check(n_reader, n_messages, weak) > 100


@pytest.mark.parametrize(
    "mutation",
    [
        # Data and length before a done flag is cleared.
        Mutation("publish", "drop fence", 0),
        # Cleared done flags before the written flag.
        Mutation("publish", "drop fence", 1),
        # Loads of the data before the done flag.
        Mutation("set_done", "drop fence", 0),
        # The flags before the length and the data.
        Mutation("published_length", "drop fence", 1),
        # The length after the first done flag is cleared.
        Mutation("publish", "swap stores", 0),
        # The last done flag cleared after the written flag is set.
        Mutation("publish", "swap stores", 2),
    ],
    ids=str,
)
def test_mutation_is_caught(mutation: Mutation):
    with pytest.raises(Violation):
        check(2, 2, weak=True, mutation=mutation)


@pytest.mark.parametrize(
    "mutation",
    [
        # They make a store seen, or a load fresh, sooner.
        Mutation("publish", "drop fence", 2),
        Mutation("set_done", "drop fence", 1),
        Mutation("published_length", "drop fence", 0),
        Mutation("done_slots", "drop fence", 0),
        # The writer's stores depend on what it has loaded here, and no machine
        # makes a store visible that may not happen.
        Mutation("done_slots", "drop fence", 1),
        # Two done flags are cleared, in either order.
        Mutation("publish", "swap stores", 1),
    ],
    ids=str,
)
def test_mutation_is_harmless(mutation: Mutation):
    """So that the list above is known to be all."""
    check(2, 2, weak=True, mutation=mutation)
