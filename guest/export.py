"""Shows /artifacts of a microVM to the host, from a descriptor held since before the go.

As a tar stream, or as records of what is there: type as in tar, size, time of change, name. The
tree is hostile: no link is followed, special files are not opened but named by their type, and
depth, entries and bytes are bounded. The host validates the stream again; one that breaks a bound
ends without its trailer and is refused there. Records end with one that has no name.
The host's engines/bwrap/export.py walks alike: the guest imports nothing of the host's side.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import tarfile

MAX_DEPTH = 32
MAX_ENTRIES = 4096
MAX_NAME = 2048
"""Bytes of a listed name; what is longer is cut, and still too long to leave."""
_RECORD = struct.Struct(">cQdH")
_CHUNK = 1 << 18
SOCKET = b"Y"
"""Vendor type, for tar has none for sockets."""
_TYPES = {
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
    stat.S_IFSOCK: SOCKET,
}
_BENEATH = os.O_NOFOLLOW | os.O_CLOEXEC


class Truncated(Exception):
    """The tree broke a bound or changed under the reader."""


def listing(root: int) -> bytes:
    """Return records of what is below the directory descriptor while the kernel goes on.

    At most ``MAX_ENTRIES``, no deeper than ``MAX_DEPTH``; what vanishes meanwhile is left out.
    Raises OSError for the directory itself.
    """
    found: list[bytes] = []
    fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | _BENEATH, dir_fd=root)
    try:
        _list(fd, b"", 0, found, set())
    finally:
        os.close(fd)
    return b"".join((*found, _RECORD.pack(b"\0", 0, 0.0, 0)))


def _list(fd: int, prefix: bytes, depth: int, found: list[bytes], seen: set[int]) -> None:
    names: list[bytes] = []
    with os.scandir(fd) as entries:
        for entry in entries:
            if len(found) + len(names) >= MAX_ENTRIES:
                break
            names.append(os.fsencode(entry.name))
    for name in sorted(names):
        if len(found) >= MAX_ENTRIES:
            return
        with contextlib.suppress(OSError):
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            mode = stat.S_IFMT(info.st_mode)
            kind = _TYPES.get(mode, tarfile.FIFOTYPE)
            if mode == stat.S_IFDIR:
                kind = tarfile.DIRTYPE
            elif mode == stat.S_IFREG:
                kind = tarfile.LNKTYPE if info.st_ino in seen else tarfile.REGTYPE
                seen.add(info.st_ino)
            size = info.st_size if kind == tarfile.REGTYPE else 0
            full = (prefix + name)[:MAX_NAME]
            found.append(_RECORD.pack(kind, size, info.st_mtime, len(full)) + full)
            if mode == stat.S_IFDIR and depth < MAX_DEPTH:
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _BENEATH, dir_fd=fd)
                try:
                    _list(below, prefix + name + b"/", depth + 1, found, seen)
                finally:
                    os.close(below)


class Export:
    """One pass over a directory. ``max_bytes`` bounds the contents that are sent."""

    def __init__(self, sock: socket.socket, max_bytes: int) -> None:
        self._sock = sock
        self._left = max_bytes
        self._entries = 0
        self._seen: dict[int, str] = {}

    def send(self, root: int) -> None:
        """Send the tree below the directory descriptor. Raises Truncated, OSError."""
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | _BENEATH, dir_fd=root)
        try:
            self._directory(fd, "", 0)
        finally:
            os.close(fd)
        self._sock.sendall(bytes(2 * tarfile.BLOCKSIZE))

    def _directory(self, fd: int, prefix: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise Truncated(f"{prefix} is nested deeper than {MAX_DEPTH} directories")
        names: list[str] = []
        more = False
        with os.scandir(fd) as listing:
            for entry in listing:
                more = self._entries + len(names) >= MAX_ENTRIES
                if more:
                    break
                names.append(entry.name)
        self._entries += len(names)
        for name in sorted(names):
            self._entry(fd, name, prefix + name, depth)
        if more:
            # Only now: the host's own bound is lower, and gives the person its reason.
            raise Truncated(f"more than {MAX_ENTRIES} entries")

    def _entry(self, parent: int, name: str, full: str, depth: int) -> None:
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
        kind = stat.S_IFMT(info.st_mode)
        head = tarfile.TarInfo(full)
        head.mode = stat.S_IMODE(info.st_mode)
        head.mtime = int(info.st_mtime)
        if kind == stat.S_IFDIR:
            head.type = tarfile.DIRTYPE
            self._header(head)
            fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _BENEATH, dir_fd=parent)
            try:
                self._directory(fd, f"{full}/", depth + 1)
            finally:
                os.close(fd)
        elif kind != stat.S_IFREG:
            head.type = _TYPES.get(kind, tarfile.FIFOTYPE)
            if kind == stat.S_IFLNK:
                head.linkname = os.readlink(name, dir_fd=parent)
            self._header(head)
        elif info.st_ino in self._seen:
            head.type = tarfile.LNKTYPE
            head.linkname = self._seen[info.st_ino]
            self._header(head)
        else:
            if info.st_nlink > 1:
                self._seen[info.st_ino] = full
            self._file(parent, name, head)

    def _header(self, head: tarfile.TarInfo) -> None:
        self._sock.sendall(head.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))

    def _file(self, parent: int, name: str, head: tarfile.TarInfo) -> None:
        # O_NONBLOCK: neither a FIFO put there since nor a file lease may block this process.
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _BENEATH, dir_fd=parent)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise Truncated(f"{head.name} changed while it was read")
            head.size = info.st_size
            self._header(head)
            if head.size > self._left:
                # The validator knows the size from the header and refuses it by that.
                raise Truncated(f"{head.name} is over the limit of bytes")
            self._left -= head.size
            left = head.size
            while left:
                chunk = os.read(fd, min(left, _CHUNK))
                if not chunk:
                    raise Truncated(f"{head.name} shrank while it was read")
                self._sock.sendall(chunk)
                left -= len(chunk)
            self._sock.sendall(bytes(-head.size % tarfile.BLOCKSIZE))
        finally:
            os.close(fd)
