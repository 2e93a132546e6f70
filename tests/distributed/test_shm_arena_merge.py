# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Images that lie in the arena are merged on the device, straight from there."""

from types import SimpleNamespace

import pytest
import torch

from tests.distributed.arena_testing import MIB, free_slots, make_arenas, patterned
from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalFieldElem,
    MultiModalFlatField,
)
from vllm.v1.worker.worker_base import WorkerWrapperBase

N_SLOTS = 64
FIELD = MultiModalFlatField(slices=[], dim=0)


@pytest.mark.parametrize(
    ("flag", "backend", "is_on"),
    [(False, "mp", False), (True, "mp", True), (True, "uni", False)],
)
def test_the_flag_turns_it_on_in_a_process_of_its_workers(
    flag: bool, backend: str, is_on: bool, monkeypatch
):
    monkeypatch.setattr(BaseMultiModalField, "merge_pinned_on_device", False)
    parallel_config = SimpleNamespace(
        enable_shm_tensor_arena=flag,
        distributed_executor_backend=backend,
        worker_cls=None,
    )
    config = SimpleNamespace(
        parallel_config=parallel_config,
        enable_trace_function_call_for_thread=lambda: None,
    )
    # No class of a worker: it goes no further than that.
    with pytest.raises(ValueError, match="worker_cls"):
        WorkerWrapperBase().init_worker([{"vllm_config": config}])
    assert BaseMultiModalField.merge_pinned_on_device is is_on


def merge(batch: list[torch.Tensor]) -> torch.Tensor:
    elems = [MultiModalFieldElem(data=data, field=FIELD) for data in batch]
    merged = FIELD.reduce_data(elems, device="cuda", pin_memory=True)
    assert isinstance(merged, torch.Tensor)
    return merged


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_slots_are_held_until_the_merge_is_done(monkeypatch):
    """The images are dropped while their copies wait behind a long kernel."""
    monkeypatch.setattr(BaseMultiModalField, "merge_pinned_on_device", True)
    torch.cuda.init()
    writer, (reader,) = make_arenas(n_slots=N_SLOTS)
    writer.on_barrier()
    reader.on_barrier()
    images = [patterned(MIB, seed).view(-1, 1024) for seed in range(8)]
    views = []
    for image in images:
        slot = writer.write_tensor(image)
        assert slot is not None
        views.append(reader.get_tensor(slot, MIB, torch.uint8, tuple(image.shape)))
    merge(views)  # what is loaded lazily is loaded now
    torch.accelerator.synchronize()

    # About half a second, an age for a copy.
    torch.cuda._sleep(1_000_000_000)
    merged = merge(views)
    del views
    reader.flush_releases()
    assert free_slots(writer) == N_SLOTS - len(images), "released under the copies"
    other = torch.zeros(MIB, dtype=torch.uint8)
    while writer.write_tensor(other) is not None:
        pass
    torch.accelerator.synchronize()
    reader.flush_releases()
    assert free_slots(writer) == len(images)
    assert torch.equal(merged.cpu(), torch.cat(images))
