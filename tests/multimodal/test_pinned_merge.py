# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Merging pinned tensors on the device gives what merging them on the CPU gives.

Without a CUDA device, pinning is pretended and the device is the CPU under
another name ("cpu:0"), so that what is copied, and where to, can be seen.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from vllm.multimodal import pinned_merge
from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalSharedField,
)

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu:0"
DTYPES = [torch.uint8, torch.float32, torch.bfloat16, torch.int64, torch.bool]
pretended: set[int] = set()


@pytest.fixture(autouse=True)
def merge_small_pinned_tensors(monkeypatch):
    """Turn it on, for tensors of a few bytes too, and let the CPU pin."""
    monkeypatch.setattr(BaseMultiModalField, "merge_pinned_on_device", True)
    monkeypatch.setattr(pinned_merge, "_MIN_PIECE_BYTES", 1)
    if HAS_CUDA:
        yield
        return
    plain = {name: getattr(torch.Tensor, name) for name in ("new_empty", "new_zeros")}

    def pretend_pinned(name):
        def new(self, *args, pin_memory=False, **kwargs):
            t = plain[name](self, *args, **kwargs)
            return pin(t) if pin_memory else t

        return new

    for name in plain:
        monkeypatch.setattr(torch.Tensor, name, pretend_pinned(name))
    monkeypatch.setattr(
        torch.Tensor, "is_pinned", lambda t: t.untyped_storage().data_ptr() in pretended
    )
    yield
    pretended.clear()


def pin(t: torch.Tensor) -> torch.Tensor:
    if HAS_CUDA:
        # Not `pin_memory`, which makes it contiguous.
        pinned = torch.empty_strided(
            t.shape, t.stride(), dtype=t.dtype, pin_memory=True
        )
        return pinned.copy_(t)
    pretended.add(t.untyped_storage().data_ptr())
    return t


def values(shape, dtype=torch.float32, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 200, tuple(shape), generator=generator).to(dtype)


def reduce(field, batch, **kwargs):
    kwargs = {"device": DEVICE, "pin_memory": True} | kwargs
    elems = [MultiModalFieldElem(data=data, field=field) for data in batch]
    return field.reduce_data(elems, **kwargs)


def reduce_as_base(field, batch, **kwargs):
    """With the switch off; on the CPU without pinning there, which cannot be."""
    BaseMultiModalField.merge_pinned_on_device = False
    try:
        return reduce(field, batch, **kwargs)
    finally:
        BaseMultiModalField.merge_pinned_on_device = True


def assert_same(got, expected) -> None:
    assert type(got) is type(expected)
    if isinstance(expected, list):
        assert len(got) == len(expected)
        for pair in zip(got, expected):
            assert_same(*pair)
        return
    if not isinstance(expected, torch.Tensor):
        assert got == expected
        return
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.stride() == expected.stride()
    assert got.device == expected.device
    assert torch.equal(got, expected)


class Ops(TorchDispatchMode):
    """Writes down which of torch's operations run."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


FIELDS = {
    "flat 0": MultiModalFlatField(slices=[], dim=0),
    "flat 1": MultiModalFlatField(slices=[], dim=1),
    "flat -1": MultiModalFlatField(slices=[], dim=-1),
    "batched": MultiModalBatchedField(),
}


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pinned_tensors_are_copied_once_to_their_place(name: str, dtype):
    batch = [pin(values((3, 4, 5), dtype, seed)) for seed in range(4)]
    expected = reduce_as_base(FIELDS[name], batch)
    with Ops() as ops:
        got = reduce(FIELDS[name], batch)
    assert_same(got, expected)
    looks = ("select", "slice", "detach", "is_pinned")
    assert [op for op in ops.names if op not in looks] == ["empty"] + ["copy_"] * 4


def test_what_is_not_pinned_is_copied_to_pinned_memory_first():
    """An image that lies beyond what the arena has pinned, say."""
    batch = [
        pin(values((3, 4), seed=1)),
        values((2, 4), seed=2),
        pin(values((4, 5), seed=3).t()),  # a DMA cannot transpose it
    ]
    expected = reduce_as_base(FIELDS["flat 0"], batch)
    with Ops() as ops:
        got = reduce(FIELDS["flat 0"], batch)
    assert_same(got, expected)
    assert ops.names.count("copy_") == 5
    assert ops.names.count("new_empty") == 2


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_ragged_tensors_are_padded_with_zeros(dim: int):
    field = MultiModalFlatField(slices=[], dim=dim)
    shapes = [(2, 3, 4), (5, 1, 2), (1, 6, 3)]
    batch = [pin(values(shape, seed=i) + 1) for i, shape in enumerate(shapes)]
    expected = reduce_as_base(field, batch)
    assert (expected == 0).any()
    with Ops() as ops:
        got = reduce(field, batch)
    assert_same(got, expected)
    assert ops.names.count("copy_") == 3


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param([], id="nothing"),
        pytest.param([values((3, 4))], id="one"),
        pytest.param([values((3, 4)), values((3, 4))], id="none pinned"),
        pytest.param([[values((3,))], [values((2,))]], id="lists"),
        pytest.param([values((3, 4)), values((3, 4, 1))], id="other rank"),
        pytest.param([values((3, 4)), values((3, 4)).double()], id="wider dtype"),
        pytest.param([values((3, 4)), values((3, 4)).long()], id="other dtype"),
        pytest.param([values((3, 4)).long(), values((3, 4))], id="lossy dtype"),
        pytest.param([values(()), values(())], id="scalars"),
        pytest.param([values((2, 0)), values((3, 0))], id="empty"),
        pytest.param([1, 2], id="no tensors"),
    ],
)
@pytest.mark.parametrize("name", FIELDS)
def test_other_batches_are_left_to_the_base(name: str, batch, request):
    if request.node.callspec.id.split("-")[-1] not in ("none pinned", "lists"):
        batch = [pin(t) if isinstance(t, torch.Tensor) else t for t in batch]

    def outcome(function):
        try:
            return function(FIELDS[name], batch)
        except Exception as e:
            return type(e)

    assert_same(outcome(reduce), outcome(reduce_as_base))


def test_a_shared_field_is_the_first_item():
    field = MultiModalSharedField(batch_size=2)
    batch = [pin(values((3, 4)))] * 2
    assert_same(reduce(field, batch), reduce_as_base(field, batch))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"device": None},
        {"device": None, "pin_memory": False},
        {"device": "cpu"},
        {"device": torch.device("cpu")},
        {"pin_memory": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("keep_on_cpu", [False, True])
def test_calls_that_stay_on_the_cpu_or_do_not_pin_are_the_bases(
    keep_on_cpu: bool, kwargs, monkeypatch
):
    monkeypatch.setattr(pinned_merge, "merge_pinned", None)  # would raise
    field = MultiModalFlatField(slices=[], dim=0, keep_on_cpu=keep_on_cpu)
    batch = [pin(values((3, 4), seed=seed)) for seed in range(2)]
    expected = torch.cat(batch)
    got = reduce(field, batch, **kwargs)
    assert torch.equal(got.cpu(), expected)


def test_a_field_kept_on_the_cpu_stays_there(monkeypatch):
    monkeypatch.setattr(pinned_merge, "merge_pinned", None)
    field = MultiModalFlatField(slices=[], dim=0, keep_on_cpu=True)
    batch = [pin(values((3, 4), seed=seed)) for seed in range(2)]
    got = reduce(field, batch)
    assert got.device == torch.device("cpu")
    assert torch.equal(got, torch.cat(batch))


def test_a_field_with_a_merge_of_its_own_is_left_to_it():
    class Reversed(MultiModalFlatField):
        def _reduce_data(self, batch, *, pin_memory):
            return torch.cat(batch[::-1])

    batch = [pin(values((3, 4), seed=seed)) for seed in range(2)]
    got = reduce(Reversed(slices=[]), batch)
    assert torch.equal(got.cpu(), torch.cat(batch[::-1]))


def test_many_small_pieces_are_joined_on_the_cpu(monkeypatch):
    """A copy each would take longer to issue."""
    monkeypatch.setattr(pinned_merge, "_MIN_PIECE_BYTES", 4096)
    small = [pin(values((1000,), torch.uint8, seed)) for seed in range(9)]
    with Ops() as ops:
        reduce(FIELDS["flat 0"], small)
    assert "cat" in ops.names
    large = pin(values((9 * 4096,), torch.uint8))
    with Ops() as ops:
        reduce(FIELDS["flat 0"], [*small, large][1:])
    assert "cat" not in ops.names


def test_it_is_off_by_default(monkeypatch):
    monkeypatch.undo()
    assert not BaseMultiModalField.merge_pinned_on_device


@st.composite
def batches(draw):
    """A field, and a batch that mostly fits it."""
    ndim = draw(st.integers(1, 4))
    size = st.integers(0, 4)
    shape = draw(st.lists(size, min_size=ndim, max_size=ndim))
    field = draw(
        st.one_of(
            st.builds(
                MultiModalFlatField,
                slices=st.just([]),
                dim=st.integers(-ndim, ndim - 1),
            ),
            st.just(MultiModalBatchedField()),
        )
    )
    ragged = draw(st.booleans())
    dtype = draw(st.sampled_from(DTYPES))
    batch = []
    for seed in range(draw(st.integers(1, 5))):
        sizes = list(shape)
        if ragged:
            sizes = draw(st.lists(size, min_size=ndim, max_size=ndim))
        elif isinstance(field, MultiModalFlatField):
            sizes[field.dim] = draw(size)
        kind = draw(st.sampled_from(["plain", "permuted", "strided", "expanded"]))
        if kind == "permuted":
            t = values(sizes[::-1], dtype, seed).permute(*range(ndim)[::-1])
        elif kind == "strided":
            t = values((*sizes, 2), dtype, seed)[..., 1]
        elif kind == "expanded":
            t = values((*sizes[:-1], 1), dtype, seed).expand(sizes)
        else:
            t = values(sizes, dtype, seed)
        if draw(st.booleans()) and not (HAS_CUDA and kind in ("strided", "expanded")):
            t = pin(t)
        batch.append(t)
    return field, batch


@settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(batches())
def test_any_batch_gives_what_the_base_gives(case):
    field, batch = case
    assert_same(reduce(field, batch), reduce_as_base(field, batch))


@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("name", FIELDS)
def test_copies_do_not_wait_for_the_device(name: str):
    """The copies are issued behind a long kernel, and the host goes on."""
    batch = [pin(values((512, 1024), seed=seed)) for seed in range(8)]
    expected = reduce_as_base(FIELDS[name], batch)
    reduce(FIELDS[name], batch)  # kernels are loaded when they are first used
    torch.accelerator.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(1_000_000_000)
    got = reduce(FIELDS[name], batch)
    done.record()
    assert not done.query()
    assert_same(got, expected)


@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("name", FIELDS)
def test_no_more_device_memory_than_a_piece_beyond_the_outcome(name: str):
    batch = [pin(values((512, 1024), seed=seed)) for seed in range(8)]
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    got = reduce(FIELDS[name], batch)
    peak = torch.accelerator.max_memory_allocated() - before
    assert peak <= got.nbytes + batch[0].nbytes + (2 << 20)
