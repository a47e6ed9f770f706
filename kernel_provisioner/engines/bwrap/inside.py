"""Listens inside a guest's network namespace: a program, run by ``endpoints.py``.

A process of its own, because only one with a single thread may enter a user namespace. It runs none
of the guest's code, sends the listening sockets over the descriptor that it was given, and ends.
Only the standard library is imported: it runs isolated, without site-packages.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import json
import os
import socket
import struct
import sys
from collections.abc import Iterator, Sequence

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCSIFADDR = 0x8916
_SIOCSIFNETMASK = 0x891C
_BACKLOG = 64
_BUFFER = 512 << 10
_libc = ctypes.CDLL(None, use_errno=True)


def _enter(fd: int, kind: int) -> None:
    if _libc.setns(fd, kind) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "the guest's namespace")


def _add_address(number: int, address: str) -> None:
    """Give lo one more address, alone in its network: no route leads anywhere else."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for call, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, "255.255.255.255")):
            fields = (f"lo:{number}".encode(), socket.AF_INET, 0, socket.inet_aton(value))
            fcntl.ioctl(sock, call, struct.pack("16sHH4s8x", *fields))


def _listeners(wanted: Sequence[tuple[str, int]]) -> Iterator[socket.socket]:
    added = {address for address, _ in wanted if not ipaddress.ip_address(address).is_loopback}
    for number, address in enumerate(sorted(added), start=1):
        _add_address(number, address)
    for address, port in wanted:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            # Those that it accepts have them too; the kernel would keep megabytes for each way.
            for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER)
            sock.bind((address, port))
            sock.listen(_BACKLOG)
        except OSError as error:
            raise OSError(error.errno, error.strerror, f"{address}:{port}") from None
        yield sock


def main() -> int:
    """Arguments: descriptors of the answer, the user and the network namespace; the addresses."""
    answer, user, net = (int(word) for word in sys.argv[1:4])
    try:
        _enter(user, _CLONE_NEWUSER)
        _enter(net, _CLONE_NEWNET)
        made = list(_listeners(json.loads(sys.argv[4])))
    except OSError as error:
        print(f"{error.strerror} ({error.filename})", file=sys.stderr)
        return 1
    with socket.socket(fileno=answer) as sock:
        socket.send_fds(sock, [b"l"], [listener.fileno() for listener in made])
    return 0


if __name__ == "__main__":
    sys.exit(main())
