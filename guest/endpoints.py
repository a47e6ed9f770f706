"""Offers the assigned endpoints inside the enclosure: addresses and listeners in its network.

For the agent, before any user code runs. The listeners are made in the enclosure's network but
belong to a program beside the enclosure (forward.py), which leads what they accept to the sockets
that the host mounted. No route is added: every address is one of the loopback interface.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Sequence

import enclosure

_BACKLOG = 64
_RTM_NEWADDR = 20
_FLAGS = 0x605
"""NLM_F_REQUEST, NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL."""
_IFA_LOCAL = 2
_SCOPE_HOST = 254


def offer(process: int, asked: Sequence[tuple[str, int, str]]) -> socket.socket:
    """Listen at each (address, port) for the socket at a path; start the program that forwards.

    ``process`` is a pidfd of one in the enclosure. Returns the program's connection: a byte comes
    once it takes connections, an end if it could not; it ends when this is closed. Raises OSError.
    """
    listeners: list[socket.socket] = []
    try:
        with enclosure.network_of(process):
            outside = {address for address, _, _ in asked if not address.startswith("127.")}
            for address in sorted(outside):
                _add(address)
            for address, port, _ in asked:
                listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                listeners.append(listener)
                listener.bind((address, port))
                listener.listen(_BACKLOG)
        return _start(listeners, [path for _, _, path in asked])
    finally:
        for listener in listeners:
            listener.close()


def _add(address: str) -> None:
    """Give the loopback interface one more address and no more: an ioctl would add its class."""
    kind = struct.pack("=BBBBI", socket.AF_INET, 32, 0, _SCOPE_HOST, socket.if_nametoindex("lo"))
    local = struct.pack("=HH4s", 8, _IFA_LOCAL, socket.inet_aton(address))
    size = 16 + len(kind) + len(local)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as sock:
        sock.send(struct.pack("=IHHII", size, _RTM_NEWADDR, _FLAGS, 1, 0) + kind + local)
        (error,) = struct.unpack_from("=i", sock.recv(4096), 16)
    if error:
        raise OSError(-error, f"address {address}: {os.strerror(-error)}")


def _start(listeners: Sequence[socket.socket], paths: Sequence[str]) -> socket.socket:
    """Start forward.py; it has, as this process, no limit by its killing for memory."""
    ours, theirs = socket.socketpair()
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "forward.py")
    words = [sys.executable, "-I", "-B", program, str(theirs.fileno())]
    for listener, path in zip(listeners, paths, strict=True):
        words += [str(listener.fileno()), path]
    with theirs:
        for sock in (theirs, *listeners):
            sock.set_inheritable(True)
        os.posix_spawn(sys.executable, words, {})
    return ours
