"""Makes a guest stand still for a moment, so that its artifacts are of one moment (spec J2).

The kernel's cgroup freezer does it: nothing in the guest can refuse, notice or undo it. On cgroup
v1 a frozen process cannot even be killed, so whoever kills must thaw. The supervisor may be killed
or stopped meanwhile; therefore the keeper, a process of its own, freezes, and thaws at the latest
after ``HOLD_S`` whatever happens to the supervisor.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kernel_provisioner.engines.base import Hold
from kernel_provisioner.engines.bwrap import waiting
from kernel_provisioner.engines.leftovers import thaw
from kernel_provisioner.errors import FreezeRefused

HOLD_S = 1.9
"""Longest time that a guest stands still: 2 s are allowed, and a busy host wakes nobody on time."""
FREEZE_S = 0.5
"""How long the kernel may take until the last process stands still, part of ``HOLD_S``."""
_ANSWER_S = HOLD_S + 5.0
"""How long the keeper's answer may take: it is scheduled late on a busy host, but it comes."""
_POLL_S = 0.001
_ANSWER = struct.Struct("=cd")
_GONE = b""
_REMEDY = (
    "fetch what is small by a cell's output, or let the administrator see to that; `backintel run` "
    "exports at its end."
)


@dataclass(frozen=True, slots=True)
class Freezer:
    """The control files of one group: what to write, and where the kernel says that all stand."""

    group: Path
    control: str
    word: str
    state: str
    sign: str

    @classmethod
    def v1(cls, group: Path) -> Freezer:
        """The freezer controller's files."""
        return cls(group, "freezer.state", "FROZEN", "freezer.state", "FROZEN")

    @classmethod
    def v2(cls, group: Path) -> Freezer:
        """The unified hierarchy's files (Linux 5.2)."""
        return cls(group, "cgroup.freeze", "1", "cgroup.events", "frozen 1")

    def freeze(self, deadline: float) -> bool:
        """Wait, blocking, until all stand still; False if they do not, and then all go on."""
        with suppress(OSError):
            while True:
                # Again and again: on v1 a fork under way can keep the group "FREEZING".
                (self.group / self.control).write_text(self.word)
                if self.sign in (self.group / self.state).read_text().splitlines():
                    return True
                if time.monotonic() >= deadline:
                    break
                time.sleep(_POLL_S)
        thaw(self.group)
        return False


class KeeperEnd:
    """In the keeper: takes ``f`` and ``t`` from the supervisor, answers when all stand and go."""

    def __init__(self, fd: int, freezer: Freezer | None) -> None:
        self._fd = fd
        self._freezer = freezer
        self._since: float | None = None

    @property
    def wakeup(self) -> float:
        """When the guest must go on (CLOCK_MONOTONIC)."""
        return float("inf") if self._since is None else self._since + HOLD_S

    def serve(self, poller: select.poll) -> None:
        """Do what is asked; the supervisor's end closed means that it is gone."""
        try:
            asked = os.read(self._fd, 1)
        except OSError:
            asked = b""
        if asked == b"f" and self._freezer is not None and self._since is None:
            self._since = time.monotonic()
            if self._freezer.freeze(self._since + FREEZE_S):
                self._answer(b"F")
            else:
                self._since = None
                self._answer(b"E")
        elif asked == b"f":
            self._answer(b"E")
        else:
            self.release(b"T")
            if not asked:
                poller.unregister(self._fd)

    def release(self, how: bytes) -> None:
        """Let the guest go on, if it stands."""
        if self._since is not None and self._freezer is not None:
            thaw(self._freezer.group)
            since, self._since = self._since, None
            self._answer(how, time.monotonic() - since)

    def _answer(self, what: bytes, seconds: float = 0.0) -> None:
        with suppress(OSError):
            os.write(self._fd, _ANSWER.pack(what, seconds))


class SupervisorEnd:
    """In the supervisor: asks the keeper. One freeze at a time; the caller sees to that."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock

    def release(self) -> None:
        """Let the guest go on now, without waiting for it: before a kill."""
        with suppress(OSError):
            self._sock.send(b"t")

    def close(self) -> None:
        """The guest is gone."""
        self._sock.close()

    @asynccontextmanager
    async def frozen(self) -> AsyncIterator[Hold]:
        """See engines.base.Guest."""
        hold = Hold(deadline=time.monotonic() + HOLD_S)
        deadline = waiting.deadline_in(_ANSWER_S)
        with suppress(OSError):
            self._sock.send(b"f")
        what, _ = await self._heard(deadline)
        if what not in (b"F", _GONE):
            self.release()
            raise FreezeRefused(
                "the guest cannot be frozen on this host (no writable cgroup freezer, or its "
                "processes do not stand still); nothing was published.",
                remedy=_REMEDY,
            )
        try:
            yield hold
        finally:
            self.release()
            if what == b"F":
                ended, hold.seconds = await self._heard(deadline)
                hold.late = ended != b"T"

    async def _heard(self, deadline: float) -> tuple[bytes, float]:
        """Return the keeper's answer: ``_GONE`` means that the guest is dead, ``E`` silence."""
        try:
            await waiting.readable(self._sock.fileno(), deadline)
            data = self._sock.recv(_ANSWER.size)
        except TimeoutError:  # a stopped keeper
            return b"E", 0.0
        except OSError:
            return _GONE, 0.0
        if len(data) != _ANSWER.size:
            return _GONE, 0.0
        what, seconds = _ANSWER.unpack(data)
        return what, seconds


def pair() -> tuple[socket.socket, socket.socket]:
    """Return the supervisor's and the keeper's end; each message stays whole."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
