"""Which interrupts reach a cell: those that come while its code runs, and no later one.

ipykernel raises KeyboardInterrupt anywhere in its handling of a request. One that comes just after
the cell's code has ended - a deadline's, a person's - then takes the reply away, and its client
waits for ever. Here it does nothing: the reply is under way.
"""

from __future__ import annotations

import signal
from types import CodeType, FrameType
from typing import Any

from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelbase import Kernel
from IPython.core.events import EventManager
from IPython.core.interactiveshell import InteractiveShell

# What these call is a person's code, and they turn its interrupt into the cell's error.
_RUN_CODE: set[CodeType] = {
    InteractiveShell.run_code.__code__,
    InteractiveShell.user_expressions.__code__,
    EventManager.trigger.__code__,
}
_CELL = Kernel.execute_request.__code__
_REQUEST = Kernel.dispatch_shell.__code__


def reaches_user_code(frame: FrameType | None) -> bool:
    """Whether KeyboardInterrupt may be raised in this frame: user code runs in it or called it.

    Of other requests than cells (comm messages, completion) every part may be interrupted.
    """
    first, cell = frame, False
    while frame is not None:
        code = frame.f_code
        if code in _RUN_CODE:
            return frame is not first
        cell = cell or code is _CELL
        if code is _REQUEST:
            return not cell
        frame = frame.f_back
    return False


def _interrupt(signum: int, frame: FrameType | None) -> None:
    if reaches_user_code(frame):
        signal.default_int_handler(signum, frame)


class SandboxKernel(IPythonKernel):
    """IPythonKernel whose replies no interrupt can take away."""

    def pre_handler_hook(self) -> None:
        """Take interrupts while a request is handled; ``post_handler_hook`` ends that."""
        self.saved_sigint_handler: Any = signal.signal(signal.SIGINT, _interrupt)
