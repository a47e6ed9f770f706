"""Which interrupts reach a cell: those for it, that come while its code runs, and no later one.

ipykernel raises KeyboardInterrupt anywhere in its handling of a request. One that comes just after
the cell's code has ended - a deadline's, a person's - then takes the reply away, and its client
waits for ever. Here it does nothing: the reply is under way. And a deadline's interrupt that comes
when the next cell runs already does not end that one (3 of 48 did). One that comes while a cell is
read, or between two of its statements, ends it there: 3 of 200 came so on a busy machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from types import CodeType, FrameType, TracebackType
from typing import Any, ClassVar

from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelbase import Kernel
from IPython.core.events import EventManager
from IPython.core.interactiveshell import InteractiveShell

# It runs a cell's statements one by one, and turns an interrupt into the cell's error.
_STATEMENTS: set[CodeType] = {InteractiveShell.run_ast_nodes.__code__}
# So do these with what they call, which is a person's code, too.
_RUN_CODE: set[CodeType] = {
    InteractiveShell.run_code.__code__,
    InteractiveShell.user_expressions.__code__,
    EventManager.trigger.__code__,
}
_CELL = Kernel.execute_request.__code__
_REQUEST = Kernel.dispatch_shell.__code__


class Place(Enum):
    """Where an interrupt met a request."""

    USER_CODE = auto()
    """KeyboardInterrupt may be raised: user code runs in the frame or called it."""
    BETWEEN = auto()
    """Between two statements of a cell, where it may be raised, too."""
    OUTSIDE = auto()
    """Before or after the cell's code, where it would take the reply away."""


def find_place(frame: FrameType | None) -> Place:
    """Return where this frame stands. Of other requests than cells every part is user code."""
    first, cell = frame, False
    while frame is not None:
        code = frame.f_code
        if code in _RUN_CODE and frame is not first:
            return Place.USER_CODE
        if code in _STATEMENTS:
            return Place.BETWEEN
        cell = cell or code is _CELL
        if code is _REQUEST:
            return Place.OUTSIDE if cell else Place.USER_CODE
        frame = frame.f_back
    return Place.OUTSIDE


def _between_statements() -> KeyboardInterrupt:
    """Return an interrupt that is shown without the frames of IPython in which it came."""
    error: Any = KeyboardInterrupt("between two statements of the cell")
    error._render_traceback_ = lambda: [f"KeyboardInterrupt: {error}"]
    interrupt: KeyboardInterrupt = error
    return interrupt


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
        self._request = ""
        self._begun = self._came_early = False
        self._run: Any = shell.run_ast_nodes
        shell.run_ast_nodes = self._run_statements

    async def _run_statements(
        self,
        nodelist: Any,
        cell_name: str,
        interactivity: str = "last_expr",
        compiler: Any = compile,
        result: Any = None,
    ) -> Any:
        """Run a cell's statements, unless an interrupt came before them."""
        # None is for a subshell's cell, which runs in another thread.
        main = threading.current_thread() is threading.main_thread()
        self._begun = self._begun or main
        if not (main and self._came_early):
            return await self._run(nodelist, cell_name, interactivity, compiler, result)
        self._came_early = False
        # As it ends a cell in which an error is raised between two statements.
        try:
            raise _between_statements()
        except KeyboardInterrupt as error:
            if result is not None:
                result.error_before_exec = error
            self.shell.showtraceback()  # type: ignore[union-attr]
            return True

    def pre_handler_hook(self) -> None:
        """Take interrupts while a request is handled; ``post_handler_hook`` ends that."""
        if threading.current_thread() is not threading.main_thread():
            return  # a subshell's: no signal comes there, and what is kept here is not of its cell
        self._named()  # what came before this request was for another
        # Kept, because the event loop, from which a cell that awaits is interrupted, has no parent.
        parent: Any = self.get_parent("shell")  # type: ignore[no-untyped-call]
        msg_id = parent.get("header", {}).get("msg_id", "")
        self._request = hashlib.sha256(msg_id.encode()).hexdigest()
        self._begun = self._came_early = False
        self.saved_sigint_handler: Any = signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if not self._is_for_this_request():
            return
        # Also where it is raised: what is called before a cell may swallow it.
        self._came_early = self._came_early or not self._begun
        place = find_place(frame)
        if place is Place.USER_CODE:
            signal.default_int_handler(signum, frame)
        elif place is Place.BETWEEN:
            raise _between_statements()

    @contextmanager
    def _cancel_on_sigint(self, future: Any) -> Iterator[None]:
        """While a cell awaits, ipykernel cancels it: also only if the interrupt is for it.

        That waits for the event loop, which a cell that computes keeps busy: there it is raised.
        """
        loop = asyncio.get_running_loop()
        with super()._cancel_on_sigint(future):
            cancel: Any = signal.getsignal(signal.SIGINT)

            def interrupt(signum: int, frame: FrameType | None) -> None:
                if not self._is_for_this_request():
                    return
                self._came_early = self._came_early or not self._begun
                if find_place(frame) is Place.USER_CODE:
                    signal.default_int_handler(signum, frame)
                elif self._begun:
                    # A task that is cancelled before it begins takes the reply away.
                    cancel(signum, frame)
                    # It asks the loop, and does not wake it: 18 s of a sleep of 20 (measured).
                    loop.call_soon_threadsafe(lambda: None)

            signal.signal(signal.SIGINT, interrupt)
            yield

    def _is_for_this_request(self) -> bool:
        named = self._named()
        return not named or named == self._request

    def _named(self) -> str:
        """Return what the host named last since the last call."""
        try:
            names = os.read(self.targets, 65536).split()
        except OSError:  # nothing came, or user code closed it
            return ""
        return names[-1].decode() if names else ""


_STATEMENTS.add(SandboxKernel._run_statements.__code__)
