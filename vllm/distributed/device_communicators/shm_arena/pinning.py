# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Pinning the arena for DMA, and knowing when DMA from it has ended (reader).

Everything here runs on the thread that dequeues: registering memory or
querying an event from another thread breaks a CUDA-graph capture in progress.
"""

import ctypes
from functools import cache
from typing import Any, Protocol

import torch

from vllm.distributed.device_communicators.shm_arena.segment import (
    ArenaSegment,
    MappedBytes,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.platform_utils import is_pin_memory_available

logger = init_logger(__name__)

_CU_EVENT_DISABLE_TIMING = 2
# Without it, memory that is mapped read-only cannot be registered.
_REGISTER_READ_ONLY = 8
_REGISTER_WRITABLE = 0


class Event(Protocol):
    """Something recorded on a device that completes later."""

    def query(self) -> bool: ...


def unpinnable_reason() -> str | None:
    """Why this process cannot pin memory for a device, or None if it can."""
    if not current_platform.is_cuda_alike():
        return f"no pinned memory on {current_platform.device_name}"
    if not is_pin_memory_available():
        return "pinned memory is not available"
    # Pinning must not be what creates a context, and on which device.
    if not torch.cuda.is_initialized():
        return "no device context in this process"
    return None


def is_capturing() -> bool:
    """Whether the current stream captures a graph: nothing may be recorded,
    queried or registered then."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def register_host_memory(address: int, nbytes: int, mode: int) -> str | None:
    """Pin `nbytes` bytes at `address`. Returns None, or why it failed."""
    from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

    try:
        cudart = CudaRTLibrary()
    except (AssertionError, AttributeError, OSError) as e:
        return f"could not load the CUDA runtime: {e}"
    code = cudart.cudaHostRegister(address, nbytes, mode)
    if code == 0:
        return None
    # A failure stays pending and would be raised by the next CUDA call, which
    # has nothing to do with it.
    cudart.cudaGetLastError()
    return f"cudaHostRegister returned {code}"


class _ContextEvent:
    """A driver event that covers all streams of a context."""

    def __init__(self, driver: ctypes.CDLL):
        self._driver = driver
        self._event = ctypes.c_void_p()

    def record(self) -> bool:
        """Record it over the current context; False if the driver refuses."""
        cu = self._driver
        context = ctypes.c_void_p()
        return (
            cu.cuEventCreate(ctypes.byref(self._event), _CU_EVENT_DISABLE_TIMING) == 0
            and cu.cuCtxGetCurrent(ctypes.byref(context)) == 0
            and cu.cuCtxRecordEvent(context, self._event) == 0
        )

    def query(self) -> bool:
        return self._driver.cuEventQuery(self._event) == 0

    def __del__(self) -> None:
        if self._event:
            self._driver.cuEventDestroy_v2(self._event)


@cache
def _driver_with_context_events() -> ctypes.CDLL | None:
    """The CUDA driver, if it can record an event over a whole context."""
    if not current_platform.is_cuda():
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        _ = driver.cuCtxRecordEvent
    except (OSError, AttributeError):
        return None
    return driver


def record_event() -> Event | None:
    """Record an event that completes when all work issued so far is done, or
    return None if that cannot be done now.

    Covers every stream of the context where the driver can do that
    (`cuCtxRecordEvent`). Elsewhere it covers the current stream only, so a
    copy from the arena that a model issues on a side stream must be waited for
    by the current stream before the tensor is dropped.
    """
    driver = _driver_with_context_events()
    if driver is not None:
        context_event = _ContextEvent(driver)
        # Not an event of the current stream instead: it would complete before
        # a copy on a side stream does.
        return context_event if context_event.record() else None
    event: Any = torch.cuda.Event()
    event.record()
    return event


class _CannotPin(Exception):
    """Says why."""


class PinnedPrefixes:
    """A mapping of the segment of which a prefix is pinned, and its successors.

    A DMA copy must lie inside one registration: one that crosses from a
    registration into the next fails, although both ends are pinned. So memory
    that is prepared later is not registered behind what is there; the segment
    is mapped anew and a longer prefix of the new mapping is registered.

    The mappings are read-only, where the device can pin such memory.

    Registrations last as long as the process: to unregister, DMA from every
    view must have ended, and a view may outlive the queue.

    Args:
        segment: The arena's segment.
        data_bytes: Bytes of slots in it.

    """

    # Keeps registered mappings from being unmapped; see above.
    _registered: list[MappedBytes] = []

    def __init__(self, segment: ArenaSegment, data_bytes: int):
        self._segment = segment
        self._data_bytes = data_bytes
        self._newest: MappedBytes | None = None
        # The device may not be able to pin what is read-only. A slow copy for
        # every tensor costs more than the guard is worth.
        self._modes = [_REGISTER_READ_ONLY, _REGISTER_WRITABLE]
        self.pinned_bytes = 0
        # Why there will be no further pinning, once that is known.
        self.failure: str | None = None

    def pin_to(self, nbytes: int) -> bool:
        """Pin the first `nbytes` bytes, if that is more than before and works.
        A failure is normal and final: it is logged, and views stay unpinned.
        Returns False if it was put off: ask again."""
        nbytes = min(nbytes, self._data_bytes)
        if self.failure is not None or nbytes <= self.pinned_bytes:
            return True
        if is_capturing():
            return False
        try:
            mapped = self._pin(nbytes)
        except _CannotPin as e:
            self.failure = str(e)
            # The writer's line at the start tells of a first step that failed.
            log = logger.info if self.pinned_bytes else logger.debug
            log(
                "Shm tensor arena: %d MiB pinned and no more (%s); copies to the "
                "device from the rest of it are pageable. A higher limit on locked "
                "memory (--ulimit memlock=-1) or on memory may help",
                self.pinned_bytes >> 20,
                self.failure,
            )
            return True
        self._registered.append(mapped)
        self._newest = mapped
        self.pinned_bytes = nbytes
        return True

    def _pin(self, nbytes: int) -> MappedBytes:
        """Map the segment anew and pin its first `nbytes` bytes. The mode that
        works first is the only one for the steps that follow.

        Raises:
            _CannotPin: None works.

        """
        if (reason := unpinnable_reason()) is not None:
            raise _CannotPin(reason)
        failures: list[str] = []
        for mode in self._modes:
            read_only = mode == _REGISTER_READ_ONLY
            try:
                mapped = MappedBytes(
                    self._segment.map(self._data_bytes, read_only=read_only)
                )
            except OSError as e:
                raise _CannotPin(f"cannot map it once more: {e}") from e
            failure = register_host_memory(mapped.address, nbytes, mode)
            if failure is None:
                self._modes = [mode]
                if failures:
                    logger.info(
                        "Shm tensor arena: pinned writable (read-only: %s); an "
                        "in-place operation on a received tensor would change "
                        "other workers' too",
                        failures[0],
                    )
                return mapped
            failures.append(failure)
        raise _CannotPin(failures[-1])

    def mapping_for(self, end: int) -> MappedBytes | None:
        """A mapping whose pinned prefix reaches byte `end`, or None."""
        return self._newest if end <= self.pinned_bytes else None
