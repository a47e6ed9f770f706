"""Text of strangers, made fit to be printed: no terminal escapes, no control characters, bounded.

Names, sources and errors of a notebook come from its author or from the guest, and neither is
trusted with anybody's terminal, be it now or when a receipt is shown there later.
"""

from __future__ import annotations

import re

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)?")


def printable(text: str, limit: int = 2000) -> str:
    """Return ``text`` without terminal escapes and control characters, at most ``limit`` long.

    Line feeds stay; so do printable characters of any script.
    """
    plain = _ESCAPES.sub("", text[: 4 * limit])
    kept = "".join(char if char == "\n" or char.isprintable() else " " for char in plain)
    return kept if len(kept) <= limit else kept[: limit - 1] + "…"


def quoted(text: str, limit: int) -> str:
    """Return the last ``limit`` characters of what a program printed, printable, as one line.

    So a message that quotes it stays one line of a log or of a table, whatever was printed.
    """
    lines = printable(text[-limit:], limit).splitlines()
    return " | ".join(line.strip() for line in lines if line.strip())[-limit:]
