# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The arena's shared-memory segment: its name, its life and its mappings."""

import ctypes
import errno
import mmap
import os
import secrets
import sys
from contextlib import suppress
from multiprocessing import shared_memory
from unittest.mock import patch

import numpy as np

from vllm.distributed.device_communicators.shm_broadcast import (
    SHM_PATH,
    check_shm_free_space,
)

_NAME_PREFIX = "vllm_arena_"

# Linux 5.14; not in the mmap module.
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23

# mmap.madvise would hold the GIL throughout.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _SharedMemory(shared_memory.SharedMemory):
    """Goes quietly: at the end of the interpreter, views of `buf` that nobody has
    released may die after it."""

    def __del__(self) -> None:
        # Not `suppress`: this module's names may be gone before the object is.
        try:  # noqa: SIM105
            self.close()
        except (BufferError, OSError):
            pass


class _OpenedSharedMemory(_SharedMemory):
    """Another process's. Where it cannot be mapped (a limit, no shared memory at
    all), SharedMemory would remove the name, and no other reader could open it."""

    def unlink(self) -> None:
        pass


class MappedBytes:
    """A mapping as a buffer that torch and numpy make views of.

    It does not say whether the mapping is read-only: torch knows no read-only
    tensors and warns of each that it is to make.

    Args:
        mapping: Lives as long as this, or any view of `buffer`.

    """

    def __init__(self, mapping: mmap.mmap):
        self.mapping = mapping
        self.address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
        self.buffer = (ctypes.c_uint8 * len(mapping)).from_address(self.address)
        # A view holds the buffer and nothing else.
        self.buffer.mapping = mapping  # type: ignore[attr-defined]

    def populate(self, offset: int, nbytes: int, write: bool) -> None:
        """Touch the pages of a range, which changes no byte. Where the kernel
        cannot, the first access to each does it at the cost of a fault."""
        advice = _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ
        _libc.madvise(self.address + offset, nbytes, advice)


class ArenaSegment:
    """One POSIX shared-memory segment, created or opened.

    Tensors are built over mappings made by `map`, never over
    `SharedMemory.buf`: `SharedMemory.close` raises BufferError while a view
    lives, whereas a plain `mmap` object is unmapped quietly when its last view
    is gone, which may be after the queue.

    Args:
        total_bytes: Size of the segment in bytes.
        reserve_bytes: Bytes that must be free in /dev/shm beside it.
        name: None creates the segment (writer); else the one to open (reader).

    Raises:
        RuntimeError: If the platform is not Linux, or /dev/shm has no room.
        FileNotFoundError: If there is no segment of that name here (another
            mount namespace, say).
        ValueError: If the segment found is not an arena of this size.

    """

    def __init__(self, total_bytes: int, reserve_bytes: int, name: str | None = None):
        if sys.platform != "linux":
            raise RuntimeError(
                "--enable-shm-tensor-arena needs Linux: leave it out on this platform"
            )
        # A forked child inherits this object and must not remove the name.
        self._creator_pid = os.getpid() if name is None else None
        if name is None:
            check_shm_free_space(
                total_bytes + reserve_bytes,
                allocation_name="the tensor arena of --enable-shm-tensor-arena",
            )
            # SharedMemory's own names have 32 random bits; whoever knows the
            # name and is the same user can open the segment, so use 128.
            # Sparse: its size takes no page.
            self.shared_memory = _SharedMemory(
                name=_NAME_PREFIX + secrets.token_hex(16),
                create=True,
                size=total_bytes,
            )
        else:
            # Before Python 3.13 SharedMemory also registers segments that it
            # only opens, and the reader's tracker would unlink the writer's.
            with patch(
                "multiprocessing.resource_tracker.register",
                lambda *args, **kwargs: None,
            ):
                self.shared_memory = _OpenedSharedMemory(name=name)
        self.name = self.shared_memory.name
        self.fd = -1
        try:
            # Before a byte of it is touched: it may be somebody else's.
            is_arena = self.name.startswith(_NAME_PREFIX)
            if not is_arena or self.shared_memory.size != total_bytes:
                raise ValueError(
                    f"shared-memory segment {self.name} of "
                    f"{self.shared_memory.size} bytes is not an arena: expected "
                    f"{_NAME_PREFIX}* of {total_bytes} bytes"
                )
            # Our own descriptor: mapping anew must work after the name is gone.
            self.fd = os.open(
                os.path.join(SHM_PATH, self.name),
                os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW,
            )
        except BaseException:
            self.close()
            raise

    def take_pages(self, offset: int, nbytes: int) -> bool:
        """Take the pages of a range; False, and none taken, if there is no room.

        Touching a page that a full tmpfs has not got is SIGBUS, so whatever is
        touched must be taken here before.
        """
        try:
            os.posix_fallocate(self.fd, offset, nbytes)
        except OSError as e:
            if e.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise
            return False
        return True

    def map(self, nbytes: int, read_only: bool = False) -> mmap.mmap:
        """Map the first `nbytes` bytes once more, at an address of its own."""
        prot = mmap.PROT_READ if read_only else mmap.PROT_READ | mmap.PROT_WRITE
        return mmap.mmap(self.fd, nbytes, prot=prot)

    def unlink(self) -> None:
        """Remove the name; mappings stay valid. Only the creator's first call
        does anything."""
        if self._creator_pid == os.getpid():
            self._creator_pid = None
            # Somebody may have cleaned /dev/shm by hand.
            with suppress(FileNotFoundError):
                self.shared_memory.unlink()

    def close(self) -> None:
        """Remove the name and close; what `map` has made stays valid."""
        self.unlink()
        self.shared_memory.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
