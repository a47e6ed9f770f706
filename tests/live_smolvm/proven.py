"""What a run of the live lane showed, told in words at its end.

Tests note what they saw; the lane prints it, and a line that nobody noted as missing.
"""

from __future__ import annotations

from live_guest import STALLED

LINES = (
    "smolvm version",
    "guest kernel",
    "kernel_info_reply",
    "limits attested",
    "run of a notebook",
    "artifacts",
    "artifacts while it runs",
    "deadline",
    "ordinary user",
    "nothing left",
)
COUNTED = "live boots that emulation stalled, and that were tried again: "
_seen: dict[str, str] = {}


def note(line: str, text: str) -> None:
    """Keep what was seen. Raises KeyError for a line that the summary does not have."""
    if line not in LINES:
        raise KeyError(line)
    _seen[line] = text


def missing() -> list[str]:
    """Return the lines that nobody noted."""
    return [line for line in LINES if line not in _seen]


def anything() -> bool:
    """Return whether a test noted what it saw: those of the host's own processes note nothing."""
    return bool(_seen or STALLED)


def summary() -> list[str]:
    """Return one line for each fact, in order."""
    return [
        *(f"live {line:<18} {_seen.get(line, 'NOT SHOWN by this run')}" for line in LINES),
        f"{COUNTED}{len(STALLED)}",
    ]
