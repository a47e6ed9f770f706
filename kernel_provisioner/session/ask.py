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
        async with asyncio.timeout(timeout):
            sock = await _connect(socket_dir)
            with sock:
                request = wire.encode({"op": op, **fields})
                await asyncio.get_running_loop().sock_sendall(sock, request)
                reply = await _receive(sock)
    except TimeoutError:
        raise NoAnswer(
            f"the sandbox's supervisor did not answer within {timeout:g} s.",
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


async def _receive(sock: socket.socket) -> Reply:
    """Return the answer and the descriptor that came with it. Raises OSError, WireError."""
    reader = wire.FrameReader()
    received: list[int] = []
    try:
        while True:
            await _readable(sock)
            data, fds, _, _ = socket.recv_fds(sock, 65536, 1)
            received += fds
            if not data:
                raise WireError("the answer ended in the middle.")
            if messages := reader.feed(data):
                return Reply(messages[0], open(received.pop(), "rb") if received else None)
    finally:
        for fd in received:
            os.close(fd)


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
