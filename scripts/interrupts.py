# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Ctrl-C and its relatives as one exception, never in the middle of a clean-up."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_deferring = False
_pending: int | None = None
_raised = False


class Interrupted(BaseException):
    """The program was told to end.

    Like KeyboardInterrupt no `Exception`: nobody handles it in passing.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.exit_status = 128 + signum


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Turn the first of these signals into `Interrupted`, in the main thread."""
    global _raised
    _raised = False
    with handled_by(_handle):
        yield


@contextlib.contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let the function handle these signals.

    What the program was started to ignore (`nohup`, a background job) it ignores.
    """
    before = {
        signum: signal.signal(signum, handler)
        for signum in SIGNALS
        if signal.getsignal(signum) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for signum, former in before.items():
            signal.signal(signum, former)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let the block finish first, then raise.

    Blocking the signals instead would be inherited by a process started here.
    """
    global _deferring, _pending
    outer, _deferring = _deferring, True
    try:
        yield
    finally:
        _deferring = outer
        if not outer and _pending is not None:
            signum, _pending = _pending, None
            _interrupt(signum)


def _handle(signum: int, frame: FrameType | None) -> None:
    global _pending
    if _deferring:
        _pending = signum
    else:
        _interrupt(signum)


def _interrupt(signum: int) -> None:
    global _raised
    # An impatient second Ctrl-C must not stop the clean-up after the first.
    if not _raised:
        _raised = True
        raise Interrupted(signum)
