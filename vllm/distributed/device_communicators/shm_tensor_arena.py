# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A shared-memory arena for the large CPU tensors of a `MessageQueue`.

The writer (EngineCore) copies a large tensor once into a run of slots and
sends a stub in its place; every reader (a worker on this node) builds a tensor
over the same memory. Whatever the arena declines is pickled as if there were
no arena. See docs/design/shm_tensor_arena.md.
"""

import copyreg
import functools
import math
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from typing import IO, Any

import numpy as np
import torch

from vllm.distributed.device_communicators.shm_arena.backing import (
    PREPARE_STEP_BYTES,
    PageBacking,
)
from vllm.distributed.device_communicators.shm_arena.copy_pool import CopyPool
from vllm.distributed.device_communicators.shm_arena.layout import (
    ArenaFlags,
    ArenaLayout,
)
from vllm.distributed.device_communicators.shm_arena.pinning import PinnedPrefixes
from vllm.distributed.device_communicators.shm_arena.releases import SlotReleases
from vllm.distributed.device_communicators.shm_arena.segment import (
    ArenaSegment,
    MappedBytes,
)
from vllm.distributed.device_communicators.shm_arena.slots import SlotBook
from vllm.distributed.device_communicators.shm_arena.stats import (
    ArenaStats,
    DeclineReason,
)
from vllm.distributed.device_communicators.shm_broadcast import _reduce_tensor
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv

logger = init_logger(__name__)

# Smaller tensors are cheap on the out-of-band path: below about 8 MiB one copy
# for each reader costs less than the arena's bookkeeping can win.
_MIN_TENSOR_BYTES = 8 << 20
# 2 GiB, sparse until used. A tensor takes a run of consecutive slots, so small
# slots waste little: at most one for each tensor of 8 MiB and more.
_SLOT_BYTES = 2 << 20
_N_SLOTS = 1024
# While a reader that waits for a message has views out, it looks this often
# whether they are gone. A finalizer may not wake it (it may do nothing but
# append to a deque), and the writer wants slots back within 100 ms: one look
# sees that a tensor is gone, the next that the device is done with it. With
# VLLM_USE_SPINLOOP_EXT each look comes up to 100 ms later.
_RELEASE_POLL_MS = 25
# While slots are held and nothing is diverted, stats are made this often and not
# for every step of decoding: looking at all slots takes some 40 us.
_GAUGES_INTERVAL_S = 0.1

# Arenas that this process reads, by segment name. Weak: an arena lives as long
# as its queue.
_TENSOR_ARENAS: weakref.WeakValueDictionary[str, "ShmTensorArena"] = (
    weakref.WeakValueDictionary()
)
# `.arena` refers weakly to the arena whose queue this thread dequeues from:
# several readers of one arena may share a process, so its name is not enough.
_dequeuing = threading.local()


class ShmTensorArena:
    """Slots in shared memory, written by one process and read by others.

    The writer creates it with its queue; each reader opens it by `handle()`.
    Tensors go through it only after every reader has opened it. Its pages are
    taken when they are needed, not when it is created.

    Args:
        n_reader: Readers, all on this node.
        slot_bytes: Bytes a slot is good for.
        n_slots: Slots in the arena.
        name: None creates the arena (writer); else the name to open (reader).
        reader_rank: The reader's index in [0, n_reader); -1 for the writer.

    Raises:
        ValueError: If an argument is out of range, or the segment found is not
            an arena with these arguments.
        RuntimeError: If /dev/shm has no room for it, or this is not Linux.
        FileNotFoundError: If there is no arena of that name on this node.

    """

    def __init__(
        self,
        n_reader: int,
        slot_bytes: int = _SLOT_BYTES,
        n_slots: int = _N_SLOTS,
        name: str | None = None,
        reader_rank: int = -1,
    ):
        layout = ArenaLayout(n_reader, slot_bytes, n_slots)
        if name is not None and not isinstance(name, str):
            raise ValueError(f"name must be a str, got {name!r}")
        if name is None and reader_rank != -1:
            raise ValueError("the arena's creator writes: its reader_rank must be -1")
        if name is not None and not 0 <= reader_rank < n_reader:
            raise ValueError(f"reader_rank {reader_rank} is not in [0, {n_reader})")
        self._layout = layout
        self._reader_rank = reader_rank
        segment = ArenaSegment(layout.total_bytes, layout.reserve_bytes, name)
        self.shared_memory = segment.shared_memory
        self._segment = segment
        assert self.shared_memory.buf is not None
        self._flags = ArenaFlags(
            self.shared_memory.buf[layout.data_bytes : layout.total_bytes], layout
        )
        # What must end before the segment is closed.
        before_close: list[Callable[[], None]] = [self._flags.release]
        # At exit only the name has to go: closing would take the flags from a
        # daemon thread that is still in `dequeue`.
        weakref.finalize(self, _close, before_close, segment).atexit = False
        weakref.finalize(self, segment.unlink)
        if name is None:
            self._init_writer()
            before_close.insert(0, self._backing.stop)
        else:
            self._init_reader()

    def _init_writer(self) -> None:
        layout, flags = self._layout, self._flags
        # The control bytes are touched by everybody and without a check.
        if not self._segment.take_pages(layout.data_bytes, layout.control_bytes):
            raise RuntimeError(
                "Insufficient space in /dev/shm for the tensor arena of "
                "--enable-shm-tensor-arena. Increase it (e.g. --shm-size)."
            )
        mapped = MappedBytes(self._segment.map(layout.data_bytes))
        self._address = mapped.address
        self._pool = CopyPool()

        def publish_steps(steps: int) -> None:
            flags.prepared_steps = steps

        self._backing = PageBacking(
            self._segment, layout, mapped, self._pool, publish_steps
        )
        self._book = SlotBook(self._layout.n_slots)
        self._stats = ArenaStats()
        self._gauges_due = 0.0
        self._all_attached = False
        # Guards the book: several threads may enqueue.
        self._lock = threading.Lock()
        # Thread -> what the message that it pickles has taken. Empty between
        # messages, so that one without large tensors costs a look.
        self.uncommitted: dict[int, list[int]] = {}
        # Makes a pickler divert large tensors when it is in its dispatch table,
        # which is asked for exact types only: a `reducer_override` would be
        # called for every object of a message and cost 2 % to 9 % on one
        # without large tensors. Weak: in a cycle the segment would live until
        # the next collection.
        this = weakref.proxy(self)
        self.reducers: dict[type, Callable] = {
            torch.Tensor: functools.partial(_reduce_or_divert, this),
            torch.nn.Parameter: functools.partial(_reduce_parameter_or_divert, this),
        }

    def _init_reader(self) -> None:
        flags, rank = self._flags, self._reader_rank
        self._releases = SlotReleases(lambda slot: flags.set_done(slot, rank))
        # Read-only: all readers see the same bytes, and an operation in place
        # by one would change what the others compute. Native code knows no other
        # way to stop it than to die. (The flags have a mapping of their own.)
        self._mapped = MappedBytes(
            self._segment.map(self._layout.data_bytes, read_only=True)
        )
        self._prefixes = PinnedPrefixes(self._segment, self._layout.data_bytes)
        self._pinned_steps = 0
        # How much of what is prepared and not pinned has been touched.
        self._populated_bytes = 0
        _TENSOR_ARENAS[self.shared_memory.name] = self
        self._flags.attach(self._reader_rank)

    @classmethod
    def attach(
        cls, handle: tuple[int, int, int, str], reader_rank: int
    ) -> "ShmTensorArena | None":
        """Open the writer's arena, or log why it cannot be opened and return
        None: the writer then sends nothing through it. Called by the reader,
        before it subscribes to the queue."""
        try:
            n_reader, slot_bytes, n_slots, name = handle
            return cls(n_reader, slot_bytes, n_slots, name, reader_rank)
        except (OSError, RuntimeError, TypeError, ValueError) as e:
            logger.warning(
                "Reader %d could not open the shm tensor arena: %s", reader_rank, e
            )
            return None

    def handle(self) -> tuple[int, int, int, str]:
        """What a reader needs besides its rank: the constructor's first three
        arguments and the segment's name."""
        layout = self._layout
        return layout.n_reader, layout.slot_bytes, layout.n_slots, self._segment.name

    def on_barrier(self) -> None:
        """Called by both sides in `MessageQueue.wait_until_ready`: by the writer
        when every reader has subscribed, which each does after trying to open
        the arena; by a reader when the writer has answered that."""
        if self._reader_rank >= 0:
            if self._flags.state == ArenaFlags.IN_USE:
                self._pin_prepared()
            return
        # Nobody else will open it: without a name nothing can outlive us.
        self._segment.unlink()
        missing = self._flags.missing_readers()
        if missing:
            self._flags.state = ArenaFlags.CLOSED
            logger.warning(
                "Readers %s could not open the shm tensor arena; large tensors "
                "take the out-of-band path, as without --enable-shm-tensor-arena. "
                "Engine and workers must see the same /dev/shm; each worker has "
                "logged what was wrong.",
                missing,
            )
            return
        self._all_attached = True
        # Before the readers go on: they are about to pin these pages, which is
        # several times slower if it has to take them.
        self._backing.prepare_first_step()
        self._flags.state = ArenaFlags.IN_USE

    # ---- Writer -------------------------------------------------------------

    def write_tensor(self, t: torch.Tensor) -> int | None:
        """Copy a tensor into the arena. Never waits for a reader.

        Args:
            t: Any tensor. Of any shape and dtype if it is a dense, contiguous
                CPU tensor without gradient; others are declined.

        Returns:
            The first slot of the run that holds it, or None if it was declined:
            not of a kind that can be sent as its bytes, no room, no space in
            /dev/shm, or not every reader attached.

        Raises:
            ValueError: If this is a reader's.

        """
        if self._reader_rank >= 0:
            raise ValueError("only the writer writes to the arena")
        raw = _raw_bytes(t)
        if raw is None:
            self._decline(t.numel() * t.element_size(), DeclineReason.NOT_ELIGIBLE)
            return None
        nbytes = raw.numel()
        if not self._readers_attached():
            self._decline(nbytes, DeclineReason.NOT_ATTACHED)
            return None
        n = self._layout.slots_for(nbytes)
        with self._lock:
            self._free(self._flags.done_slots())
            slot = self._book.take(n)
        if slot is None:
            too_large = n > self._layout.n_slots
            self._decline(
                nbytes, DeclineReason.TOO_LARGE if too_large else DeclineReason.NO_ROOM
            )
            return None
        started = time.perf_counter()
        try:
            backed = self._backing.take(slot, n)
            if backed:
                address = self._address + self._layout.offset(slot)
                self._pool.copy(address, raw.data_ptr(), nbytes)
                self._stats.on_divert(nbytes, time.perf_counter() - started)
                with self._lock:
                    self._book.count_peak()
                self._flags.publish(slot, n)
                logger.debug("Diverted %d bytes to slot %d", nbytes, slot)
                self._backing.prepare_ahead(slot + n, self._book.peak)
        except BaseException:
            self.give_back([slot])
            raise
        if not backed:
            self.give_back([slot])
            self._decline(nbytes, DeclineReason.NO_SPACE)
            return None
        return slot

    def _decline(self, nbytes: int, reason: DeclineReason) -> None:
        self._stats.on_decline(
            nbytes,
            reason,
            self._describe_holders if reason is DeclineReason.NO_ROOM else None,
        )
        logger.debug("Declined %d bytes: %s", nbytes, reason.value)

    def _describe_holders(self) -> str:
        # A reader that is stuck holds more than the others, a burst is held by
        # all alike.
        with self._lock:
            live = self._book.live
            held = [
                sum(live[slot] for slot in self._flags.unreleased_by(rank))
                * self._layout.slot_bytes
                for rank in range(self._layout.n_reader)
            ]
        return f"; the workers hold {[n >> 20 for n in held]} MiB"

    def _readers_attached(self) -> bool:
        if not self._all_attached:
            self._all_attached = (
                self._flags.state != ArenaFlags.CLOSED
                and not self._flags.missing_readers()
            )
        return self._all_attached

    def _free(self, slots: list[int]) -> None:
        for slot in slots:
            self._flags.retract(slot)
            self._book.give_back(slot)

    def give_back(self, slots: list[int]) -> None:
        """Free what was written and is not going to be sent."""
        with self._lock:
            self._free(slots)

    def divert(self, t: torch.Tensor) -> int | None:
        """As `write_tensor`, for the message that this thread pickles: until
        `commit` the slots can be had back by `rollback`. Called by `reducers`."""
        slot = self.write_tensor(t)
        if slot is not None:
            self.uncommitted.setdefault(threading.get_ident(), []).append(slot)
        return slot

    def commit(self) -> None:
        """Called by `MessageQueue.enqueue` when the message is out: its slots are
        the readers' from here on, also if the rest of `enqueue` fails.

        Needed only while `uncommitted` is not empty.
        """
        self.uncommitted.pop(threading.get_ident(), None)

    def rollback(self) -> None:
        """Called by `MessageQueue.enqueue` when it fails: what the message has
        taken and not committed is free again."""
        self.give_back(self.uncommitted.pop(threading.get_ident(), []))

    def set_aside(self) -> list[int]:
        """Called by `MessageQueue.enqueue` when it is called while this thread
        pickles another message, by an object in it. What that one has taken is
        neither committed nor rolled back until `take_up`."""
        return self.uncommitted.pop(threading.get_ident(), [])

    def take_up(self, slots: list[int]) -> None:
        """Called by `MessageQueue.enqueue` with what it has set aside."""
        self.uncommitted[threading.get_ident()] = slots

    @property
    def has_news(self) -> bool:
        """Whether `take_stats` has something to tell, or will have: counts that
        nobody has taken, or slots that were in use when that was last looked at."""
        return self._stats.changed or bool(self._book.live)

    def take_stats(self) -> dict[str, Any] | None:
        """Counts since the last call and gauges of now, as plain values, or None
        if there is nothing new. Called by EngineCore for each `SchedulerStats`,
        so it costs two tests where nothing is diverted. `shm_arena/metrics.py`
        says what each value is.
        """
        if not self._stats.changed and (
            not self._book.live or time.monotonic() < self._gauges_due
        ):
            return None
        self._gauges_due = time.monotonic() + _GAUGES_INTERVAL_S
        layout, book, flags = self._layout, self._book, self._flags
        with self._lock:
            self._free(flags.done_slots())
            stats: dict[str, Any] = {
                "slots_in_use": book.n_live,
                "bytes_in_use": book.n_live * layout.slot_bytes,
                "peak_bytes": book.peak * layout.slot_bytes,
                "largest_free_bytes": book.largest_free * layout.slot_bytes,
                "oldest_slot_age_seconds": book.oldest_age,
            }
        missing = set(flags.missing_readers())
        stats |= {
            "capacity_bytes": layout.n_slots * layout.slot_bytes,
            "prepared_bytes": self._step_bytes(flags.prepared_steps),
            "reader_attached": [
                int(rank not in missing) for rank in range(layout.n_reader)
            ],
            "reader_pinned_bytes": [
                self._step_bytes(steps) for steps in flags.pinned_steps()
            ],
        }
        return stats | self._stats.take()

    def log_start(self) -> None:
        """Say what there is. Called by the executor when its workers are ready:
        they have pinned the first step by then."""
        layout, flags = self._layout, self._flags
        if flags.state != ArenaFlags.IN_USE:
            return  # `on_barrier` has warned
        pinned = [self._step_bytes(steps) for steps in flags.pinned_steps()]
        failures = flags.pin_failures()
        logger.info(
            "Shm tensor arena: %d MiB for %d workers, %d MiB prepared, %d MiB pinned "
            "by %d of them%s",
            layout.data_bytes >> 20,
            layout.n_reader,
            self._step_bytes(flags.prepared_steps) >> 20,
            max(pinned) >> 20,
            sum(nbytes > 0 for nbytes in pinned),
            f" ({'; '.join(failures)})" if failures else "",
        )

    def _step_bytes(self, steps: int) -> int:
        return min(steps * PREPARE_STEP_BYTES, self._layout.data_bytes)

    # ---- Reader -------------------------------------------------------------

    def get_tensor(
        self, idx: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """A tensor over a run that the writer has published: no copy. It is to
        be read only: an operation in place ends the process (SIGSEGV).

        The run is released when the storage of the tensor is freed, that is
        when the tensor and all views of it are gone.

        Args:
            idx: First slot of the run.
            nbytes: Bytes of the tensor.
            dtype: Its dtype.
            shape: Its shape; `dtype.itemsize` times its elements is `nbytes`.

        Raises:
            ValueError: If the arguments contradict each other or the arena, or
                the run is not published for this reader.

        """
        self._check_stub(idx, nbytes, dtype, shape)
        start = self._layout.offset(idx)
        pinned = self._prefixes.mapping_for(start + nbytes)
        mapped = self._mapped if pinned is None else pinned
        owner = np.frombuffer(mapped.buffer, np.uint8, count=nbytes, offset=start)
        # `from_numpy` makes a storage that holds the only reference to `owner`
        # once we return.
        tensor = torch.from_numpy(owner).view(dtype).view(shape)
        self._releases.watch(owner, idx, pinned is not None)
        return tensor

    def _check_stub(
        self, idx: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        if self._reader_rank < 0:
            raise ValueError("only readers build tensors over the arena")
        for field, value in (("slot", idx), ("nbytes", nbytes)):
            if type(value) is not int:
                raise ValueError(f"arena stub: {field} is {value!r}, not an int")
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"arena stub: {dtype!r} is not a dtype")
        if type(shape) is not tuple or any(
            type(size) is not int or size < 0 for size in shape
        ):
            raise ValueError(f"arena stub: {shape!r} is not a shape")
        if math.prod(shape) * dtype.itemsize != nbytes:
            raise ValueError(
                f"arena stub: shape {shape} of {dtype} does not have {nbytes} bytes"
            )
        n = self._layout.slots_for(nbytes)
        if n <= 0 or not 0 <= idx <= self._layout.n_slots - n:
            raise ValueError(
                f"arena stub: {nbytes} bytes from slot {idx} do not fit "
                f"{self._layout.n_slots} slots of {self._layout.slot_bytes} bytes"
            )
        length = self._flags.published_length(idx, self._reader_rank)
        if length == 0:
            raise ValueError(f"arena stub: slot {idx} is not published to this reader")
        if length != n:
            raise ValueError(
                f"arena stub: {nbytes} bytes take {n} slots, but the run at slot "
                f"{idx} has {length}"
            )

    def flush_releases(self) -> None:
        """Tell the writer which slots this reader is done with. Called on the
        thread that dequeues. Nothing to do for the writer's."""
        if self._reader_rank >= 0:
            self._releases.flush()

    def before_dequeue(self) -> None:
        """Called by `MessageQueue.dequeue`: stubs that this thread loads from
        now on are this arena's."""
        _dequeuing.arena = weakref.ref(self)
        self.flush_releases()

    def while_waiting(self, timeout_ms: int | None) -> int | None:
        """Called whenever the reader finds no message and is about to wait.

        Args:
            timeout_ms: How long it is going to wait; None is forever.

        Returns:
            How long it may wait, in ms: shorter while slots are in use, since
            nothing else would notice that they no longer are.

        """
        self._releases.flush(spinning=True)
        self._pin_prepared()
        if not self._releases.outstanding:
            return timeout_ms
        return (
            _RELEASE_POLL_MS
            if timeout_ms is None
            else min(timeout_ms, _RELEASE_POLL_MS)
        )

    def _pin_prepared(self) -> None:
        steps = self._flags.prepared_steps
        if steps == self._pinned_steps:
            return
        prepared = self._step_bytes(steps)
        if not self._prefixes.pin_to(prepared):
            return
        self._pinned_steps = steps
        self._flags.set_pinned(
            self._reader_rank,
            cdiv(self._prefixes.pinned_bytes, PREPARE_STEP_BYTES),
            self._prefixes.failure,
        )
        if self._prefixes.pinned_bytes < prepared:
            # Pinning would have mapped the pages.
            new = prepared - self._populated_bytes
            self._mapped.populate(self._populated_bytes, new, write=False)
            self._populated_bytes = prepared


def _close(before: list[Callable[[], None]], segment: ArenaSegment) -> None:
    for end in before:
        end()
    segment.close()


def _raw_bytes(t: torch.Tensor) -> torch.Tensor | None:
    """The bytes of a tensor as a flat uint8 tensor over the same memory, or None
    if it is not fully described by its bytes, dtype and shape.

    What is copied from its pointer bypasses torch's checks, so anything that
    torch resolves lazily, or keeps elsewhere, must be declined here.
    """
    if (
        type(t) not in _ARENA_REBUILD_FNS
        or t.device.type != "cpu"
        or t.layout is not torch.strided
        or t.requires_grad
        or t.is_nested
        or t.is_quantized
        or t.is_conj()
        or t.is_neg()
        or t._is_zerotensor()
        or not t.is_contiguous()
        or torch._C._functorch.is_functorch_wrapped_tensor(t)
    ):
        return None
    try:
        raw = t.view(-1).view(torch.uint8)
    except RuntimeError:
        return None
    # A storage that was resized away under its tensor has less.
    in_storage = t.untyped_storage().nbytes() - raw.storage_offset()
    if raw.numel() == 0 or raw.numel() > in_storage or raw.data_ptr() == 0:
        return None
    return raw


class _ArenaPickler(pickle.Pickler):
    """Pickles one message as a queue with an arena does.

    For code that has no queue, such as tests: a queue adds the same reducers to
    a pickler of its own.

    Args:
        file: Where the pickle goes.
        arena: The writer's arena.
        buffer_callback: As `pickle.Pickler`'s, for what is not diverted.

    """

    def __init__(
        self,
        file: IO[bytes],
        arena: ShmTensorArena,
        buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None,
    ):
        super().__init__(
            file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=buffer_callback
        )
        self.dispatch_table = dict(copyreg.dispatch_table)
        self.dispatch_table.update(arena.reducers)
        self._arena = arena

    def dump(self, obj: Any) -> None:
        """Pickle a message. If that fails, the slots it took are free again."""
        try:
            super().dump(obj)
        except BaseException:
            self._arena.rollback()
            raise
        self._arena.commit()


def _reduce_or_divert(arena: ShmTensorArena, t: torch.Tensor) -> tuple:
    return _divert(arena, t) or _reduce_tensor(t)


def _reduce_parameter_or_divert(arena: ShmTensorArena, p: torch.nn.Parameter) -> tuple:
    # What a stub would lose (attributes such as a weight loader, requires_grad) is
    # kept by torch's own reduction, which hands the data to this pickler again, as
    # a plain tensor.
    has_stub = not p.__dict__ and not p.requires_grad and p.is_contiguous()
    stub = _divert(arena, p) if has_stub else None
    return stub or p.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


def _divert(arena: ShmTensorArena, t: torch.Tensor) -> tuple | None:
    # Others have no bytes of that number, and would be counted with them.
    if t.layout is not torch.strided or t.device.type != "cpu":
        return None
    if t.numel() * t.element_size() < _MIN_TENSOR_BYTES:
        return None
    slot = arena.divert(t)
    if slot is None:
        return None
    return _ARENA_REBUILD_FNS[type(t)], (
        arena.shared_memory.name,
        slot,
        t.numel() * t.element_size(),
        str(t.dtype).removeprefix("torch."),
        tuple(t.shape),
    )


def _rebuild_arena_tensor(
    arena_name: str, slot_idx: int, nbytes: int, dtype_str: str, shape: tuple[int, ...]
) -> torch.Tensor:
    """Build the tensor that a stub stands for. Called by pickle in a reader.

    Raises:
        KeyError: If this process does not read an arena of that name.
        ValueError: If the stub does not fit the arena; see `get_tensor`.

    """
    if not isinstance(arena_name, str):
        raise ValueError(f"arena stub: {arena_name!r} is not a name")
    arena = getattr(_dequeuing, "arena", lambda: None)()
    if arena is None or arena.shared_memory.name != arena_name:
        arena = _TENSOR_ARENAS.get(arena_name)
    if arena is None:
        raise KeyError(f"arena stub: no shm tensor arena {arena_name!r} is open here")
    dtype = getattr(torch, dtype_str, None) if isinstance(dtype_str, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"arena stub: {dtype_str!r} is not a dtype")
    return arena.get_tensor(slot_idx, nbytes, dtype, shape)


def _rebuild_arena_parameter(
    arena_name: str, slot_idx: int, nbytes: int, dtype_str: str, shape: tuple[int, ...]
) -> torch.nn.Parameter:
    """As `_rebuild_arena_tensor`, as a Parameter over the same storage."""
    return torch.nn.Parameter(
        _rebuild_arena_tensor(arena_name, slot_idx, nbytes, dtype_str, shape),
        requires_grad=False,
    )


# The types that are diverted, exactly: a subclass would come back as its base.
_ARENA_REBUILD_FNS: dict[type, Callable[..., torch.Tensor]] = {
    torch.Tensor: _rebuild_arena_tensor,
    torch.nn.Parameter: _rebuild_arena_parameter,
}
