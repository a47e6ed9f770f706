"""Leads the connections that a microVM's kernel makes to its endpoints to the host's sockets.

Root in the microVM and beside the enclosure, as its parent, the agent (endpoints.py): the kernel
can reach the listeners alone. What comes through them is hostile and only copied; where it goes is
the listener's own and nothing that is sent. Ends with the agent.

To the host each way is told in frames, a length (u32, big-endian) and as many bytes: at most 64 KiB
of data; a length of 0 ends the way, and 0xFFFFFFFF says that the other way's end has come. Only
then is the connection closed: the machine's sockets lose what is on its way when one is (measured:
the last 100 KB of an upload that the host read slowly, and the tails of answers).

A length with the highest bit set comes from the host alone: so many bytes less are on their way. No
more than WINDOW are, so that the host can always read: the monitor waits with all channels of the
machine for one socket that is not read.

Arguments: the agent's connection, then for each endpoint a listener and the path of its socket.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import sys
import threading
from collections.abc import Callable

MOST = 64
"""Connections at once, of all endpoints; one more is closed at once."""
WINDOW = 1 << 20
"""Bytes of a connection that the host has not passed on yet; it reads more than that ahead."""
_CHUNK = 65536
_END, _ENDED = 0, 0xFFFFFFFF
_TAKEN = 0x80000000
_slots = threading.Semaphore(MOST)


def main() -> None:
    """Say that connections are taken, and take them until the agent's connection ends."""
    # The agent's priority is for the host's sake alone.
    os.setpriority(os.PRIO_PROCESS, 0, 0)
    agent = socket.socket(fileno=int(sys.argv[1]))
    with selectors.DefaultSelector() as selector:
        selector.register(agent, selectors.EVENT_READ, "")
        for number, path in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
            listener = socket.socket(fileno=int(number))
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ, path)
        agent.send(b"1")
        while True:
            for key, _ in selector.select():
                if key.fileobj is agent:
                    os._exit(0)
                assert isinstance(key.fileobj, socket.socket)
                # Whoever asked may have gone again.
                with contextlib.suppress(OSError):
                    _take(key.fileobj.accept()[0], key.data)


def _take(guest: socket.socket, path: str) -> None:
    if not _slots.acquire(blocking=False):
        guest.close()
        return
    try:
        threading.Thread(target=_carry, args=(guest, path), daemon=True).start()
    except RuntimeError:  # no memory for a thread
        guest.close()
        _slots.release()


def _carry(guest: socket.socket, path: str) -> None:
    """Copy both ways until both have ended."""
    try:
        with guest, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as host:
            guest.setblocking(True)
            guest.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            host.connect(path)
            _Forward(guest, host).run()
    except (OSError, RuntimeError):  # the host takes none, or no memory for a thread
        pass
    finally:
        _slots.release()


class _Forward:
    """One connection: a way out, a way back, and what of the way out the host has passed on."""

    def __init__(self, guest: socket.socket, host: socket.socket) -> None:
        self._guest = guest
        self._host = host
        self._writing = threading.Lock()
        self._changed = threading.Condition()
        self._on_its_way = 0
        self._broken = False

    def run(self) -> None:
        """Return once both ways have ended, or one has broken."""
        out = threading.Thread(target=self._guarded, args=(self._out,), daemon=True)
        out.start()
        self._guarded(self._back)
        out.join()

    def _guarded(self, way: Callable[[], None]) -> None:
        """Go one way; one that breaks ends both, the guest's by a reset."""
        try:
            way()
        except OSError:
            # An end would look like a whole answer. Whoever waits in a recv is woken all the same.
            linger = struct.pack("ii", 1, 0)
            for sock, how in ((self._guest, socket.SHUT_RD), (self._host, socket.SHUT_RDWR)):
                with contextlib.suppress(OSError):
                    self._guest.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    sock.shutdown(how)
            with self._changed:
                self._broken = True
                self._changed.notify()

    def _send(self, length: int, data: bytes = b"") -> None:
        with self._writing:
            self._host.sendall(struct.pack(">I", length) + data)

    def _out(self) -> None:
        while data := self._guest.recv(_CHUNK):
            with self._changed:
                self._on_its_way += len(data)
                self._changed.wait_for(lambda: self._broken or self._on_its_way <= WINDOW)
            self._send(len(data), data)
        self._send(_END)

    def _back(self) -> None:
        missing = {_END, _ENDED}
        while missing:
            (length,) = struct.unpack(">I", self._exactly(4))
            if length == _END:
                self._guest.shutdown(socket.SHUT_WR)
                self._send(_ENDED)
            elif length & _TAKEN and length != _ENDED:
                with self._changed:
                    self._on_its_way -= length & ~_TAKEN
                    self._changed.notify()
            elif length != _ENDED:
                self._guest.sendall(self._exactly(length))
            missing.discard(length)

    def _exactly(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            more = self._host.recv(length - len(data))
            if not more:
                raise ConnectionResetError("the host broke off")
            data += more
        return bytes(data)


main()
