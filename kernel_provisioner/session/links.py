"""The guest's end of a forwarded connection, in the two forms that engines have.

A plain one is the guest's own TCP connection. A framed one comes through sockets that lose what is
on its way when a connection is closed (a microVM's), so that its ends are told in the stream, as
``guest/forward.py`` describes. What is read is hostile: a frame is bounded before it is read.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

CHUNK = 65536
"""Most bytes of one read, and of one frame."""
_END, _ENDED = 0, 0xFFFFFFFF
_TAKEN = 0x80000000


def linger(sock: Any, *, reset: bool) -> None:
    """Say what closing the socket means, by a killed process too. Raises OSError if it is closed.

    A reset, which drops what waits; or an end, after which the kernel goes on to send.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", int(reset), 0))


class Plain:
    """A connection whose ends are those of its socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.ended = False
        """The other side has sent all that it will."""

    async def read(self) -> bytes:
        """Return at most CHUNK bytes, none at the end. Raises OSError if it broke off."""
        data = await self._reader.read(CHUNK)
        self.ended = not data
        return data

    async def write(self, data: bytes) -> None:
        """Send at most CHUNK bytes, and wait while too many wait already. Raises OSError."""
        self._writer.write(data)
        await self._writer.drain()

    async def taken(self, length: int) -> None:
        """Say that so many bytes which were read have been passed on. Raises OSError."""

    async def end(self) -> None:
        """Say that no more is sent. Raises OSError."""
        self._writer.write_eof()

    async def close(self) -> None:
        """Close once both ways have ended and all is delivered. Raises OSError."""
        linger(self._writer.get_extra_info("socket"), reset=False)
        self._writer.close()
        await self._writer.wait_closed()

    def abort(self) -> None:
        """Break off at once; idempotent, and nothing once it is closed.

        By a reset: an end would look like a whole answer, and what waits for a side that does not
        read would stay in the kernel's memory for as long as that side lives.
        """
        sock = self._writer.get_extra_info("socket")
        # asyncio's own abort raises once a transport that had to wait for its close is closed.
        if sock.fileno() >= 0:
            linger(sock, reset=True)
            self._writer.transport.abort()


class Framed(Plain):
    """A connection whose ends are frames, and which the guest's side closes, once it has all."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self._told = False
        """The guest's side said that our end has come."""
        self._untold = 0
        """Bytes that were passed on and not told yet: not for each of many small frames."""

    async def read(self) -> bytes:
        """See Plain. Raises ConnectionAbortedError too, for what is no frame."""
        # What has come already is read without a wait: tiny frames must not hold up the clocks.
        await asyncio.sleep(0)
        length = int.from_bytes(await self._exactly(4))
        if length == _ENDED and not self._told:
            self._told = True
            length = int.from_bytes(await self._exactly(4))
        if length == _END:
            self.ended = True
            self._frame(_ENDED)
            return b""
        if length > CHUNK:
            raise ConnectionAbortedError(f"a frame of {length} bytes")
        return await self._exactly(length)

    async def write(self, data: bytes) -> None:
        """See Plain."""
        self._frame(len(data), data)
        await self._writer.drain()

    async def taken(self, length: int) -> None:
        """See Plain. The guest's side sends no more than its window ahead of it."""
        self._untold += length
        if self._untold >= CHUNK:
            self._frame(_TAKEN | self._untold)
            self._untold = 0
            await self._writer.drain()

    async def end(self) -> None:
        """See Plain."""
        self._frame(_END)
        await self._writer.drain()

    async def close(self) -> None:
        """See Plain. Raises ConnectionAbortedError for more than what may still come."""
        rest = b""
        while data := await self._reader.read(CHUNK):
            rest += data
            if self._told or not _ENDED.to_bytes(4).startswith(rest):
                raise ConnectionAbortedError("data after the end")
        await super().close()

    def _frame(self, length: int, data: bytes = b"") -> None:
        self._writer.write(length.to_bytes(4) + data)

    async def _exactly(self, length: int) -> bytes:
        try:
            return await self._reader.readexactly(length)
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("it broke off inside a frame") from None
