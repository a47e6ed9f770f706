"""The kernel's stdout and stderr, with a bound on what waits to be sent.

ipykernel gathers prints until its sender thread gets the interpreter. A loop of large prints was
measured to make one message of 265 MiB of that, more than the host lets pass; the writer waits for
the sender instead.
"""

from __future__ import annotations

from ipykernel.iostream import OutStream

_MAX_UNSENT = 1 << 20


class BoundedOutStream(OutStream):
    """An OutStream whose writer flushes after each 2**20 characters."""

    _unsent = 0

    def write(self, string: str) -> int | None:  # type: ignore[override]
        """Write, and wait for the sender when much is unsent. Raises as OutStream does."""
        written: int | None = super().write(string)
        self._unsent += len(string)
        if self._unsent > _MAX_UNSENT:
            self._unsent = 0
            self.flush()  # type: ignore[no-untyped-call]
        return written
