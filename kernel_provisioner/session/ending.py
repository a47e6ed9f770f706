"""Why a session ends, as data, and how the status of a process is told to a person."""

from __future__ import annotations

import contextlib
import signal
import time
from dataclasses import dataclass, field

from kernel_provisioner.errors import Reason


@dataclass(frozen=True, slots=True)
class Ending:
    """Why the session ends and what the person is told."""

    reason: Reason
    message: str
    status: int | None = None
    at: float = field(default_factory=time.time)
    """When it was decided, in seconds since the epoch: telling everybody takes a while."""


def describe_status(status: int) -> str:
    """Return ``exit status 3`` or ``signal SIGSEGV`` for a process status.

    The engine's reaper reports a signal as 128 + its number, as shells do.
    """
    number = -status if status < 0 else status - 128
    if status < 0 or status > 128:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(number).name}"
    return f"exit status {status}"
