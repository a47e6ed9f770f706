"""What a headless run is asked, what it reports while it runs, and how it went.

Plain data between the command line, the runner and a caller of the Python API; no I/O here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kernel_provisioner.errors import ENDS, EXIT_DONE, EXIT_NOTEBOOK_FAILED, Reason

SCHEMA = "backintel.run/1"
EXIT_HANGUP = 129
MALFORMED = "MalformedMessage"
"""The code of a run that a message ended which nbclient could not digest."""


@dataclass(frozen=True, slots=True)
class RunRequest:
    """What the owner asked for. ``settings`` are those of the command line, ``auto`` resolved."""

    notebook: Path
    out: Path | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    parameters: Mapping[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class RunResult:
    """How a run went; ``as_dict`` is the JSON that ``--json`` prints."""

    out: Path
    notebook: Path | None = None
    receipt: Path | None = None
    artifacts: list[dict[str, object]] = field(default_factory=list)
    published: bool = False
    session: str | None = None
    engine: dict[str, object] = field(default_factory=dict)
    cells_total: int = 0
    cells_run: int = 0
    complete: bool = False
    failed_cell: int | None = None
    """The failed cell's number among the code cells, from 1."""
    ended: dict[str, object] | None = None
    error: dict[str, object] | None = None
    exit_status: int = EXIT_DONE
    seconds: float = 0.0
    phases_s: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """Return the JSON form."""
        return {
            "schema": SCHEMA,
            "status": "done" if self.exit_status == EXIT_DONE else "failed",
            "exit_status": self.exit_status,
            "complete": self.complete,
            "session": self.session,
            "engine": self.engine,
            "cells": {
                "total": self.cells_total,
                "run": self.cells_run,
                "failed": self.failed_cell,
            },
            "ended": self.ended,
            "error": self.error,
            "out": str(self.out),
            "notebook": str(self.notebook) if self.notebook else None,
            "receipt": str(self.receipt) if self.receipt else None,
            "artifacts": self.artifacts if self.published else [],
            "phases_s": self.phases_s,
            "seconds": round(self.seconds, 3),
        }


class Progress(Protocol):
    """Where a run tells what it does; nothing of it may block."""

    def note(self, text: str) -> None:
        """Say something once."""

    def starting(self) -> None:
        """The sandbox is being started."""

    def ending(self) -> None:
        """The owner asked for the end; what runs is stopped, and saved as it is."""

    def over(self) -> None:
        """Nothing of the run goes on any more."""

    def phase(self, name: str, seconds: float) -> None:
        """A phase of the start is over; seconds since launch was asked for."""

    def cell_started(self, number: int, total: int, source: str) -> None:
        """A cell was sent to the sandbox."""

    def cell_ended(self, number: int, total: int, seconds: float, state: str) -> None:
        """A cell is over; state is ``done``, ``raised`` (as tagged), ``failed`` or ``stopped``."""

    def cell_skipped(self, number: int, total: int, source: str) -> None:
        """A cell is tagged so that it is not run."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a failed cell means: the exit status, and code and text for the person."""

    exit_status: int
    code: str
    text: str


def judge(
    ename: str,
    evalue: str,
    *,
    ours: bool,
    ended: Mapping[str, object] | None,
    over_cells: bool,
    watchdog_interrupts: int,
    output_limited: int,
) -> Verdict:
    """Decide what a cell's error means; the sandbox's own end outranks what the cell says.

    ``ename`` and ``evalue`` come from the guest unless ``ours``, so a limit is believed only with
    the supervisor's word (``ended``, its count of interrupts) or this run's own count of cells.
    """
    if ended is not None:
        reason = Reason(str(ended["reason"]))
        return Verdict(ENDS[reason].exit_status, reason, str(ended["message"]))
    if ename == "KeyboardInterrupt" and output_limited:
        text = "The cell wrote more output than is allowed and was interrupted."
        return Verdict(ENDS[Reason.OUTPUT_LIMIT].exit_status, Reason.OUTPUT_LIMIT, text)
    if ename == "KeyboardInterrupt" and watchdog_interrupts:
        text = "The cell ran longer than its deadline and was interrupted."
        return Verdict(ENDS[Reason.CELL_DEADLINE].exit_status, Reason.CELL_DEADLINE, text)
    if ours or (ename == Reason.CELL_LIMIT and over_cells):
        return Verdict(ENDS[Reason(ename)].exit_status, Reason(ename), evalue)
    return Verdict(EXIT_NOTEBOOK_FAILED, ename, evalue)
