# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Copying and touching memory with several threads."""

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count

from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import available_cpu_count

# Work unit of one thread. Small enough to even out threads that start late,
# large enough that taking the next one (about 1 us) does not show.
_CHUNK_BYTES = 4 << 20
# Beyond 16 threads a copy of 200 MiB gained nothing on a 32-core host:
# 34-43 ms with 1 thread, 6.7 ms with 8, 4.5 ms with 16.
_MAX_THREADS = 16


class CopyPool:
    """Threads that sleep until there is memory to copy.

    EngineCore runs with one torch thread, so `Tensor.copy_` is single-threaded
    there. `ctypes` calls release the GIL, so plain Python threads over
    `memmove` reach memory bandwidth without touching torch's settings. The
    calling thread takes part; with one CPU it is the only one.
    """

    def __init__(self) -> None:
        self._n_threads = min(available_cpu_count(), _MAX_THREADS)
        self._executor: ThreadPoolExecutor | None = None
        self._pid = -1

    def copy(self, dst: int, src: int, nbytes: int) -> None:
        """Copy `nbytes` bytes between two addresses that do not overlap.
        Returns when all bytes are there."""
        self.for_each_chunk(
            nbytes,
            lambda offset, size: ctypes.memmove(dst + offset, src + offset, size),
        )

    def for_each_chunk(self, nbytes: int, fn: Callable[[int, int], object]) -> None:
        """Call `fn(offset, size)` for chunks that together cover `nbytes`
        bytes, from several threads at once. Returns, or raises, when no call is
        running and none will start.

        Raises:
            BaseException: What a call raised.

        """
        job = _Job(nbytes, fn)
        try:
            # RuntimeError: no more threads, or the interpreter is shutting down.
            # Whoever is there does all of it.
            with suppress(RuntimeError):
                for _ in range(min(self._n_threads, job.n_chunks) - 1):
                    self._pool().submit(job.help)
            job.work()
        finally:
            job.close()
        if job.error is not None:
            raise job.error

    def _pool(self) -> ThreadPoolExecutor:
        # Threads do not survive a fork: a child that copies needs its own.
        if self._executor is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._executor = ThreadPoolExecutor(
                self._n_threads - 1, thread_name_prefix="ShmTensorArenaCopy"
            )
        return self._executor


class _Job:
    """Chunks for several threads to work through.

    Helpers are counted from when they begin and not by their futures: one that
    begins late, after the caller was interrupted and has gone on, must do
    nothing, since the memory may be somebody else's by then.
    """

    def __init__(self, nbytes: int, fn: Callable[[int, int], object]):
        self._nbytes = nbytes
        self._fn = fn
        self.n_chunks = cdiv(nbytes, _CHUNK_BYTES)
        # `next` on a count is atomic under the GIL: no lock, no chunk twice.
        self._chunks = count()
        self._changed = threading.Condition()
        self._helping = 0
        self._closed = False
        # What a helper raised.
        self.error: BaseException | None = None

    def work(self) -> None:
        """Take part, on the caller's thread."""
        while (i := next(self._chunks)) < self.n_chunks:
            offset = i * _CHUNK_BYTES
            self._fn(offset, min(_CHUNK_BYTES, self._nbytes - offset))

    def help(self) -> None:
        """Take part, on a thread of the pool."""
        with self._changed:
            if self._closed:
                return
            self._helping += 1
        try:
            self.work()
        except BaseException as e:
            self.error = e
        finally:
            with self._changed:
                self._helping -= 1
                self._changed.notify()

    def close(self) -> None:
        """Wait for the helpers that have begun; the others do nothing."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._helping == 0)
