# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The arena without a queue: writer and readers in one process."""

import errno
import gc
import os
import stat
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.distributed.arena_testing import (
    MIB,
    bytes_of,
    dumps,
    free_slots,
    in_dev_shm,
    is_in_shared_memory,
    is_writable,
    loads,
    make_arenas,
    patterned,
)
from vllm.distributed.device_communicators.shm_arena import pinning, segment
from vllm.distributed.device_communicators.shm_tensor_arena import (
    ShmTensorArena,
    _rebuild_arena_parameter,
    _rebuild_arena_tensor,
)

# Divert everything: the threshold has a test of its own.
THRESHOLD = "vllm.distributed.device_communicators.shm_tensor_arena._MIN_TENSOR_BYTES"


@pytest.fixture(autouse=True)
def no_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(THRESHOLD, 1)


ROOT = Path(__file__).parents[2]


def all_dtypes() -> list[torch.dtype]:
    """Every dtype that a tensor of bytes can be viewed as."""
    found = []
    for value in vars(torch).values():
        if not isinstance(value, torch.dtype) or value in found:
            continue
        try:
            view = torch.zeros(16, dtype=torch.uint8).view(value)
        except (RuntimeError, TypeError):
            continue
        if not view.is_quantized:
            found.append(value)
    return sorted(found, key=str)


def test_all_dtypes_covers_the_usual_ones():
    usual = {
        torch.bool,
        torch.uint8,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
    assert usual <= set(all_dtypes())
    assert {dtype.itemsize for dtype in all_dtypes()} == {1, 2, 4, 8, 16}


@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_round_trip_is_byte_exact(dtype: torch.dtype):
    writer, (reader,) = make_arenas()
    sent = patterned(16 * 15).view(dtype).view(3, 5, -1)
    message = dumps(writer, sent)
    assert not message[1], "not diverted"
    got = loads(reader, message)
    assert isinstance(got, torch.Tensor)
    assert got.dtype == dtype and got.shape == sent.shape
    assert bytes_of(got) == bytes_of(sent)


@pytest.mark.parametrize("shape", [(), (1,), (7, 1, 3)])
def test_round_trip_keeps_the_shape(shape: tuple[int, ...]):
    writer, (reader,) = make_arenas()
    sent = torch.rand(shape)
    got = loads(reader, dumps(writer, sent))
    assert isinstance(got, torch.Tensor) and torch.equal(got, sent)
    assert got.shape == shape


def test_slice_that_starts_inside_its_storage():
    writer, (reader,) = make_arenas()
    sent = torch.arange(1000.0)[100:900]
    message = dumps(writer, sent)
    assert not message[1]
    assert torch.equal(loads(reader, message), sent)


def test_reader_tensor_is_the_shared_memory():
    writer, (reader,) = make_arenas()
    got = loads(reader, dumps(writer, patterned(MIB)))
    assert is_in_shared_memory(got, writer.shared_memory.name)
    assert not is_in_shared_memory(got.clone(), writer.shared_memory.name)


def test_parameter_comes_back_as_parameter_over_the_same_storage():
    writer, (reader,) = make_arenas()
    sent = torch.nn.Parameter(torch.rand(64), requires_grad=False)
    got = loads(reader, dumps(writer, sent))
    assert type(got) is torch.nn.Parameter and not got.requires_grad
    assert torch.equal(got, sent)
    assert is_in_shared_memory(got, writer.shared_memory.name)


def test_parameter_keeps_its_attributes():
    writer, (reader,) = make_arenas()
    sent = torch.nn.Parameter(torch.rand(64), requires_grad=False)
    sent.weight_name = "q_proj"
    got = loads(reader, dumps(writer, sent))
    assert got.weight_name == "q_proj" and torch.equal(got, sent)


def test_source_may_change_after_write():
    writer, (reader,) = make_arenas()
    sent = torch.ones(1000)
    message = dumps(writer, sent)
    sent.zero_()
    assert torch.equal(loads(reader, message), torch.ones(1000))


# ---- What is declined arrives all the same ----------------------------------


class Subclass(torch.Tensor):
    pass


def declined() -> dict[str, torch.Tensor]:
    return {
        "subclass": torch.rand(100).as_subclass(Subclass),
        "conjugate bit": torch.rand(100, dtype=torch.complex64).conj(),
        "negative bit": torch.rand(100, dtype=torch.complex64).conj().imag,
        "not contiguous": torch.rand(10, 20).t(),
        "expanded": torch.rand(10, 1).expand(10, 10),
        "requires grad": torch.rand(100, requires_grad=True),
        "parameter that requires grad": torch.nn.Parameter(torch.rand(100)),
        "sparse": torch.eye(10).to_sparse(),
        "empty": torch.empty(0, 3),
    }


@pytest.mark.parametrize("kind", declined())
def test_declined_tensor_arrives_equal(kind: str):
    writer, (reader,) = make_arenas()
    sent = declined()[kind]
    assert writer.write_tensor(sent) is None
    got = loads(reader, dumps(writer, sent))
    assert type(got) is type(sent) and got.dtype == sent.dtype
    assert got.requires_grad == sent.requires_grad
    assert torch.equal(got.to_dense(), sent.to_dense())


# The out-of-band path cannot send the following either: it raises, or loses the
# quantizer. The arena must not make memory errors of them.


def test_zero_tensor_is_declined():
    writer, _ = make_arenas()
    assert writer.write_tensor(torch._efficientzerotensor(100)) is None


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensor_is_declined():
    writer, _ = make_arenas()
    quantized = torch.quantize_per_tensor(torch.rand(100), 0.1, 0, torch.quint8)
    assert writer.write_tensor(quantized) is None


def test_functorch_tensor_is_declined():
    writer, _ = make_arenas()
    slots = []

    def write(t: torch.Tensor) -> torch.Tensor:
        slots.append(writer.write_tensor(t))
        return t

    torch.vmap(write)(torch.rand(4, 100))
    assert slots == [None]


def test_tensor_whose_storage_was_resized_away_is_declined():
    writer, _ = make_arenas()
    t = torch.rand(1000)
    t.untyped_storage().resize_(0)
    assert writer.write_tensor(t) is None


def test_nested_tensor_is_declined():
    writer, _ = make_arenas()
    nested = torch.nested.nested_tensor([torch.rand(10), torch.rand(20)])
    assert writer.write_tensor(nested) is None


def test_tensor_on_another_device_is_declined():
    writer, _ = make_arenas()
    assert writer.write_tensor(torch.empty(1000, device="meta")) is None


def test_only_tensors_from_the_threshold_on_are_diverted(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(THRESHOLD, 1000)
    writer, _ = make_arenas()
    assert len(dumps(writer, patterned(999))[1]) == 1
    assert len(dumps(writer, patterned(1000))[1]) == 0


# ---- Room -------------------------------------------------------------------


def test_tensor_takes_consecutive_slots_from_the_lowest():
    writer, _ = make_arenas(n_slots=8)
    sizes = [3 * MIB, 1, 2 * MIB + 1]
    assert [writer.write_tensor(patterned(n)) for n in sizes] == [0, 3, 4]


def test_tensor_of_the_whole_arena_fits_and_a_larger_one_does_not():
    writer, (reader,) = make_arenas(n_slots=4)
    assert writer.write_tensor(patterned(4 * MIB + 1)) is None
    sent = patterned(4 * MIB)
    assert torch.equal(loads(reader, dumps(writer, sent)), sent)


def test_exhausted_arena_sends_out_of_band_and_recovers():
    writer, (reader,) = make_arenas(n_slots=2)
    held = [loads(reader, dumps(writer, patterned(MIB, i))) for i in range(2)]
    message = dumps(writer, patterned(MIB, 2))
    assert len(message[1]) == 1, "diverted without room"
    assert torch.equal(loads(reader, message), patterned(MIB, 2))
    assert torch.equal(held[1], patterned(MIB, 1))
    del held[0]
    reader.flush_releases()
    assert writer.write_tensor(patterned(MIB)) == 0


def test_slots_are_not_reused_before_every_reader_has_released():
    writer, readers = make_arenas(n_reader=3, n_slots=1)
    message = dumps(writer, patterned(MIB))
    views = [loads(reader, message) for reader in readers]
    for reader in readers:
        assert writer.write_tensor(patterned(MIB, 1)) is None
        assert all(torch.equal(view, patterned(MIB)) for view in views)
        views.pop(0)
        reader.flush_releases()
    assert writer.write_tensor(patterned(MIB, 1)) == 0


def test_nothing_is_written_before_every_reader_has_attached():
    writer = ShmTensorArena(2, slot_bytes=MIB, n_slots=2)
    first = ShmTensorArena(*writer.handle(), reader_rank=0)
    assert writer.write_tensor(patterned(MIB)) is None
    second = ShmTensorArena(*writer.handle(), reader_rank=1)
    assert writer.write_tensor(patterned(MIB)) == 0
    del first, second


def test_two_threads_share_no_slot():
    writer, (reader,) = make_arenas(slot_bytes=4096, n_slots=64)
    start = threading.Barrier(4)
    taken: list[int] = []

    def write() -> None:
        start.wait()
        for _ in range(16):
            slot = writer.write_tensor(torch.rand(1024))
            assert slot is not None
            taken.append(slot)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(64))


# ---- When a slot is released ------------------------------------------------


@pytest.mark.parametrize(
    "derive",
    [
        lambda t: t[10:20],
        lambda t: t.view(torch.float32),
        lambda t: torch.nn.Parameter(t, requires_grad=False),
        lambda t: t.numpy(),
        lambda t: t.untyped_storage(),
        lambda t: t.detach(),
    ],
    ids=["slice", "view", "parameter", "numpy", "storage", "detach"],
)
def test_slot_is_held_while_anything_over_its_storage_lives(derive):
    writer, (reader,) = make_arenas(n_slots=1)
    kept = derive(loads(reader, dumps(writer, patterned(1000))))
    gc.collect()
    reader.flush_releases()
    assert free_slots(writer) == 0
    del kept
    reader.flush_releases()
    assert free_slots(writer) == 1


def test_two_loads_of_one_message_hold_the_slot_together():
    writer, (reader,) = make_arenas(n_slots=1)
    message = dumps(writer, patterned(1000))
    first, second = loads(reader, message), loads(reader, message)
    del first
    reader.flush_releases()
    assert free_slots(writer) == 0
    del second
    reader.flush_releases()
    assert free_slots(writer) == 1


def test_finalizer_in_another_thread():
    writer, (reader,) = make_arenas(n_slots=1)
    box = [loads(reader, dumps(writer, patterned(1000)))]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert free_slots(writer) == 0, "released by the thread that freed it"
    reader.flush_releases()
    assert free_slots(writer) == 1


def test_finalizer_during_a_flush(monkeypatch: pytest.MonkeyPatch):
    """A collection may run anywhere in a flush, and free a tensor there."""
    writer, (reader,) = make_arenas(n_slots=2)
    first = loads(reader, dumps(writer, patterned(1000)))
    box = [loads(reader, dumps(writer, patterned(1000)))]
    set_done = reader._releases._set_done

    def free_another(slot: int) -> None:
        box.clear()
        set_done(slot)

    monkeypatch.setattr(reader._releases, "_set_done", free_another)
    del first
    reader.flush_releases()
    reader.flush_releases()
    assert free_slots(writer) == 2


def test_finalizer_under_the_lock_of_a_flush():
    writer, (reader,) = make_arenas(n_slots=1)
    box = [loads(reader, dumps(writer, patterned(1000)))]
    with reader._releases._lock:
        box.clear()  # would deadlock if the finalizer took the lock
        reader.flush_releases()  # nor does a second flusher wait for the first
        assert free_slots(writer) == 0
    reader.flush_releases()
    assert free_slots(writer) == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_views_that_a_forked_child_frees_are_not_released():
    writer, (reader,) = make_arenas(n_slots=1)
    got = loads(reader, dumps(writer, patterned(1000)))
    pid = os.fork()
    if pid == 0:
        del got
        reader.flush_releases()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert free_slots(writer) == 0
    assert torch.equal(got, patterned(1000))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_does_not_remove_the_name():
    writer, _ = make_arenas()
    name = writer.shared_memory.name
    pid = os.fork()
    if pid == 0:
        del writer
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert in_dev_shm(name)


FORK_WHILE_PAGES_ARE_TAKEN = """
import os, signal, sys, threading
from tests.distributed.arena_testing import make_arenas, patterned
writer, _ = make_arenas()
begun, go_on = threading.Event(), threading.Event()
real = os.posix_fallocate
def slow(*args):
    begun.set()
    go_on.wait(60)
    real(*args)
os.posix_fallocate = slow
thread = threading.Thread(target=writer.write_tensor, args=(patterned(1000),))
thread.start()
assert begun.wait(60)
pid = os.fork()
if pid == 0:
    signal.alarm(20)  # only a failure waits that long
    sys.exit(0)
status = os.waitpid(pid, 0)[1]
go_on.set()
thread.join(60)
sys.exit(status != 0)
"""


def test_forked_child_ends_though_pages_were_being_taken():
    """The thread that takes them holds a lock, and is not in the child."""
    command = [sys.executable, "-W", "ignore", "-c", FORK_WHILE_PAGES_ARE_TAKEN]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_reader_that_cannot_map_the_arena_leaves_its_name_to_the_others():
    writer = ShmTensorArena(2, slot_bytes=MIB, n_slots=1)
    no_memory = OSError(errno.ENOMEM, "Cannot allocate memory")
    with mock.patch("mmap.mmap", side_effect=no_memory):
        assert ShmTensorArena.attach(writer.handle(), 0) is None
    assert ShmTensorArena.attach(writer.handle(), 1) is not None


def test_views_outlive_the_arena():
    writer, (reader,) = make_arenas()
    got = loads(reader, dumps(writer, patterned(MIB)))
    del writer, reader
    gc.collect()
    assert torch.equal(got, patterned(MIB))


def test_segment_goes_quietly_after_its_module(monkeypatch: pytest.MonkeyPatch):
    """At the end of the interpreter the names of modules become None."""
    writer, _ = make_arenas()
    with monkeypatch.context() as patch:
        patch.setattr(segment, "suppress", None)
        writer.shared_memory.__del__()


def test_readers_cannot_write_and_the_writer_can():
    writer, (reader,) = make_arenas()
    message = dumps(writer, patterned(MIB))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of what it knows to be read-only
        got = loads(reader, message)
    assert not is_writable(got)
    del got
    reader.flush_releases()
    again = loads(reader, dumps(writer, patterned(MIB, 1)))
    assert torch.equal(again, patterned(MIB, 1)) and not is_writable(again)


# ---- Pinned memory, without a device ----------------------------------------


class FakeEvent:
    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def test_two_threads_that_write_share_no_slot(monkeypatch: pytest.MonkeyPatch):
    """One comes while the other has seen which runs are done with, and has not
    freed them."""
    writer, (reader,) = make_arenas(n_slots=2)
    slot = writer.write_tensor(patterned(1000))
    reader.get_tensor(slot, 1000, torch.uint8, (1000,))
    reader.flush_releases()
    look = writer._flags.done_slots
    slots: list[int | None] = []

    def write() -> None:
        slots.append(writer.write_tensor(patterned(1000)))

    def interrupted() -> list[int]:
        monkeypatch.undo()
        done = look()
        # Ends here only if nothing keeps it from coming between.
        with suppress(TimeoutError):
            threads.submit(write).result(0.2)
        return done

    with ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr(writer._flags, "done_slots", interrupted)
        write()
    assert sorted(slots) == [0, 1]


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> list[FakeEvent]:
    """A device that pins everything; its events, in the order of recording."""
    events: list[FakeEvent] = []

    def record() -> FakeEvent:
        events.append(FakeEvent())
        return events[-1]

    monkeypatch.setattr(pinning, "unpinnable_reason", lambda: None)
    monkeypatch.setattr(pinning, "register_host_memory", lambda *_: None)
    monkeypatch.setattr(pinning, "record_event", record)
    return events


def arenas_past_barrier() -> tuple[ShmTensorArena, ShmTensorArena]:
    writer, (reader,) = make_arenas(n_slots=1)
    writer.on_barrier()
    reader.on_barrier()
    return writer, reader


def test_pinned_slot_waits_for_the_event(fake_device: list[FakeEvent]):
    writer, reader = arenas_past_barrier()
    got = loads(reader, dumps(writer, patterned(1000)))
    reader.flush_releases()
    assert not fake_device, "recorded while the tensor was alive"
    del got
    reader.flush_releases()
    assert len(fake_device) == 1 and free_slots(writer) == 0
    reader.flush_releases()
    assert len(fake_device) == 1 and free_slots(writer) == 0
    fake_device[0].done = True
    reader.flush_releases()
    assert free_slots(writer) == 1


def test_nothing_is_recorded_while_a_stream_captures(
    fake_device: list[FakeEvent], monkeypatch: pytest.MonkeyPatch
):
    writer, reader = arenas_past_barrier()
    got = loads(reader, dumps(writer, patterned(1000)))
    del got
    monkeypatch.setattr(pinning, "is_capturing", lambda: True)
    reader.flush_releases()
    assert not fake_device
    monkeypatch.setattr(pinning, "is_capturing", lambda: False)
    reader.flush_releases()
    assert len(fake_device) == 1


def test_slot_that_is_viewed_again_is_not_released_by_an_earlier_event(
    fake_device: list[FakeEvent],
):
    writer, reader = arenas_past_barrier()
    message = dumps(writer, patterned(1000))
    loads(reader, message)
    reader.flush_releases()
    again = loads(reader, message)
    fake_device[0].done = True
    reader.flush_releases()
    assert free_slots(writer) == 0
    del again
    reader.flush_releases()
    fake_device[1].done = True
    reader.flush_releases()
    assert free_slots(writer) == 1


def test_slot_that_is_viewed_twice_waits_for_both_events(
    fake_device: list[FakeEvent],
):
    writer, reader = arenas_past_barrier()
    message = dumps(writer, patterned(1000))
    for _ in range(2):
        loads(reader, message)
        reader.flush_releases()
    for event in fake_device:
        assert free_slots(writer) == 0
        event.done = True
        reader.flush_releases()
    assert len(fake_device) == 2 and free_slots(writer) == 1


def test_event_that_cannot_be_recorded_is_recorded_later(
    fake_device: list[FakeEvent], monkeypatch: pytest.MonkeyPatch
):
    writer, reader = arenas_past_barrier()
    got = loads(reader, dumps(writer, patterned(1000)))
    del got
    with monkeypatch.context() as m:
        m.setattr(pinning, "record_event", lambda: None)
        reader.flush_releases()
    assert free_slots(writer) == 0
    reader.flush_releases()
    fake_device[0].done = True
    reader.flush_releases()
    assert free_slots(writer) == 1


def test_nothing_is_pinned_while_a_stream_captures(
    fake_device: list[FakeEvent], monkeypatch: pytest.MonkeyPatch
):
    writer, (reader,) = make_arenas(n_slots=2)
    writer.on_barrier()
    with monkeypatch.context() as m:
        m.setattr(pinning, "is_capturing", lambda: True)
        m.setattr(pinning, "register_host_memory", lambda *_: pytest.fail("pinned"))
        reader.on_barrier()
    reader.while_waiting(None)  # made up for
    got = loads(reader, dumps(writer, patterned(1000)))
    del got
    reader.flush_releases()
    assert len(fake_device) == 1, "not pinned"


def test_a_waiting_reader_does_not_ask_the_device_all_the_time(
    fake_device: list[FakeEvent], monkeypatch: pytest.MonkeyPatch
):
    now = [100.0]
    monkeypatch.setattr(
        "vllm.distributed.device_communicators.shm_arena.releases.time.monotonic",
        lambda: now[0],
    )
    writer, reader = arenas_past_barrier()
    got = loads(reader, dumps(writer, patterned(1000)))
    del got
    reader.while_waiting(5000)
    queries = []
    monkeypatch.setattr(FakeEvent, "query", lambda _: bool(queries.append(1)))
    for _ in range(1000):
        reader.while_waiting(5000)
    assert len(queries) == 1
    now[0] += 0.01
    reader.while_waiting(5000)
    assert len(queries) == 2


def test_unpinned_slot_waits_for_no_event(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pinning, "unpinnable_reason", lambda: "no device")
    monkeypatch.setattr(pinning, "record_event", lambda: pytest.fail("recorded"))
    writer, reader = arenas_past_barrier()
    got = loads(reader, dumps(writer, patterned(1000)))
    del got
    reader.flush_releases()
    assert free_slots(writer) == 1


@pytest.mark.parametrize("what", ["register", "map"])
def test_failure_to_pin_leaves_a_working_reader(
    what: str, monkeypatch: pytest.MonkeyPatch
):
    writer, (reader,) = make_arenas(n_slots=1)
    monkeypatch.setattr(pinning, "unpinnable_reason", lambda: None)
    monkeypatch.setattr(pinning, "register_host_memory", lambda *_: "error 2")
    if what == "map":
        error = OSError(errno.EMFILE, "Too many open files")
        monkeypatch.setattr(reader._segment, "map", mock.Mock(side_effect=error))
    writer.on_barrier()
    reader.on_barrier()
    assert torch.equal(loads(reader, dumps(writer, patterned(1000))), patterned(1000))
    reader.flush_releases()
    assert free_slots(writer) == 1


def test_pinned_tensors_cannot_be_written_to(fake_device: list[FakeEvent]):
    writer, reader = arenas_past_barrier()
    assert reader._prefixes.pinned_bytes
    assert not is_writable(loads(reader, dumps(writer, patterned(1000))))


def test_device_that_cannot_pin_read_only_memory_pins_it_writable(
    fake_device: list[FakeEvent], monkeypatch: pytest.MonkeyPatch
):
    """Without the guard, but without the slow copies either."""
    info = mock.Mock()
    monkeypatch.setattr(pinning.logger, "info", info)
    registered: list[tuple[int, int]] = []

    def register(address: int, nbytes: int, mode: int) -> str | None:
        if mode == 8:
            return "error 801"
        registered.append((address, address + nbytes))
        return None

    monkeypatch.setattr(pinning, "register_host_memory", register)
    writer, reader = arenas_past_barrier()
    assert reader._prefixes.failure is None
    got = loads(reader, dumps(writer, patterned(1000)))
    ((start, end),) = registered
    assert start <= got.data_ptr() < end and is_writable(got)
    assert torch.equal(got, patterned(1000))
    (call,) = info.call_args_list
    assert "writable" in call.args[0] and "error 801" in call.args


def test_pinning_that_fails_on_one_rank_only(
    fake_device: list[FakeEvent], monkeypatch: pytest.MonkeyPatch
):
    """Each rank releases by its own rule."""
    writer, readers = make_arenas(n_reader=2, n_slots=1)
    writer.on_barrier()
    readers[0].on_barrier()
    monkeypatch.setattr(pinning, "register_host_memory", lambda *_: "error 2")
    readers[1].on_barrier()
    message = dumps(writer, patterned(1000))
    for reader in readers:
        assert torch.equal(loads(reader, message), patterned(1000))
        reader.flush_releases()
    assert len(fake_device) == 1, "one event, of the rank that has pinned"
    assert free_slots(writer) == 0
    fake_device[0].done = True
    readers[0].flush_releases()
    assert free_slots(writer) == 1


# ---- Stubs ------------------------------------------------------------------

GOOD = {"idx": 0, "nbytes": 4096, "dtype": "float32", "shape": (2, 512)}
WRONG = {
    "slot before the first": {"idx": -1},
    "slot after the last": {"idx": 8},
    "slot that is not published": {"idx": 1},
    "slot that is no int": {"idx": "0"},
    "slot that is a bool": {"idx": False},
    "run past the end": {"idx": 7, "nbytes": 2 * MIB, "shape": (MIB // 2,)},
    "bytes beyond its run": {"nbytes": 2 * MIB, "shape": (MIB // 2,)},
    "more bytes than the arena": {"nbytes": 9 * MIB, "shape": (9 * MIB // 4,)},
    "bytes that do not fit the shape": {"nbytes": 4092},
    "no bytes": {"nbytes": 0, "shape": (0,)},
    "negative bytes": {"nbytes": -4096},
    "bytes that are no int": {"nbytes": 4096.0},
    "shape that does not fit the bytes": {"shape": (2, 511)},
    "negative sizes": {"shape": (-2, -512)},
    "shape that is no tuple": {"shape": [2, 512]},
    "sizes that are no ints": {"shape": (2.0, 512)},
    "dtype of another size": {"dtype": "float64"},
    "unknown dtype": {"dtype": "float31"},
    "dtype that is something else": {"dtype": "nn"},
    "dtype that is no string": {"dtype": torch.float32},
}


def rebuild(arena: ShmTensorArena, stub: dict) -> torch.Tensor:
    return _rebuild_arena_tensor(
        arena.shared_memory.name,
        stub["idx"],
        stub["nbytes"],
        stub["dtype"],
        stub["shape"],
    )


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_stub_is_refused(wrong: dict):
    writer, (reader,) = make_arenas()
    sent = torch.rand(2, 512)
    assert writer.write_tensor(sent) == 0
    with pytest.raises(ValueError, match="arena stub"):
        rebuild(reader, GOOD | wrong)
    assert torch.equal(rebuild(reader, GOOD), sent)


def test_stub_of_a_released_slot_is_refused():
    writer, (reader,) = make_arenas()
    assert writer.write_tensor(torch.rand(2, 512)) == 0
    rebuild(reader, GOOD)
    reader.flush_releases()
    with pytest.raises(ValueError, match="not published"):
        rebuild(reader, GOOD)


def test_stub_whose_arena_is_no_name_is_refused():
    with pytest.raises(ValueError, match="arena stub"):
        _rebuild_arena_tensor(["elsewhere"], 0, 4, "float32", (1,))  # type: ignore


@pytest.mark.parametrize("fn", [_rebuild_arena_tensor, _rebuild_arena_parameter])
def test_stub_of_an_unknown_arena_is_refused(fn):
    with pytest.raises(KeyError, match="no shm tensor arena 'elsewhere'"):
        fn("elsewhere", 0, 4, "float32", (1,))


def test_writer_builds_no_tensors():
    writer, _ = make_arenas()
    assert writer.write_tensor(torch.rand(1)) == 0
    with pytest.raises(ValueError, match="only readers"):
        writer.get_tensor(0, 4, torch.float32, (1,))


def test_reader_does_not_write():
    _, (reader,) = make_arenas()
    with pytest.raises(ValueError, match="only the writer"):
        reader.write_tensor(torch.rand(1))


# ---- Several arenas and ranks in one process --------------------------------


def test_releases_are_booked_for_the_rank_that_loads():
    writer, readers = make_arenas(n_reader=2, n_slots=1)
    message = dumps(writer, patterned(1000))
    for reader in readers:  # the registry only knows the last one
        loads(reader, message)
        reader.flush_releases()
    assert free_slots(writer) == 1


def test_two_arenas_in_one_process():
    pairs = [make_arenas(), make_arenas()]
    sent = [patterned(1000, seed) for seed in range(2)]
    messages = [dumps(writer, t) for (writer, _), t in zip(pairs, sent)]
    got = [loads(reader, m) for (_, (reader,)), m in zip(pairs, messages)]
    assert all(torch.equal(a, b) for a, b in zip(got, sent))


def test_stub_of_another_arena_is_found_by_name():
    (writer, (reader,)), (_, (other,)) = make_arenas(), make_arenas()
    message = dumps(writer, patterned(1000))
    assert torch.equal(loads(other, message), patterned(1000))
    del reader


# ---- Creating and opening ---------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        {"n_reader": 0},
        {"n_reader": -1},
        {"slot_bytes": 0},
        {"n_slots": 0},
        {"n_slots": 1.5},
        {"n_slots": True},
        {"reader_rank": 0},
        {"name": "vllm_arena_none", "reader_rank": 2},
        {"name": "vllm_arena_none", "reader_rank": -1},
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused(args: dict):
    with pytest.raises(ValueError):
        ShmTensorArena(**({"n_reader": 2, "slot_bytes": MIB, "n_slots": 2} | args))


def test_no_room_in_dev_shm_fails_at_start_and_says_what_to_do():
    with pytest.raises(RuntimeError) as error:
        ShmTensorArena(1, slot_bytes=1 << 40, n_slots=1024)
    message = str(error.value)
    assert "--enable-shm-tensor-arena" in message
    assert f"{(1 << 30) + 256} MiB required" in message and "--shm-size" in message


def test_opening_what_is_not_there():
    with pytest.raises(FileNotFoundError):
        ShmTensorArena(1, MIB, 2, "vllm_arena_none", reader_rank=0)
    assert ShmTensorArena.attach((1, MIB, 2, "vllm_arena_none"), 0) is None


def test_opening_what_is_too_small():
    writer = ShmTensorArena(1, MIB, 2)
    with pytest.raises(ValueError, match="expected"):
        ShmTensorArena(1, MIB, 64, writer.handle()[3], reader_rank=0)


def test_segment_is_private_and_goes_with_its_writer():
    writer, readers = make_arenas()
    name = writer.shared_memory.name
    status = os.stat(f"/dev/shm/{name}")
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 < MIB, "pages taken before use"
    del readers
    assert in_dev_shm(name), "a reader removed the name"
    del writer
    assert not in_dev_shm(name)


def test_name_is_gone_after_the_barrier():
    writer, (reader,) = make_arenas()
    writer.on_barrier()
    assert not in_dev_shm(writer.shared_memory.name)
    reader.on_barrier()
    assert torch.equal(loads(reader, dumps(writer, patterned(MIB))), patterned(MIB))


def test_names_cannot_be_guessed():
    names = [ShmTensorArena(1, MIB, 1).shared_memory.name for _ in range(3)]
    assert all(len(name.removeprefix("vllm_arena_")) == 32 for name in names)
    assert all(a != b for a, b in pairwise(names))


def test_rollback_gives_back_what_is_not_committed():
    writer, _ = make_arenas(n_slots=4)
    writer.divert(patterned(1000))
    writer.commit()
    writer.divert(patterned(1000))
    writer.divert(patterned(1000))
    writer.rollback()
    writer.rollback()  # nothing is left to give back
    assert free_slots(writer) == 3


def test_rollback_leaves_what_belongs_to_no_message():
    writer, _ = make_arenas(n_slots=2)
    writer.write_tensor(patterned(1000))
    writer.rollback()
    assert free_slots(writer) == 1


def test_pickler_gives_slots_back_if_it_fails():
    writer, _ = make_arenas(n_slots=2)
    dumps(writer, patterned(1000))
    with pytest.raises(TypeError):
        dumps(writer, [patterned(1000), threading.Lock()])
    assert free_slots(writer) == 1


def test_failed_copy_gives_slots_back(monkeypatch: pytest.MonkeyPatch):
    writer, _ = make_arenas(n_slots=1)

    def fail(*_: int) -> None:
        raise MemoryError

    with monkeypatch.context() as m, pytest.raises(MemoryError):
        m.setattr(writer._pool, "copy", fail)
        writer.write_tensor(patterned(1000))
    assert free_slots(writer) == 1


@pytest.mark.parametrize(
    "where", ["_stats.on_divert", "_flags.publish", "_backing.prepare_ahead"]
)
def test_interruption_after_the_copy_gives_slots_back(
    where: str, monkeypatch: pytest.MonkeyPatch
):
    """As a signal handler that raises does, in a process that goes on."""
    writer, _ = make_arenas(n_slots=1)
    part, name = where.split(".")
    interrupt = mock.Mock(side_effect=KeyboardInterrupt)
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(getattr(writer, part), name, interrupt)
        writer.write_tensor(patterned(1000))
    assert free_slots(writer) == 1
