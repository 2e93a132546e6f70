# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""What the tests of the arena share."""

import gc
import io
import pickle
from pathlib import Path

import torch

from vllm.distributed.device_communicators.shm_tensor_arena import (
    ShmTensorArena,
    _ArenaPickler,
)

MIB = 1 << 20


def make_arenas(
    n_reader: int = 1, slot_bytes: int = MIB, n_slots: int = 8
) -> tuple[ShmTensorArena, list[ShmTensorArena]]:
    """A writer's arena and all its readers', in this process."""
    writer = ShmTensorArena(n_reader, slot_bytes=slot_bytes, n_slots=n_slots)
    handle = writer.handle()
    readers = [ShmTensorArena(*handle, reader_rank=rank) for rank in range(n_reader)]
    return writer, readers


def dumps(arena: ShmTensorArena, obj: object) -> tuple[bytes, list]:
    """Pickle as a queue with this arena does: the message and its oob buffers."""
    buffers: list = []
    file = io.BytesIO()
    _ArenaPickler(file, arena, buffer_callback=buffers.append).dump(obj)
    return file.getvalue(), [buffer.raw() for buffer in buffers]


def loads(reader: ShmTensorArena, message: tuple[bytes, list]) -> object:
    """Load as the queue of this reader does."""
    reader.before_dequeue()
    return pickle.loads(message[0], buffers=message[1])


def free_slots(writer: ShmTensorArena) -> int:
    """How many tensors of one slot the arena takes now."""
    slots = []
    while (slot := writer.write_tensor(torch.zeros(1))) is not None:
        slots.append(slot)
    writer.give_back(slots)
    return len(slots)


def bytes_of(t: torch.Tensor) -> bytes:
    return t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def is_in_shared_memory(t: torch.Tensor, name: str) -> bool:
    """Whether a tensor's first and last byte lie in mappings of a segment."""
    return name in mapping_of(t)


def is_writable(t: torch.Tensor) -> bool:
    """Whether the memory under a tensor may be written to."""
    return mapping_of(t).startswith("rw")


def mapping_of(t: torch.Tensor) -> str:
    """Permissions and file of the mapping that a tensor lies in, or nothing."""
    first = t.data_ptr()
    last = first + t.numel() * t.element_size() - 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, rest = line.partition(" ")
        start, end = (int(x, 16) for x in span.split("-"))
        if start <= first and last < end:
            return rest
    return ""


def in_dev_shm(*names: str) -> set[str]:
    """Which of these names are there, once what is garbage is collected. Not a
    look at the whole folder: others use it too."""
    gc.collect()
    return {name for name in names if Path("/dev/shm", name).exists()}


def patterned(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
