# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The arena's pinned memory on a CUDA device."""

import pytest
import torch

from tests.distributed.arena_testing import (
    MIB,
    free_slots,
    is_writable,
    make_arenas,
    patterned,
)
from vllm.distributed.device_communicators.shm_arena import pinning

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

N_SLOTS = 64
REGISTER = pinning.register_host_memory
# Cycles that a kernel spins: about half a second, an age for a copy.
LONG = 1_000_000_000


@pytest.fixture
def arenas():
    """A writer and a reader past the barrier."""
    torch.cuda.init()
    writer, (reader,) = make_arenas(n_slots=N_SLOTS)
    writer.on_barrier()
    reader.on_barrier()
    assert reader._prefixes.failure is None
    return writer, reader


def send(arenas, t: torch.Tensor) -> torch.Tensor:
    writer, reader = arenas
    slot = writer.write_tensor(t)
    assert slot is not None
    return reader.get_tensor(slot, t.numel(), torch.uint8, tuple(t.shape))


def test_tensor_is_pinned_and_its_copy_to_the_device_is_exact(arenas):
    got = send(arenas, patterned(5 * MIB))
    assert got.is_pinned()
    assert torch.equal(got.to("cuda", non_blocking=True).cpu(), patterned(5 * MIB))


def test_pinned_tensor_cannot_be_written_to(arenas):
    got = send(arenas, patterned(MIB))
    assert got.is_pinned() and not is_writable(got)


def test_device_that_cannot_pin_read_only_memory_pins_it_writable(monkeypatch):
    """Without the flag CUDA refuses to, as a device that does not know it does."""
    real = pinning.register_host_memory
    refused = []

    def register(address: int, nbytes: int, *_: int) -> str | None:
        refused.append(real(address, nbytes, 0))
        return refused[-1]

    monkeypatch.setattr(pinning, "register_host_memory", register)
    torch.cuda.init()
    writer, (reader,) = make_arenas(n_slots=N_SLOTS)
    writer.on_barrier()
    reader.on_barrier()
    if refused[0] is None:
        pytest.skip("this device pins read-only memory without the flag too")
    assert refused[1:] == [None]
    # Would raise a pending error.
    assert torch.ones(10, device="cuda").sum().item() == 10
    got = send((writer, reader), patterned(5 * MIB))
    assert got.is_pinned() and is_writable(got)
    assert torch.equal(got.to("cuda", non_blocking=True).cpu(), patterned(5 * MIB))


@pytest.mark.parametrize("where", ["current stream", "side stream"])
def test_slot_is_not_reused_under_a_copy_in_flight(arenas, where: str):
    """The tensor is dropped while its copy waits behind a long kernel."""
    if where == "side stream" and pinning._driver_with_context_events() is None:
        pytest.skip("the driver cannot record an event over a context")
    writer, reader = arenas
    on_device = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream() if where == "side stream" else None
    got = send(arenas, patterned(MIB))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        on_device.copy_(got, non_blocking=True)
    del got
    reader.flush_releases()
    assert free_slots(writer) == N_SLOTS - 1, "released under the copy"
    for slot in range(1, N_SLOTS):  # all that is free, so that reuse would show
        assert writer.write_tensor(patterned(MIB, 1)) == slot
    assert writer.write_tensor(patterned(MIB, 1)) is None
    torch.accelerator.synchronize()
    assert torch.equal(on_device.cpu(), patterned(MIB))
    reader.flush_releases()
    assert writer.write_tensor(patterned(MIB, 1)) == 0


def register_twice(address: int, nbytes: int, mode: int) -> str | None:
    """Fails as "already registered", and leaves nothing registered: the next
    mapping may get the same address."""
    assert REGISTER(address, nbytes, mode) is None
    failure = REGISTER(address, nbytes, mode)
    assert int(torch.cuda.cudart().cudaHostUnregister(address)) == 0
    return failure


def test_failed_registration_leaves_no_error_behind(monkeypatch):
    monkeypatch.setattr(pinning, "register_host_memory", register_twice)
    torch.cuda.init()
    writer, (reader,) = make_arenas()
    writer.on_barrier()
    reader.on_barrier()
    assert reader._prefixes.failure == "cudaHostRegister returned 712"
    # Would raise a pending error.
    assert torch.ones(10, device="cuda").sum().item() == 10
    got = send((writer, reader), patterned(MIB))
    assert not got.is_pinned()
    assert torch.equal(got.cuda().cpu(), patterned(MIB))


def test_registration_that_fails_on_one_rank_is_the_other_ranks_no_concern(monkeypatch):
    torch.cuda.init()
    writer, (failing, other) = make_arenas(n_reader=2)
    writer.on_barrier()
    with monkeypatch.context() as patched:
        patched.setattr(pinning, "register_host_memory", register_twice)
        failing.on_barrier()
    other.on_barrier()
    slot = writer.write_tensor(patterned(MIB))
    assert slot is not None
    for reader, is_pinned in ((failing, False), (other, True)):
        got = reader.get_tensor(slot, MIB, torch.uint8, (MIB,))
        assert got.is_pinned() is is_pinned
        assert torch.equal(got.to("cuda", non_blocking=True).cpu(), patterned(MIB))


def test_capture_with_slots_in_flight(arenas):
    """A flush in a capture does nothing; the capture and the release survive."""
    writer, reader = arenas
    got = send(arenas, patterned(MIB))
    on_device = got.to("cuda", non_blocking=True)
    x = torch.ones(10, device="cuda")
    torch.accelerator.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        del got
        reader.flush_releases()
        reader.while_waiting(None)
        y = x * 2
    graph.replay()
    torch.accelerator.synchronize()
    assert y.sum().item() == 20 and torch.equal(on_device.cpu(), patterned(MIB))
    assert free_slots(writer) == N_SLOTS - 1
    reader.flush_releases()
    torch.accelerator.synchronize()
    reader.flush_releases()
    assert free_slots(writer) == N_SLOTS


def test_longer_prefix_is_pinned_anew(arenas, monkeypatch):
    """Views from before stay valid and pinned; one across the first prefix's end
    lies in the second prefix."""
    _, reader = arenas
    monkeypatch.setattr(
        "vllm.distributed.device_communicators.shm_tensor_arena.PREPARE_STEP_BYTES",
        4 * MIB,
    )
    writer, (reader,) = make_arenas(n_slots=16)
    writer.on_barrier()
    reader.on_barrier()
    assert reader._prefixes.pinned_bytes == 4 * MIB
    old = send((writer, reader), patterned(3 * MIB))
    across = send((writer, reader), patterned(3 * MIB, 1))
    assert old.is_pinned() and not across.is_pinned()
    assert torch.equal(across.cuda().cpu(), patterned(3 * MIB, 1))
    reader._prefixes.pin_to(8 * MIB)
    message = send((writer, reader), patterned(MIB, 2))
    assert message.is_pinned()
    for t, seed in ((old, 0), (message, 2)):
        assert torch.equal(
            t.to("cuda", non_blocking=True).cpu(), patterned(len(t), seed)
        )
