# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Merging tensors that are already pinned, on the device.

`BaseMultiModalField.reduce_data` joins the tensors of several items on the CPU,
in new pinned memory, and copies the outcome to the device. Where the tensors lie
in pinned memory already, as what comes through the tensor arena does, each can be
copied to its place on the device instead. What is not pinned among them is copied to
pinned memory first, alone.

Left to `reduce_data`: a batch of which nothing is pinned, small pieces, dtypes to
convert, fields with a merge of their own, and what stays on the CPU.
"""

import math
from collections.abc import Sequence

import torch

from vllm.multimodal.inputs import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFlatField,
    NestedTensors,
)

# Below this a copy of its own takes longer to issue (about 10 us) than the piece
# takes to be joined with others on the CPU.
_MIN_PIECE_BYTES = 256 << 10


def merge_pinned(
    field: BaseMultiModalField,
    batch: Sequence[NestedTensors],
    device: torch.types.Device,
) -> torch.Tensor | None:
    """Merge a batch on the device, from pinned memory without a copy on the CPU.

    The copies are asynchronous, on the current stream: whoever reuses the memory
    of a pinned tensor waits for them, as after `Tensor.to(non_blocking=True)`.

    Args:
        field: The field that the batch belongs to.
        batch: Its data for each item. What is not pinned, or not contiguous, is
            first copied to pinned memory.
        device: An accelerator.

    Returns:
        What `field.reduce_data` makes of the batch, to the stride, or None where
        that has no copy on the CPU to save, or converts dtypes, or raises.

    """
    tensors = [t for t in batch if type(t) is torch.Tensor]
    if len(batch) < 2 or len(tensors) < len(batch):
        return None
    first = tensors[0]
    for t in tensors:
        if (
            t.dtype is not first.dtype
            or t.ndim != first.ndim
            or not t.is_cpu
            or t.layout is not torch.strided
            or t.requires_grad
        ):
            return None
    merged = _shape_and_places(field, [t.shape for t in tensors])
    if merged is None:
        return None
    shape, places = merged
    is_pinned = [t.is_contiguous() and t.is_pinned() for t in tensors]
    pinned_bytes = sum(t.nbytes for t, pinned in zip(tensors, is_pinned) if pinned)
    if pinned_bytes < _MIN_PIECE_BYTES * len(tensors):
        return None
    is_covered = sum(t.numel() for t in tensors) == math.prod(shape)
    make = torch.empty if is_covered else torch.zeros
    out = make(shape, dtype=first.dtype, device=device)
    for t, pinned, place in zip(tensors, is_pinned, places):
        if not pinned:
            t = _to_pinned(t)
        out[place].copy_(t, non_blocking=True)
    return out


def _to_pinned(t: torch.Tensor) -> torch.Tensor:
    return t.new_empty(t.shape, pin_memory=True).copy_(t)


def _shape_and_places(
    field: BaseMultiModalField, shapes: list[torch.Size]
) -> tuple[list[int], list[int] | list[tuple[slice, ...]]] | None:
    """The merged tensor's shape and where in it each tensor goes, or None if the
    field does not merge such tensors. They have the same number of dimensions."""
    if type(field) is MultiModalBatchedField:
        if len(set(shapes)) > 1:
            return None
        return [len(shapes), *shapes[0]], list(range(len(shapes)))
    if type(field) is MultiModalFlatField:
        ndim = len(shapes[0])
        dim = field.dim + ndim * (field.dim < 0)
        if not 0 <= dim < ndim:
            return None
        # Other dimensions are padded with zeros to the largest.
        shape = [max(sizes) for sizes in zip(*shapes)]
        shape[dim] = sum(sizes[dim] for sizes in shapes)
        places = []
        start = 0
        for sizes in shapes:
            place = [slice(size) for size in sizes]
            place[dim] = slice(start, start + sizes[dim])
            places.append(tuple(place))
            start += sizes[dim]
        return shape, places
    return None
