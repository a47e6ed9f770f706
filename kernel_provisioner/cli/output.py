"""What people and programs see of a command: JSON on stdout, everything else on stderr.

Whoever reads may leave, stall or run out of space at any time; that never changes what a command
does. Names, sources and errors of a notebook are a stranger's text: control characters are taken
out before anything reaches a terminal.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import select
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from kernel_provisioner.plaintext import printable

_TICK_S = 0.5
_PATIENCE_S = 2.0
"""What is quicker needs no words."""
# A pipe that poll(2) calls writable takes PIPE_BUF (4096) bytes at once; UTF-8 has up to 4 each.
_PROGRESS_CHARS = 900


def mend_streams() -> None:
    """Give standard streams that the caller closed somewhere to go, and make text always fit.

    A closed descriptor would be the next file's or socket's, and what is printed would go there.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free descriptor is this one. Children get it as any standard stream.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (lives as long as the process)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def first_line(source: str, limit: int = 60) -> str:
    """Return the first line of a cell that says something, cut to ``limit`` characters."""
    lines = (line.strip() for line in source.splitlines())
    said = next((line for line in lines if line and not line.startswith("%")), "")
    return printable(said, limit).replace("\n", " ")


def emit(data: Mapping[str, object]) -> None:
    """Print one JSON object on stdout."""
    sys.stdout.write(json.dumps(data, indent=1) + "\n")


def say(text: str, limit: int = 2000) -> None:
    """Print one line on stderr, if it can be printed."""
    _put(sys.stderr, printable(text, limit) + "\n")


def deliver(text: str) -> OSError | ValueError | None:
    """Write a command's whole result to stdout; return why that was not possible."""
    return _put(sys.stdout, printable(text, len(text) + 1)) if text else None


def _put(stream: TextIO, text: str) -> OSError | ValueError | None:
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError) as error:
        _silence(stream)
        return error
    return None


def _silence(stream: TextIO) -> None:
    """Lead a broken stream to /dev/null: the interpreter flushes it again when it ends."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)


def _takes_more(stream: TextIO) -> bool:
    """Whether a write would not wait, as for a reader that stalled or a terminal at Ctrl-S."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), select.POLLOUT)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return True


class RunReporter:
    """Progress of a run on stderr: a line that is updated on a terminal, plain lines elsewhere.

    It can neither end a run nor hold it up: a broken stream goes silent, and what a stalled reader
    does not take is dropped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = False
        # Of a stream that is closed already.
        with contextlib.suppress(ValueError):
            self._live = stream.isatty()
        self._phases: list[str] = []
        self._running: tuple[str, float] | None = None
        self._cell: tuple[str, float] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def note(self, text: str) -> None:
        """Say something once; what is shown below goes on."""
        self._clear()
        self._line(f"  {text}")
        if self._live and self._running is not None:
            self._tick()

    def starting(self) -> None:
        """Say that the sandbox is being started, if it takes long: a microVM may need seconds."""
        self._running = ("starting the sandbox", time.monotonic())
        self._timer = asyncio.get_running_loop().call_later(_PATIENCE_S, self._still_starting)

    def _still_starting(self) -> None:
        self._timer = None
        if self._live:
            self._tick()
        else:
            self._line("  starting the sandbox ...")

    def ending(self) -> None:
        """Say that the run is being ended; a terminal shows that from now on, and no start."""
        self._running = ("ending the sandbox", time.monotonic())
        self.note("ending the sandbox and saving the notebook")

    def over(self) -> None:
        """Take away what is still shown."""
        self._clear()
        self._running = None

    def phase(self, name: str, seconds: float) -> None:
        """Collect the phases of the start; print them in one line once the sandbox is ready."""
        self._phases.append(f"{name} {seconds:.2f}")
        if name == "ready":
            self.over()
            self._line("  start  " + " · ".join(self._phases) + " s")

    def cell_started(self, number: int, total: int, source: str) -> None:
        """Show a running cell."""
        self._cell = self._running = (_label(number, total, source), time.monotonic())
        if self._live:
            self._tick()

    def cell_ended(self, number: int, total: int, seconds: float, state: str) -> None:
        """Show how a cell went."""
        assert self._cell is not None
        if self._running is self._cell:  # else the run is being ended, and that goes on
            self._running = None
        self.note(f"{self._cell[0]}  {state} in {seconds:.1f} s")

    def cell_skipped(self, number: int, total: int, source: str) -> None:
        """Show a cell that is not run."""
        self._line(f"  {_label(number, total, source)}  skipped")

    def _tick(self) -> None:
        assert self._running is not None
        title, began = self._running
        self._show(f"\r\x1b[2K  {title}  {time.monotonic() - began:.0f} s")
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            if self._live:
                self._show("\r\x1b[2K")

    def _line(self, text: str) -> None:
        self._show(printable(text, _PROGRESS_CHARS) + "\n")

    def _show(self, text: str) -> None:
        if _takes_more(self._stream):
            _put(self._stream, text)


def _label(number: int, total: int, source: str) -> str:
    return f"cell {number:>{len(str(total))}}/{total}  {first_line(source)}"
