"""Ctrl-C and SIGTERM: during training the first asks for a stop at the next step boundary, the second ends at once."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_GET_PDEATHSIG = 2


class TrainingInterruptedError(RuntimeError):
    """Training was asked to stop, and has stopped after ``step``."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step


class StopRequest:
    """Whether somebody asked for a stop; ``listen`` is the time in which signals ask for it.

    Attributes:
        is_made: the next step boundary is the last one.
        has_steps: training steps have started; before that there is nothing to save, and the first signal ends at once.
    """

    def __init__(self) -> None:
        self.is_made = self.has_steps = False
        self._parent = os.getppid() if _dies_with_parent() else None

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Handle the signals in here, on the main thread; the handlers that were there come back."""
        before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_orphan = self._parent is not None and os.getppid() != self._parent
        is_second, self.is_made = self.is_made, True
        if is_second or is_orphan or not self.has_steps:
            raise SystemExit(128 + number)
        logger.warning("asked to stop: this step is finished and saved; once more ends training at once")


def _dies_with_parent() -> bool:
    """Whether the kernel signals this process when its parent dies, which is then no request of a person."""
    found = ctypes.c_int(0)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_GET_PDEATHSIG, ctypes.byref(found))
    return found.value != 0
