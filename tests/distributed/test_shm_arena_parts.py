# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The arena's parts, each by itself."""

import ctypes
import errno
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed.arena_testing import MIB, make_arenas, patterned
from vllm.distributed.device_communicators.shm_arena import (
    backing,
    cgroup,
    copy_pool,
    pinning,
)
from vllm.distributed.device_communicators.shm_arena.backing import PageBacking
from vllm.distributed.device_communicators.shm_arena.copy_pool import CopyPool
from vllm.distributed.device_communicators.shm_arena.slots import SlotBook
from vllm.distributed.device_communicators.shm_tensor_arena import ShmTensorArena

# Seconds, on a busy machine.
TIMEOUT = 20

# ---- Slots ------------------------------------------------------------------

N_SLOTS = 64


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(1, N_SLOTS)),
            st.tuples(st.just("give back"), st.integers(0, N_SLOTS)),
        ),
        max_size=200,
    )
)
def test_slot_book_agrees_with_a_plain_list(steps: list[tuple[str, int]]):
    """Against one byte a slot: no overlap, lowest first, None only without room,
    nothing lost."""
    book = SlotBook(N_SLOTS)
    used = bytearray(N_SLOTS)
    for action, n in steps:
        if action == "take":
            expected = used.find(bytes(n))
            first = book.take(n)
            assert first == (None if expected == -1 else expected)
            if first is not None:
                used[first : first + n] = b"\x01" * n
        elif book.live:
            first = sorted(book.live)[n % len(book.live)]
            used[first : first + book.live[first]] = bytes(book.live[first])
            book.give_back(first)
        assert sum(used) == sum(book.live.values())
    for first in list(book.live):
        book.give_back(first)
    assert book.take(N_SLOTS) == 0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_fragmentation_is_bounded(data: st.DataObject):
    """Requests in flight come and go in any order; with half of the arena live,
    first fit still places whatever is no larger than the largest of them."""
    n_slots, largest = 1024, 64
    book = SlotBook(n_slots)
    sizes = st.integers(4, largest)
    for _ in range(data.draw(st.integers(50, 150))):
        n = data.draw(sizes)
        while sum(book.live.values()) + n > n_slots // 2:
            live = sorted(book.live)
            book.give_back(live[data.draw(st.integers(0, len(live) - 1))])
        assert book.take(n) is not None


def test_giving_back_what_is_not_live_is_refused():
    book = SlotBook(4)
    assert book.take(2) == 0
    with pytest.raises(KeyError):
        book.give_back(1)


# ---- Copying ----------------------------------------------------------------


@pytest.fixture(params=[1, 2, 7])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CopyPool:
    monkeypatch.setattr(copy_pool, "available_cpu_count", lambda: request.param)
    monkeypatch.setattr(copy_pool, "_CHUNK_BYTES", 1000)
    return CopyPool()


@pytest.mark.parametrize("nbytes", [1, 999, 1000, 1001, 12345])
def test_copy_is_exact_and_stays_inside(pool: CopyPool, nbytes: int):
    src = patterned(nbytes)
    dst = torch.zeros(nbytes + 2, dtype=torch.uint8)
    pool.copy(dst.data_ptr() + 1, src.data_ptr(), nbytes)
    assert torch.equal(dst[1:-1], src) and dst[0] == dst[-1] == 0


def test_helper_that_begins_after_the_end_does_nothing(
    pool: CopyPool, monkeypatch: pytest.MonkeyPatch
):
    """The caller is interrupted; helpers that wait in the executor's queue must
    not touch memory that is somebody else's by then."""
    late = []

    class SlowExecutor:
        def submit(self, fn) -> None:
            late.append(fn)

    monkeypatch.setattr(pool, "_pool", SlowExecutor)
    called = []

    def fn(offset: int, size: int) -> None:
        called.append(offset)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.for_each_chunk(10_000, fn)
    for helper in late:
        helper()
    assert called == [0]


def test_copy_without_helpers(pool: CopyPool, monkeypatch: pytest.MonkeyPatch):
    def no_more_threads() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(pool, "_pool", no_more_threads)
    src, dst = patterned(5000), torch.zeros(5000, dtype=torch.uint8)
    pool.copy(dst.data_ptr(), src.data_ptr(), 5000)
    assert torch.equal(src, dst)


def test_a_failing_chunk_is_reported_after_all_have_ended(pool: CopyPool):
    running, ended = [], []

    def fn(offset: int, size: int) -> None:
        running.append(offset)
        if offset == 3000:
            raise MemoryError
        ended.append(offset)

    with pytest.raises(MemoryError):
        pool.for_each_chunk(10_000, fn)
    assert len(running) == len(ended) + 1


def test_pool_works_in_a_forked_child(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(copy_pool, "available_cpu_count", lambda: 2)
    monkeypatch.setattr(copy_pool, "_CHUNK_BYTES", 1000)
    pool = CopyPool()
    pool.for_each_chunk(5000, lambda *_: None)  # starts the parent's threads
    pid = os.fork()
    if pid == 0:
        done = threading.Event()
        worker = threading.Thread(
            target=lambda: (pool.for_each_chunk(5000, lambda *_: None), done.set()),
            daemon=True,
        )
        worker.start()
        os._exit(0 if done.wait(30) else 1)
    assert os.waitpid(pid, 0)[1] == 0


def test_copying_leaves_torch_threads_alone():
    before = torch.get_num_threads()
    writer, _ = make_arenas(slot_bytes=16 * MIB)
    assert writer.write_tensor(patterned(16 * MIB)) == 0
    assert torch.get_num_threads() == before


# ---- Taking pages -----------------------------------------------------------


def resident_mib(writer) -> int:
    # The control bytes take a page or two beside the data.
    return os.fstat(writer._segment.fd).st_blocks * 512 // MIB


def test_pages_are_taken_by_use_and_kept():
    writer, (reader,) = make_arenas(n_slots=64)
    assert resident_mib(writer) == 0
    assert writer.write_tensor(patterned(3 * MIB)) == 0
    assert resident_mib(writer) == 3
    del reader


def test_full_dev_shm_declines_and_gives_the_slot_back(monkeypatch: pytest.MonkeyPatch):
    writer, _ = make_arenas(n_slots=2)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, "posix_fallocate", full)
        assert writer.write_tensor(patterned(MIB)) is None
    assert writer.write_tensor(patterned(2 * MIB)) == 0


def test_cgroup_near_its_limit_declines(monkeypatch: pytest.MonkeyPatch):
    writer, _ = make_arenas(n_slots=8)
    monkeypatch.setattr(backing, "memory_room", lambda: (256 + 2) * MIB)
    assert writer.write_tensor(patterned(3 * MIB)) is None
    assert writer.write_tensor(patterned(2 * MIB)) == 0


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepare 4 MiB at a time, and the next 4 when less than 2 are left."""
    module = "vllm.distributed.device_communicators.shm_arena.backing"
    monkeypatch.setattr(f"{module}.PREPARE_STEP_BYTES", 4 * MIB)
    monkeypatch.setattr(f"{module}._PREPARE_AHEAD_BYTES", 2 * MIB)
    arena = "vllm.distributed.device_communicators.shm_tensor_arena"
    monkeypatch.setattr(f"{arena}.PREPARE_STEP_BYTES", 4 * MIB)


def finish_preparing(writer) -> None:
    if writer._backing._thread is not None:
        writer._backing._thread.join()


def test_preparation_stays_a_step_ahead_of_use(small_steps: None):
    writer, (reader,) = make_arenas(n_slots=16)
    writer.on_barrier()
    assert resident_mib(writer) == 4
    assert writer.write_tensor(patterned(2 * MIB)) == 0
    finish_preparing(writer)
    assert resident_mib(writer) == 4
    assert writer.write_tensor(patterned(1 * MIB)) == 2
    finish_preparing(writer)
    assert resident_mib(writer) == 8
    assert writer.write_tensor(patterned(13 * MIB)) == 3
    finish_preparing(writer)
    assert resident_mib(writer) == 16
    del reader


def test_scattered_runs_do_not_make_more_resident_than_was_in_use(small_steps: None):
    """The peak of live bytes rounded up, and a step."""
    writer, (reader,) = make_arenas(n_slots=64)
    writer.on_barrier()
    slots = [writer.write_tensor(patterned(MIB)) for _ in range(16)]
    for slot in slots[::2]:
        reader.get_tensor(slot, MIB, torch.uint8, (MIB,))
    reader.flush_releases()
    for _ in range(4):  # fit no hole
        assert writer.write_tensor(patterned(2 * MIB)) >= 16
        finish_preparing(writer)
    assert resident_mib(writer) <= 24  # 16 live at most, so 20 and what is used


def test_preparing_changes_no_byte_in_use(small_steps: None):
    writer, (reader,) = make_arenas(n_slots=16)
    assert writer.write_tensor(patterned(4 * MIB)) == 0
    got = reader.get_tensor(0, 4 * MIB, torch.uint8, (4 * MIB,))
    writer.on_barrier()
    finish_preparing(writer)
    assert torch.equal(got, patterned(4 * MIB))


def test_no_thread_to_prepare_is_not_fatal(
    small_steps: None, monkeypatch: pytest.MonkeyPatch
):
    writer, (reader,) = make_arenas(n_slots=16)
    writer.on_barrier()
    error = RuntimeError("can't start new thread")
    monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=error))
    assert writer.write_tensor(patterned(3 * MIB)) == 0
    del reader


V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def make_cgroup(folder: Path, files: tuple, limit: object, usage: int, cache: int):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(files, (limit, usage), strict=True):
        (folder / name).write_text(f"{value}\n")
    total = "total_" if files == V1 else ""
    stat = f"shmem 5\n{total}inactive_file {cache}\n"
    (folder / "memory.stat").write_text(stat)


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /sys/fs/cgroup."""
    monkeypatch.setattr(cgroup, "_MOUNT", tmp_path / "mount")
    monkeypatch.setattr(cgroup, "_PROC_SELF_CGROUP", tmp_path / "self")
    return tmp_path


def test_no_cgroup_is_no_limit(cgroups: Path):
    assert cgroup.memory_room() is None


def test_page_cache_of_a_container_counts_as_room(cgroups: Path):
    """Its own cgroup is the mount's root, whatever the path says."""
    (cgroups / "self").write_text("0::/elsewhere\n")
    make_cgroup(cgroups / "mount", V2, 1000, 900, 50)
    assert cgroup.memory_room() == 150


@pytest.mark.parametrize(
    ("files", "root", "line", "unlimited"),
    [
        (V2, "mount", "0::/a.slice/b.scope", "max"),
        (V1, "mount/memory", "7:cpu,memory:/a.slice/b.scope", 9223372036854771712),
    ],
)
def test_tightest_limit_above_the_process_counts(
    cgroups: Path, files: tuple, root: str, line: str, unlimited: object
):
    (cgroups / "self").write_text(f"3:pids:/x\n{line}\n")
    make_cgroup(cgroups / root, files, unlimited, 5000, 0)
    make_cgroup(cgroups / root / "a.slice", files, 2000, 1700, 100)
    make_cgroup(cgroups / root / "a.slice" / "b.scope", files, 1000, 500, 0)
    assert cgroup.memory_room() == 400


def test_no_room_to_prepare_is_not_fatal(
    small_steps: None, monkeypatch: pytest.MonkeyPatch
):
    writer, (reader,) = make_arenas(n_slots=16)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, "posix_fallocate", full)
        writer.on_barrier()
    assert writer.write_tensor(patterned(2 * MIB)) == 0
    del reader


def test_preparation_that_finds_no_room_is_tried_again_later(
    small_steps: None, monkeypatch: pytest.MonkeyPatch
):
    """The first step at the barrier, and a later one; no thread for each tensor."""
    now, room = [100.0], [0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(backing, "time", clock)
    monkeypatch.setattr(
        backing, "memory_room", lambda: backing._CGROUP_RESERVE_BYTES + room[0]
    )
    prepare = PageBacking._prepare_next_step
    tries = []
    monkeypatch.setattr(
        PageBacking,
        "_prepare_next_step",
        lambda self: [tries.append(now[0]), prepare(self)],
    )
    writer, (reader,) = make_arenas(n_slots=16)
    writer.on_barrier()

    room[0] = MIB  # for a tensor, not for a step
    assert writer.write_tensor(patterned(MIB)) == 0
    assert tries == [100]
    for now[0] in (106, 107, 108):
        assert writer.write_tensor(patterned(MIB)) is not None
        finish_preparing(writer)
    assert tries == [100, 106]
    room[0], now[0] = 8 * MIB, 112
    assert writer.write_tensor(patterned(MIB)) == 4
    finish_preparing(writer)
    assert tries == [100, 106, 112]
    assert resident_mib(writer) == 5 and writer._flags.prepared_steps == 1
    del reader


def test_what_has_pages_waits_for_nobody_who_takes_some(
    small_steps: None, monkeypatch: pytest.MonkeyPatch
):
    writer, (reader,) = make_arenas(n_slots=16)
    writer.on_barrier()
    begun, go_on = threading.Event(), threading.Event()
    take = os.posix_fallocate

    def slow(*args: int) -> None:
        begun.set()
        assert go_on.wait(2 * TIMEOUT)
        take(*args)

    monkeypatch.setattr(os, "posix_fallocate", slow)
    assert writer.write_tensor(patterned(3 * MIB)) == 0
    assert begun.wait(TIMEOUT)
    with ThreadPoolExecutor(1) as thread:
        written = thread.submit(writer.write_tensor, patterned(MIB))
        try:
            assert written.result(TIMEOUT) == 3
        finally:
            go_on.set()
    finish_preparing(writer)
    del reader


# ---- Pinning ----------------------------------------------------------------


def test_no_view_crosses_a_registration(
    small_steps: None, monkeypatch: pytest.MonkeyPatch
):
    """Every view lies inside one registration or in a mapping that has none."""
    registered: list[tuple[int, int]] = []

    def register(address: int, nbytes: int, mode: int) -> None:
        registered.append((address, address + nbytes))

    monkeypatch.setattr(pinning, "unpinnable_reason", lambda: None)
    monkeypatch.setattr(pinning, "register_host_memory", register)
    writer, (reader,) = make_arenas(n_slots=16)
    writer.on_barrier()
    reader.on_barrier()
    where, views = [], []
    for n in (3 * MIB, 4 * MIB, 3 * MIB, 6 * MIB):
        slot = writer.write_tensor(patterned(n))
        assert slot is not None
        view = reader.get_tensor(slot, n, torch.uint8, (n,))
        start, end = view.data_ptr(), view.data_ptr() + n
        inside = [r for r in registered if r[0] <= start and end <= r[1]]
        touching = [r for r in registered if start < r[1] and r[0] < end]
        assert inside == touching
        where.append(bool(inside))
        views.append(view)
        finish_preparing(writer)
        reader.while_waiting(None)  # pins what has been prepared
    assert where == [True, True, True, False]
    lengths = [(end - start) // MIB for start, end in registered]
    assert lengths == [4, 8, 12, 16]


def test_what_the_device_refused_is_not_asked_again(
    small_steps: None, monkeypatch: pytest.MonkeyPatch
):
    writable = 0
    modes: list[int] = []

    def register(address: int, nbytes: int, mode: int) -> str | None:
        modes.append(mode)
        return None if mode == writable else "error 801"

    monkeypatch.setattr(pinning, "unpinnable_reason", lambda: None)
    monkeypatch.setattr(pinning, "register_host_memory", register)
    writer, (reader,) = make_arenas(n_slots=16)
    writer.on_barrier()
    reader.on_barrier()
    assert writer.write_tensor(patterned(6 * MIB)) is not None
    finish_preparing(writer)
    reader.while_waiting(None)
    assert len(modes) > 2
    assert [mode == writable for mode in modes] == [False] + [True] * (len(modes) - 1)


def test_a_registered_mapping_is_never_unmapped(monkeypatch: pytest.MonkeyPatch):
    addresses: list[int] = []
    monkeypatch.setattr(pinning, "unpinnable_reason", lambda: None)
    monkeypatch.setattr(
        pinning, "register_host_memory", lambda address, *_: addresses.append(address)
    )
    writer, (reader,) = make_arenas()
    writer.on_barrier()
    reader.on_barrier()
    del writer, reader
    assert ctypes.string_at(addresses[0], mmap.PAGESIZE) == bytes(mmap.PAGESIZE)


# ---- Size --------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [[24_000_000] * 40, [600_000_000], [1_500_000_000]],
    ids=["40x24", "600", "1500"],
)
def test_bursts_fit_an_arena_of_the_default_size(sizes: list[int]):
    writer = ShmTensorArena(1)
    reader = ShmTensorArena(*writer.handle(), reader_rank=0)
    source = torch.zeros(max(sizes), dtype=torch.uint8)
    assert None not in [writer.write_tensor(source[:n]) for n in sizes]
    del reader
