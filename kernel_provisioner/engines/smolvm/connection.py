"""The host's end of the agent's protocol (``guest/agent.py``): control frames and streams.

The agent is root in the guest and out of the kernel's reach, but after user code ran a guest's
kernel may be subverted: every frame is bounded, every wait has a deadline, and nothing that is said
here is believed beyond what the callers state.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from kernel_provisioner import wire
from kernel_provisioner.engines.bwrap import waiting
from kernel_provisioner.errors import NoAnswer, StartFailed, WireError

_RETRY_S = 0.02
_HELLO_S = 0.25
_HELLO_SHARE = 0.25
"""How long an attempt waits for its answer: this, or a share of the time since the first attempt.

One that the monitor took before the guest's socket driver was there is never answered: in the
emulated machine every boot stood idle for all of it. A share, so that a slow guest has its time.
"""
_READ = 65536
_CONNECT_S = 0.5
"""A stream may be opened on the event loop: a monitor that takes none must not stop the clocks."""
EXPORT_SILENCE_S = 30.0
"""Longest pause inside a stream."""


async def connect(path: Path, deadline: float, gone: Callable[[], bool]) -> socket.socket:
    """Return a greeted control connection; try again until the guest listens.

    The monitor accepts long before: only the agent's answer says that somebody is there, and it
    forgets what was given up. Raises TimeoutError at ``deadline``, ConnectionError once ``gone()``.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        if gone():
            raise ConnectionError("the monitor ended")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # A Unix socket connects at once or says EAGAIN while the monitor's short queue is full.
            sock.connect(str(path))
            await loop.sock_sendall(sock, wire.encode({"v": wire.VERSION, "role": "control"}))
            patience = max(_HELLO_S, _HELLO_SHARE * (loop.time() - began))
            if await _greeted(sock, min(patience, waiting.left(deadline))):
                return sock
        except TimeoutError:
            pass
        except OSError:
            pass
        except BaseException:
            sock.close()
            raise
        sock.close()
        if waiting.left(deadline) <= 0:
            raise TimeoutError
        await asyncio.sleep(_RETRY_S)


async def _greeted(sock: socket.socket, patience: float) -> bool:
    reader = wire.FrameReader()
    async with asyncio.timeout(patience):
        while data := await asyncio.get_running_loop().sock_recv(sock, _READ):
            for message in reader.feed(data):
                return message.get("v") == wire.VERSION
    return False


class Control:
    """A greeted control connection: a queue of frames out, a callback for each frame in."""

    def __init__(
        self,
        sock: socket.socket,
        on_message: Callable[[dict[str, Any]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._sock = sock
        self._on_message = on_message
        self._on_lost = on_lost
        self._reader = wire.FrameReader()
        self._out = bytearray()
        self._loop = asyncio.get_running_loop()
        self.closed = False
        self._loop.add_reader(sock.fileno(), self._receive)

    def send(self, message: Mapping[str, object]) -> None:
        """Send a frame without waiting; the few that there are fit any buffer or are queued."""
        if self.closed:
            return
        self._out += wire.encode(message)
        self._flush()

    def _flush(self) -> None:
        try:
            sent = self._sock.send(self._out)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._lose(error.strerror or "it is gone")
            return
        del self._out[:sent]
        if self._out:
            self._loop.add_writer(self._sock.fileno(), self._flush)
        else:
            self._loop.remove_writer(self._sock.fileno())

    def _receive(self) -> None:
        try:
            data = self._sock.recv(_READ)
            messages = self._reader.feed(data) if data else []
        except BlockingIOError:
            return
        except (OSError, WireError) as error:
            self._lose(str(error))
            return
        if not data:
            self._lose("it closed the connection")
            return
        for message in messages:
            self._on_message(message)

    def _lose(self, why: str) -> None:
        if not self.closed:
            self.close()
            self._on_lost(why)

    def close(self) -> None:
        """Close; idempotent. To the agent this is the end of the session."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()


def open_artifacts(path: Path) -> BinaryIO:
    """Return /artifacts as a tar stream. Raises StartFailed (the guest is gone), NoAnswer."""
    return _opened(path, "artifacts")


def open_listing(path: Path) -> BinaryIO:
    """Return the records of /artifacts. Raises StartFailed (the guest is gone), NoAnswer."""
    return _opened(path, "listing")


def _opened(path: Path, role: str) -> BinaryIO:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.closing(sock):
        sock.settimeout(_CONNECT_S)
        try:
            sock.connect(str(path))
            sock.sendall(wire.encode({"v": wire.VERSION, "role": role}))
        except (BlockingIOError, TimeoutError):
            # The monitor's queue of connections is full: it lives.
            raise NoAnswer(
                "the microVM takes no connection now; nothing was published.",
                remedy="try again while the session lives.",
            ) from None
        except OSError:
            raise StartFailed("the artifacts are lost with the VM.", phase="export") from None
        sock.settimeout(EXPORT_SILENCE_S)
        # The file object keeps the connection open until it is closed itself.
        return sock.makefile("rb")
