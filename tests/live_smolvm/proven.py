"""What a run of the live lane showed, told in words at its end.

Tests note what they saw; the lane prints it, and a line that nobody noted as missing.
"""

from __future__ import annotations

LINES = (
    "smolvm version",
    "guest kernel",
    "kernel_info_reply",
    "limits attested",
    "run of a notebook",
    "artifacts",
    "artifacts while it runs",
    "deadline",
    "nothing left",
)
STALLED = "no boot progress"
"""What the program says when it gives up a boot that stood still for 30 s, by its own clock."""
_seen: dict[str, str] = {}
_stalled: list[str] = []


def note(line: str, text: str) -> None:
    """Keep what was seen. Raises KeyError for a line that the summary does not have."""
    if line not in LINES:
        raise KeyError(line)
    _seen[line] = text


def stalled(message: str) -> bool:
    """Whether emulation stalled a boot, which may be tried once more; each time is told.

    A nested guest under software emulation sometimes stands still for longer than the program's
    limit, which no budget of ours can lengthen. On real hardware this is an end like any other.
    """
    if STALLED not in message:
        return False
    _stalled.append(message)
    return True


def missing() -> list[str]:
    """Return the lines that nobody noted."""
    return [line for line in LINES if line not in _seen]


def anything() -> bool:
    """Return whether a test noted what it saw: those of the host's own processes note nothing."""
    return bool(_seen or _stalled)


def summary() -> list[str]:
    """Return one line for each fact, in order."""
    return [
        *(f"live {line:<18} {_seen.get(line, 'NOT SHOWN by this run')}" for line in LINES),
        f"live boots that emulation stalled, and that were tried again: {len(_stalled)}",
    ]
