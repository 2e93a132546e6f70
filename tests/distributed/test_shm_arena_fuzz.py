# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stubs and handles of any kind: a view inside its run, or a documented refusal."""

from collections.abc import Iterator
from multiprocessing import shared_memory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.distributed.arena_testing import bytes_of, make_arenas, patterned
from vllm.distributed.device_communicators.shm_tensor_arena import (
    ShmTensorArena,
    _rebuild_arena_parameter,
    _rebuild_arena_tensor,
)

SLOT_BYTES = 4096
N_SLOTS = 8
NBYTES = 10_000  # three slots, from the second on
FIRST = 1

fuzz = settings(max_examples=400, deadline=None, derandomize=True)

junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 2 * N_SLOTS),
    st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64, -(2**63), SLOT_BYTES, NBYTES]),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.sampled_from([(), [], {}, object(), int, torch.uint8, torch.zeros(1)]),
)
sizes = st.one_of(st.integers(-1, 2 * NBYTES), st.sampled_from([1, NBYTES]), junk)
shapes = st.one_of(st.lists(sizes, max_size=5).map(tuple), st.lists(sizes), junk)
dtype_names = st.one_of(
    st.sampled_from(
        [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]
    ),
    st.sampled_from(["nn", "Tensor", "zeros", "__doc__", "float31"]),
    junk,
)


def or_else(good: Any, other: st.SearchStrategy) -> st.SearchStrategy:
    """Mostly what is right, so that one thing is wrong at a time."""
    return st.one_of(st.just(good), st.just(good), other)


@fuzz
@given(
    rebuild=st.sampled_from([_rebuild_arena_tensor, _rebuild_arena_parameter]),
    slot=or_else(FIRST, junk),
    nbytes=or_else(NBYTES, sizes),
    dtype=or_else("uint8", dtype_names),
    shape=or_else((NBYTES,), shapes),
)
def test_any_stub(rebuild: Any, slot: Any, nbytes: Any, dtype: Any, shape: Any):
    writer, (reader,) = make_arenas(1, SLOT_BYTES, N_SLOTS)
    assert writer.write_tensor(patterned(1)) == 0
    assert writer.write_tensor(patterned(NBYTES)) == FIRST
    try:
        t = rebuild(reader.shared_memory.name, slot, nbytes, dtype, shape)
    except ValueError as e:
        assert str(e)
    else:
        # Of one of the two that are there, and not beyond its last slot.
        assert -(-nbytes // SLOT_BYTES) == {0: 1, FIRST: 3}[slot]
        assert bytes_of(t)[:1] == bytes_of(patterned(NBYTES if slot else 1))[:1]
        assert t.shape == shape and t.nbytes == nbytes


@fuzz
@given(name=junk)
def test_stub_with_any_name(name: Any):
    with pytest.raises((KeyError, ValueError), match="arena stub"):
        _rebuild_arena_tensor(name, 0, 1, "uint8", (1,))


@pytest.fixture(scope="module")
def segments() -> Iterator[dict[str, shared_memory.SharedMemory]]:
    """Of others: as large as the arena but of another name, and the reverse."""
    size = ShmTensorArena(1, SLOT_BYTES, N_SLOTS).shared_memory.size
    made = {
        name: shared_memory.SharedMemory(name, create=True, size=n)
        for name, n in (("vllm_test_other", size), ("vllm_arena_other", size + 1))
    }
    for segment in made.values():
        assert segment.buf is not None
        segment.buf[:] = b"\xaa" * segment.size
    yield made
    for segment in made.values():
        segment.close()
        segment.unlink()


@fuzz
@given(data=st.data())
def test_any_handle(segments: dict, data: st.DataObject):
    writer = ShmTensorArena(1, SLOT_BYTES, N_SLOTS)
    good = writer.handle()
    names = st.one_of(
        st.sampled_from(
            [*segments, "", ".", "..", "/", "a/b", "a\0b", "\ud800", "a" * 300]
        ),
        junk,
    )
    fields = [or_else(field, junk) for field in good[:3]] + [or_else(good[3], names)]
    handles = st.one_of(
        st.tuples(*fields),
        st.tuples(*map(st.just, good[:3]), names),
        st.lists(junk, max_size=6).map(tuple),
        junk,
    )
    handle = data.draw(handles)
    reader = ShmTensorArena.attach(handle, 0)
    if reader is not None:
        assert handle[3] == good[3]
        assert reader.shared_memory.size == reader._layout.total_bytes
        assert reader._layout.total_bytes == writer._layout.total_bytes
    for segment in segments.values():
        assert bytes(segment.buf) == b"\xaa" * segment.size
