"""What people and programs see of a command: JSON on stdout, everything else on stderr.

Names, sources and errors of a notebook are a stranger's text: control characters are taken out
before anything reaches a terminal.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Mapping
from typing import TextIO

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)?")
_TICK_S = 0.5


def printable(text: str, limit: int = 2000) -> str:
    """Return ``text`` without terminal escapes and control characters, at most ``limit`` long.

    Line feeds stay; so do printable characters of any script.
    """
    plain = _ESCAPES.sub("", text[: 4 * limit])
    kept = "".join(char if char == "\n" or char.isprintable() else " " for char in plain)
    return kept if len(kept) <= limit else kept[: limit - 1] + "…"


def first_line(source: str, limit: int = 60) -> str:
    """Return the first line of a cell that says something, cut to ``limit`` characters."""
    lines = (line.strip() for line in source.splitlines())
    said = next((line for line in lines if line and not line.startswith("%")), "")
    return printable(said, limit).replace("\n", " ")


def emit(data: Mapping[str, object]) -> None:
    """Print one JSON object on stdout."""
    sys.stdout.write(json.dumps(data, indent=1) + "\n")


def say(text: str) -> None:
    """Print one line on stderr."""
    print(printable(text), file=sys.stderr, flush=True)


class RunReporter:
    """Progress of a run on stderr: a line that is updated on a terminal, plain lines elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._phases: list[str] = []
        self._running: tuple[str, float] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def note(self, text: str) -> None:
        """Say something once."""
        self._clear()
        self._line(f"  {text}")

    def phase(self, name: str, seconds: float) -> None:
        """Collect the phases of the start; print them in one line once the sandbox is ready."""
        self._phases.append(f"{name} {seconds:.2f}")
        if name == "ready":
            self._line("  start  " + " · ".join(self._phases) + " s")

    def cell_started(self, number: int, total: int, source: str) -> None:
        """Show a running cell."""
        self._running = (_label(number, total, source), time.monotonic())
        if self._live:
            self._tick()

    def cell_ended(self, number: int, total: int, seconds: float, state: str) -> None:
        """Show how a cell went."""
        self._clear()
        assert self._running is not None
        title, _ = self._running
        self._running = None
        self._line(f"  {title}  {state} in {seconds:.1f} s")

    def cell_skipped(self, number: int, total: int, source: str) -> None:
        """Show a cell that is not run."""
        self._line(f"  {_label(number, total, source)}  skipped")

    def _tick(self) -> None:
        assert self._running is not None
        title, began = self._running
        self._stream.write(f"\r\x1b[2K  {title}  {time.monotonic() - began:.0f} s")
        self._stream.flush()
        self._timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._stream.write("\r\x1b[2K")

    def _line(self, text: str) -> None:
        self._stream.write(printable(text) + "\n")
        self._stream.flush()


def _label(number: int, total: int, source: str) -> str:
    return f"cell {number:>{len(str(total))}}/{total}  {first_line(source)}"
