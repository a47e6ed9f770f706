"""The supervisor's end of its control socket: frames in and out, end of file means the owner left.

The peer is the provisioner in the Jupyter server's process: trusted, but it may hang, die, or stop
reading. So sending never blocks the supervisor for more than a bounded time.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Mapping

from kernel_provisioner import wire
from kernel_provisioner.errors import WireError

_SEND_TIMEOUT_S = 2.0


class Control:
    """Framed JSON over a connected Unix socket, for one asyncio loop.

    ``reader`` may hold part of a message, and ``ready`` those that came before the loop ran.
    """

    def __init__(
        self, sock: socket.socket, reader: wire.FrameReader, ready: list[dict[str, object]]
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._reader = reader
        self._ready = ready
        self._lock = asyncio.Lock()
        self.overhear: Callable[[Mapping[str, object]], None] | None = None
        """Is told each message that is sent: who looks at the session hears of its end too."""

    @property
    def owner(self) -> int:
        """The process that made the socket, also if a fork of it holds it alone by now."""
        size = struct.calcsize("3i")
        credentials = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(struct.unpack("3i", credentials)[0])

    async def receive(self) -> dict[str, object] | None:
        """Return the next message, or None at end of file. Raises WireError."""
        loop = asyncio.get_running_loop()
        while not self._ready:
            try:
                data = await loop.sock_recv(self._sock, 65536)
            except OSError:
                return None
            if not data:
                return None
            self._ready += self._reader.feed(data)
        return self._ready.pop(0)

    async def send(self, op: str, **fields: object) -> bool:
        """Send one message; False if the owner is gone or did not read for two seconds."""
        return await self.send_message({"op": op, **fields})

    async def send_message(self, message: Mapping[str, object]) -> bool:
        """Send a message made elsewhere; see ``send``."""
        if self.overhear is not None:
            self.overhear(message)
        async with self._lock:
            try:
                data = wire.encode(message)
            except WireError:
                return False
            try:
                async with asyncio.timeout(_SEND_TIMEOUT_S):
                    await asyncio.get_running_loop().sock_sendall(self._sock, data)
            except (OSError, TimeoutError):
                return False
        return True
