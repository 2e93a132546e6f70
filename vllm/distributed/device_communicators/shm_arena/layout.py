# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Where things lie in the arena's segment, and the flags that guard slots."""

import mmap

import numpy as np

from vllm.distributed.device_communicators.shm_broadcast import memory_fence
from vllm.utils.math_utils import cdiv, round_up

_LENGTH_BYTES = 4
# A sentence's worth, for why a reader does not pin.
_NOTE_BYTES = 96


class ArenaLayout:
    """Offsets, in bytes, of the parts of the arena's segment.

    Data first, so that a mapping's first byte is the first slot's and a prefix
    of the mapping can be pinned:

        | slots | state | prepared | attached * n_reader | flags | run lengths |
        | pinned * n_reader | notes |

    `flags` holds `1 + n_reader` bytes a slot, `run lengths` 4, `notes` 96 a
    reader. Every other field is one byte: single-byte stores are atomic on
    every platform, wider ones through a memoryview are not. (A length is
    guarded by its flags, a note by its own first byte.)

    Args:
        n_reader: Readers, all on this node.
        slot_bytes: Bytes a slot is good for.
        n_slots: Slots in the arena.

    Raises:
        ValueError: If an argument is not positive.

    """

    def __init__(self, n_reader: int, slot_bytes: int, n_slots: int):
        for name, value in (
            ("n_reader", n_reader),
            ("slot_bytes", slot_bytes),
            ("n_slots", n_slots),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise ValueError(f"{name} must be a positive int, got {value!r}")
        self.n_reader = n_reader
        self.slot_bytes = slot_bytes
        self.n_slots = n_slots
        # Whole pages, so that taking the pages of one slot never touches
        # another's.
        self.slot_stride = round_up(slot_bytes, mmap.PAGESIZE)
        self.data_bytes = self.slot_stride * n_slots
        self.flags_per_slot = 1 + n_reader
        self.lengths_offset = 2 + n_reader + n_slots * self.flags_per_slot
        self.pinned_offset = self.lengths_offset + n_slots * _LENGTH_BYTES
        self.notes_offset = self.pinned_offset + n_reader
        self.control_bytes = self.notes_offset + n_reader * _NOTE_BYTES
        self.total_bytes = self.data_bytes + self.control_bytes
        # Left to others in /dev/shm. The queue's ring buffer beside the arena
        # (240 MiB by default) takes its pages late and without asking, and
        # would die of SIGBUS where the arena has taken the last one.
        self.reserve_bytes = min(256 << 20, self.data_bytes // 8)

    def slots_for(self, nbytes: int) -> int:
        """Slots in the run that holds `nbytes` bytes."""
        return cdiv(nbytes, self.slot_bytes)

    def offset(self, slot: int) -> int:
        """Byte offset of a slot's data in the segment."""
        return slot * self.slot_stride


class ArenaFlags:
    """The shared control bytes: who may touch what.

    The protocol is the ring buffer's (`ShmRingBuffer`): one writer, `n_reader`
    readers, a written flag and a done flag for each reader. The flags of a
    run's first slot speak for the run.

        0???  free, or being written
        1000  published: readers may view it, the writer must not touch it
        1011  done for some readers
        1111  done for all: the writer may take it back

    Readers only set their own done flag; all other stores are the writer's.

    Args:
        control: The segment's bytes from `ArenaLayout.data_bytes` on.
        layout: The segment's layout.

    """

    # Values of the state byte.
    OPEN = 0  # before the barrier
    IN_USE = 1  # every reader attached
    CLOSED = 2  # some reader could not attach; never used

    def __init__(self, control: memoryview, layout: ArenaLayout):
        self._state = control[0:1]
        self._prepared = control[1:2]
        self._attached = control[2 : 2 + layout.n_reader]
        self._slots = control[2 + layout.n_reader : layout.lengths_offset]
        self._lengths = control[layout.lengths_offset : layout.pinned_offset]
        self._pinned = control[layout.pinned_offset : layout.notes_offset]
        self._notes = control[layout.notes_offset : layout.control_bytes]
        self._stride = layout.flags_per_slot
        # The same bytes as `_slots`, for looking at all of them at once.
        self._table: np.ndarray | None = np.frombuffer(
            self._slots, dtype=np.uint8
        ).reshape(layout.n_slots, self._stride)
        self._just_published = b"\x00" * layout.n_reader

    def release(self) -> None:
        """Let go of the segment, so that it can be closed."""
        self._table = None
        for view in (
            self._state,
            self._prepared,
            self._attached,
            self._slots,
            self._lengths,
            self._pinned,
            self._notes,
        ):
            view.release()

    @property
    def state(self) -> int:
        return self._state[0]

    @state.setter
    def state(self, value: int) -> None:
        self._state[0] = value
        memory_fence()

    @property
    def prepared_steps(self) -> int:
        """How many preparation steps the writer has completed (`PageBacking`)."""
        return self._prepared[0]

    @prepared_steps.setter
    def prepared_steps(self, value: int) -> None:
        memory_fence()
        self._prepared[0] = value

    def attach(self, rank: int) -> None:
        """Reader `rank` has mapped the arena. Called by the reader."""
        self._attached[rank] = 1
        memory_fence()

    def missing_readers(self) -> list[int]:
        """Ranks of the readers that have not attached. Called by the writer."""
        memory_fence()
        return [rank for rank, flag in enumerate(self._attached) if not flag]

    def set_pinned(self, rank: int, steps: int, failure: str | None) -> None:
        """Reader `rank` has pinned the first `steps` preparation steps, and pins
        no more for the reason `failure`, if that is not None. For the writer's
        statistics. Called by the reader."""
        self._pinned[rank] = steps
        note = (failure or "").encode(errors="replace")[: _NOTE_BYTES - 1]
        start = rank * _NOTE_BYTES
        self._notes[start + 1 : start + 1 + len(note)] = note
        memory_fence()
        self._notes[start] = len(note)

    def pinned_steps(self) -> list[int]:
        """How many preparation steps each reader has pinned."""
        return list(self._pinned)

    def pin_failures(self) -> list[str]:
        """Why readers do not pin, each reason once. Empty if all do."""
        notes = []
        for start in range(0, len(self._notes), _NOTE_BYTES):
            length = self._notes[start]
            memory_fence()
            notes.append(bytes(self._notes[start + 1 : start + 1 + length]))
        return [note.decode(errors="replace") for note in dict.fromkeys(notes) if note]

    def publish(self, slot: int, length: int) -> None:
        """Hand a written run of `length` slots to the readers. Called by the
        writer."""
        start = slot * self._stride
        self._lengths[slot * _LENGTH_BYTES : (slot + 1) * _LENGTH_BYTES] = (
            length.to_bytes(_LENGTH_BYTES, "little")
        )
        # Before a done flag is cleared: a reader may still see the written flag
        # of the run that was here before, and would trust what it finds.
        memory_fence()
        self._slots[start + 1 : start + self._stride] = self._just_published
        # Data, length and cleared done flags must be visible before the written
        # flag: a reader that sees the flag trusts all of them.
        memory_fence()
        self._slots[start] = 1
        memory_fence()

    def published_length(self, slot: int, rank: int) -> int:
        """Slots of the run at `slot` that reader `rank` may view; 0 if it may
        view none there."""
        memory_fence()
        start = slot * self._stride
        if self._slots[start] != 1 or self._slots[start + 1 + rank] != 0:
            return 0
        memory_fence()
        return int.from_bytes(
            self._lengths[slot * _LENGTH_BYTES : (slot + 1) * _LENGTH_BYTES], "little"
        )

    def set_done(self, slot: int, rank: int) -> None:
        """Reader `rank` will not touch the run at `slot` again."""
        # The reader's loads from the run must not move below this store.
        memory_fence()
        self._slots[slot * self._stride + 1 + rank] = 1
        memory_fence()

    def done_slots(self) -> list[int]:
        """First slots of all published runs that every reader is done with.
        Called by the writer."""
        assert self._table is not None
        # The second fence pairs with that in `set_done`: a done flag seen here
        # means that the reader's last load from the run is over.
        memory_fence()
        done = np.flatnonzero(self._table.all(axis=1)).tolist()
        memory_fence()
        return done

    def unreleased_by(self, rank: int) -> list[int]:
        """First slots of all published runs that reader `rank` is not done with.
        Called by the writer."""
        assert self._table is not None
        memory_fence()
        published, done = self._table[:, 0], self._table[:, 1 + rank]
        return np.flatnonzero((published != 0) & (done == 0)).tolist()

    def retract(self, slot: int) -> None:
        """Take a run back, published or not. Called by the writer."""
        self._slots[slot * self._stride] = 0
