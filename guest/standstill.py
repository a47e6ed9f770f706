"""Makes the enclosure stand still while the host reads its artifacts (spec J2).

The freezer of cgroup2 does it: nothing in the enclosure can refuse, notice or undo it. The file
system is mounted where no path leads, so that only this process's descriptors reach it, and the
enclosure is in its group before it has namespaces. The host is trusted; yet a thread of its own
ends each hold on time, whatever becomes of the host and of the agent's loop.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping

import enclosure

_PLACE = "/run/backintel/group"
_POLL_S = 0.001
_SHARE = 0.25
"""Of a hold's time, how much it may take until the last process stands still."""


class Standstill:
    """One group for the enclosure and one hold at a time; ``tell`` sends the host a frame."""

    def __init__(self, tell: Callable[[Mapping[str, object]], None]) -> None:
        self._tell = tell
        self._group = -1
        self._switch = -1
        self._why = "the machine has no enclosure"
        self._holding = threading.Lock()
        self._asked = threading.Event()

    def prepare(self) -> int:
        """Make the group; return a descriptor for ``enclosure.enclose``, or -1 if there is none.

        A machine without it works, but is refused by name when it is to stand still.
        """
        try:
            root = enclosure.mount_nowhere("cgroup2", _PLACE)
            try:
                name = f"enclosure-{os.urandom(4).hex()}"
                os.mkdir(name, 0o700, dir_fd=root)
                self._group = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=root)
            finally:
                os.close(root)
            self._switch = os.open("cgroup.freeze", os.O_WRONLY, dir_fd=self._group)
            return os.open("cgroup.procs", os.O_WRONLY, dir_fd=self._group)
        except OSError as error:
            self._why = f"the machine has no cgroup freezer: {error.strerror}"
            return -1

    def enclosed(self, first: int) -> None:
        """Use the group only if the enclosure's process 1 is in it: an empty one always stands."""
        if self._switch >= 0:
            inside = str(first) in self._read("cgroup.procs").split()
            self._why = "" if inside else "the enclosure is not in its cgroup"

    def freeze(self, hold: int, seconds: float) -> None:
        """Stop all; a thread answers ``frozen`` and lets all go on after ``seconds`` at the latest.

        ``hold`` is the host's number for it and comes with each answer.
        """
        if not self._holding.acquire(blocking=False):
            self._tell({"frozen": False, "why": "it stands still already", "hold": hold})
            return
        self._asked.clear()
        threading.Thread(target=self._hold, args=(hold, seconds), daemon=True).start()

    def thaw(self) -> None:
        """Let all go on; the hold's thread answers ``thawed``."""
        self._asked.set()

    def _hold(self, hold: int, seconds: float) -> None:
        began = time.monotonic()
        expiry = threading.Timer(seconds, self._release)
        expiry.daemon = True
        expiry.start()
        why = self._why or self._stop(began + seconds * _SHARE)
        self._tell({"frozen": not why, "why": why, "hold": hold})
        self._asked.wait()
        expiry.cancel()
        # Else it might run only now, and end the next hold.
        expiry.join()
        self._release()
        stood = time.monotonic() - began
        self._holding.release()
        late = stood >= seconds
        self._tell({"thawed": True, "late": late, "seconds": min(stood, seconds), "hold": hold})

    def _stop(self, deadline: float) -> str:
        """Wait until all stand still; return why they do not, and then all go on."""
        try:
            os.write(self._switch, b"1")
            while "frozen 1" not in self._read("cgroup.events").splitlines():
                if time.monotonic() >= deadline:
                    self._release()
                    return "its processes do not stand still"
                time.sleep(_POLL_S)
        except OSError as error:
            self._release()
            return f"its cgroup does not answer: {error.strerror}"
        return ""

    def _release(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._switch, b"0")

    def _read(self, name: str) -> str:
        fd = os.open(name, os.O_RDONLY, dir_fd=self._group)
        with os.fdopen(fd) as file:
            return file.read()
