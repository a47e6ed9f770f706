"""Which interrupts reach a cell: those for it, that come while its code runs, and no later one.

ipykernel raises KeyboardInterrupt anywhere in its handling of a request. One that comes just after
the cell's code has ended - a deadline's, a person's - then takes the reply away, and its client
waits for ever. Here it does nothing: the reply is under way. And a deadline's interrupt that comes
when the next cell runs already does not end that one (3 of 48 did).
"""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, TracebackType
from typing import Any, ClassVar

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


def _show(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    tb_offset: int | None = None,
) -> None:
    """Show an interrupt as ipykernel does: without the frame of the handler that raised it."""
    last = trace
    while last is not None and last.tb_next is not None:
        if last.tb_next.tb_frame.f_code is SandboxKernel._interrupt.__code__:
            last.tb_next = None
            break
        last = last.tb_next
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset, running_compiled_code=True)


class SandboxKernel(IPythonKernel):
    """IPythonKernel whose replies no interrupt can take away.

    ``targets`` is a pipe in which the host names the request that an interrupt of its own is for,
    by the sha256 of its message id; a person's interrupt is for whatever runs.
    """

    targets: ClassVar[int]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        shell: Any = self.shell
        shell.set_custom_exc((KeyboardInterrupt,), _show)

    def pre_handler_hook(self) -> None:
        """Take interrupts while a request is handled; ``post_handler_hook`` ends that."""
        self._named()  # what came before this request was for another
        self.saved_sigint_handler: Any = signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._is_for_this_request() and reaches_user_code(frame):
            signal.default_int_handler(signum, frame)

    @contextmanager
    def _cancel_on_sigint(self, future: Any) -> Iterator[None]:
        """While a cell awaits, ipykernel cancels it: also only if the interrupt is for it."""
        with super()._cancel_on_sigint(future):
            cancel: Any = signal.getsignal(signal.SIGINT)

            def interrupt(signum: int, frame: FrameType | None) -> None:
                if self._is_for_this_request():
                    cancel(signum, frame)

            signal.signal(signal.SIGINT, interrupt)
            yield

    def _is_for_this_request(self) -> bool:
        named = self._named()
        parent: Any = self.get_parent("shell")  # type: ignore[no-untyped-call]
        msg_id = parent.get("header", {}).get("msg_id", "")
        return not named or named == hashlib.sha256(msg_id.encode()).hexdigest()

    def _named(self) -> str:
        """Return what the host named last since the last call."""
        try:
            names = os.read(self.targets, 65536).split()
        except OSError:  # nothing came, or user code closed it
            return ""
        return names[-1].decode() if names else ""
