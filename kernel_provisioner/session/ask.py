"""Asks a running session's desk: the client's side of ``session/desk.py``.

For the Jupyter server's pages and the command line. The supervisor at the other end is a process of
the same owner and trusted; it may hang or die, so every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kernel_provisioner import wire
from kernel_provisioner.errors import NoAnswer, NotRunning, WireError, error_from_dict

DESK = "desk"
"""Name of the socket in the session's directory."""
QUESTION_TIMEOUT_S = 5.0
EXPORT_TIMEOUT_S = 75.0
"""For what freezes the guest: its 2 s, another export before it, and the supervisor's own 60 s."""
_MAX_JSON = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Reply:
    """``file``, if there is one, is the caller's to close."""

    message: dict[str, Any]
    file: BinaryIO | None


async def ask(socket_dir: Path, op: str, *, timeout: float, **fields: object) -> Reply:
    """Ask one question. Raises NotRunning, NoAnswer, and whatever the desk refuses with."""
    try:
        async with asyncio.timeout(QUESTION_TIMEOUT_S):
            sock = await _connect(socket_dir)
        with sock, closing(_Answers(sock)) as answers:
            async with asyncio.timeout(QUESTION_TIMEOUT_S):
                request = wire.encode({"op": op, **fields})
                await asyncio.get_running_loop().sock_sendall(sock, request)
                await answers.next()  # it was taken
            async with asyncio.timeout(timeout):
                message = await answers.next()
            reply = Reply(message, answers.file())
    except TimeoutError:
        raise NoAnswer(
            "the sandbox's supervisor did not answer in time.",
            remedy="try again; if it stays so, shut the kernel down.",
        ) from None
    except (OSError, WireError):
        raise NotRunning("the sandbox is not running.", remedy="start the kernel.") from None
    if isinstance(error := reply.message.get("error"), dict):
        raise error_from_dict(error)
    return reply


async def ask_json(socket_dir: Path, op: str, *, timeout: float, **fields: object) -> Any:
    """Ask a question whose answer is a JSON document beside the frame. Raises as ``ask``."""
    reply = await ask(socket_dir, op, timeout=timeout, **fields)
    if reply.file is None:
        raise NoAnswer("the sandbox's supervisor sent an empty answer.")
    with reply.file as file:
        return json.loads(file.read(_MAX_JSON))


async def events(socket_dir: Path) -> AsyncIterator[dict[str, Any]]:
    """Yield what happens to a session until it is gone. Raises OSError if it cannot be reached."""
    reader = wire.FrameReader()
    with await _connect(socket_dir) as sock:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, wire.encode({"op": "events"}))
        while data := await loop.sock_recv(sock, 65536):
            for message in reader.feed(data):
                yield message


async def _connect(socket_dir: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, str(socket_dir / DESK))
    except BaseException:
        sock.close()
        raise
    return sock


class _Answers:
    """The frames that come back on one connection, and the descriptor beside the last of them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._reader = wire.FrameReader()
        self._messages: list[dict[str, Any]] = []
        self._fds: list[int] = []

    async def next(self) -> dict[str, Any]:
        """Return the next frame. Raises OSError, WireError."""
        while not self._messages:
            await _readable(self._sock)
            data, fds, _, _ = socket.recv_fds(self._sock, 65536, 1)
            self._fds += fds
            if not data:
                raise WireError("the answer ended in the middle.")
            self._messages += self._reader.feed(data)
        return self._messages.pop(0)

    def file(self) -> BinaryIO | None:
        """Return what came beside the answer; the caller closes it."""
        return open(self._fds.pop(), "rb") if self._fds else None

    def close(self) -> None:
        """Close what nobody took."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock, wake)
    try:
        await ready
    finally:
        loop.remove_reader(sock)
