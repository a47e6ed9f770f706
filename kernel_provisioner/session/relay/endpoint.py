"""One end of a connection: a non-blocking stream socket on the event loop.

Responsible for receiving into a buffer that all connections share, for sending at once what the
socket takes and keeping the rest, and for knowing whether the peer has read. It looks at no byte.
Listening sockets are made here too.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import stat
import struct
import termios
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from kernel_provisioner.errors import StartFailed

_MAX_SOCKET_PATH = 107  # sun_path holds 108 bytes with the final zero
CHUNK = 256 * 1024
"""Most bytes received at once; an idle socket's own buffer holds about 208 KiB."""
_PIECES = 64
"""Most pieces of what was kept that one call sends; the system allows 1,024."""


class Endpoint:
    """A non-blocking stream socket on the loop. Received bytes are valid during ``on_data``."""

    def __init__(
        self,
        sock: socket.socket,
        scratch: memoryview,
        *,
        on_data: Callable[[memoryview], None],
        on_gone: Callable[[], None],
        on_drained: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._scratch = scratch
        self._on_data = on_data
        self._on_gone = on_gone
        self._on_drained = on_drained
        self._out: deque[bytes | memoryview] = deque()
        self._unsent = 0
        self._reading = False
        self._finishing: asyncio.TimerHandle | None = None
        self.closed = False
        self.received = 0

    @property
    def backlog(self) -> int:
        """Bytes that the socket did not take yet."""
        return self._unsent

    @property
    def reading(self) -> bool:
        """Whether received bytes are wanted now."""
        return self._reading

    def unread_by_peer(self) -> int:
        """Return the bytes that are not yet in the peer's hands (0 if the system cannot say)."""
        if self.closed:
            return 0
        try:
            reply = fcntl.ioctl(self._sock.fileno(), termios.TIOCOUTQ, bytes(4))
        except OSError:  # not offered for Unix sockets everywhere
            return self._unsent
        return self._unsent + int(struct.unpack("i", reply)[0])

    def resume(self) -> None:
        """Begin or go on to receive."""
        if not self._reading and not self.closed and self._finishing is None:
            self._reading = True
            self._loop.add_reader(self._sock.fileno(), self._receive)

    def pause(self) -> None:
        """Stop receiving; the peer is held back by the socket's own buffer."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock.fileno())

    def write(self, data: bytes | memoryview) -> None:
        """Send, keeping a copy of what the socket does not take at once."""
        if self.closed or self._finishing is not None:
            return
        if self._out:
            self._keep(data)
            return
        try:
            done = self._sock.send(data)
        except BlockingIOError:
            done = 0
        except OSError:
            self._lose()
            return
        if done < len(data):
            self._keep(data[done:])
            self._loop.add_writer(self._sock.fileno(), self._send_more)

    def _keep(self, data: bytes | memoryview) -> None:
        # Piece by piece: to add to one buffer of 32 MiB whose front was sent copies all of it.
        self._out.append(bytes(data))
        self._unsent += len(data)

    def finish(self, timeout: float) -> None:
        """Close once all is sent, or after ``timeout`` seconds."""
        self.pause()
        if self.closed or self._finishing is not None:
            return
        if not self._out:
            self.close()
        else:
            self._finishing = self._loop.call_later(timeout, self.close)

    def close(self) -> None:
        """Close at once; idempotent."""
        if self.closed:
            return
        self.pause()
        self.closed = True
        if self._finishing is not None:
            self._finishing.cancel()
        self._loop.remove_writer(self._sock.fileno())
        self._out.clear()
        self._unsent = 0
        self._sock.close()

    def _lose(self) -> None:
        """The peer is gone; tell it later, for the caller may be in the middle of something."""
        self.close()
        self._loop.call_soon(self._on_gone)

    def _receive(self) -> None:
        try:
            count = self._sock.recv_into(self._scratch)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if count:
            self.received += count
            self._on_data(self._scratch[:count])
        else:
            self.close()
            self._on_gone()

    def _send_more(self) -> None:
        try:
            done = self._sock.sendmsg(list(islice(self._out, _PIECES)))
        except BlockingIOError:
            return
        except OSError:
            self._lose()
            return
        self._unsent -= done
        while self._out and done >= len(self._out[0]):
            done -= len(self._out.popleft())
        if self._out:
            self._out[0] = memoryview(self._out[0])[done:]
            return
        self._loop.remove_writer(self._sock.fileno())
        if self._finishing is not None:
            self.close()
        else:
            self._on_drained()


def listen(path: Path) -> socket.socket:
    """Return a listening socket at ``path``, mode 0600, replacing a stale socket of ours.

    Raises StartFailed if the path is too long or taken by something else.
    """
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise StartFailed(
            f"the socket path {path} is longer than {_MAX_SOCKET_PATH} bytes.",
            remedy="use a shorter run-time directory.",
            phase="relay",
        )
    try:
        info = path.lstat()
    except FileNotFoundError:
        pass
    else:
        if not stat.S_ISSOCK(info.st_mode) or info.st_uid != os.geteuid():
            raise StartFailed(
                f"{path} exists and is not a socket of this user.",
                remedy="remove it.",
                phase="relay",
            )
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(str(path))
        path.chmod(0o600)  # before listen: nobody connected meanwhile
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise StartFailed(
            f"cannot listen on {path} ({error.strerror}).",
            remedy="check the run-time directory.",
            phase="relay",
        ) from None
    return listener
