"""Turns the guest's /artifacts into a tar stream, from a descriptor kept from before user code ran.

The tree is hostile and may change while it is read: every entry is opened beneath the directory's
descriptor without following links, special files are not opened at all but named by their tar type,
so that the validator can refuse them by name. Depth, entries and bytes are bounded.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tarfile
import threading
from dataclasses import dataclass, field
from typing import BinaryIO

from kernel_provisioner.engines.base import Listed
from kernel_provisioner.engines.bwrap import linux

MAX_DEPTH = 32
MAX_ENTRIES = 4096
SOCKET = b"Y"
"""Vendor type, for tar has none for sockets."""
UNREADABLE = b"U"
"""Vendor type for a file whose mode denies its owner, the exporting user, to read it."""
_CHUNK = 1 << 18
_RESOLVE = (
    linux.RESOLVE_BENEATH
    | linux.RESOLVE_NO_SYMLINKS
    | linux.RESOLVE_NO_XDEV
    | linux.RESOLVE_NO_MAGICLINKS
)
_TYPES = {
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
    stat.S_IFSOCK: SOCKET,
}


class TruncatedExport(Exception):
    """The tree broke a bound or changed under the reader; the stream ends without its trailer."""


def open_stream(root: int, max_bytes: int) -> BinaryIO:
    """Return the readable end of a pipe that a thread fills with the tar stream of ``root``.

    ``root`` is a descriptor of the directory (O_PATH is enough) and is duplicated. At most
    ``max_bytes`` of file contents are sent. A stream without the two zero blocks of a tar trailer
    is incomplete and must be refused. Closing the reader early ends the thread.
    """
    own = os.dup(root)
    reader, writer = os.pipe2(os.O_CLOEXEC)
    thread = threading.Thread(
        target=_fill, args=(own, writer, max_bytes), name="backintel-export", daemon=True
    )
    thread.start()
    return os.fdopen(reader, "rb")


def _fill(root: int, writer: int, max_bytes: int) -> None:
    try:
        # The reader may be gone; a truncated stream says everything that is to be said.
        with (
            contextlib.suppress(OSError, TruncatedExport),
            open(writer, "wb", buffering=_CHUNK) as pipe,
        ):
            _Writer(root, pipe, max_bytes).write()
    finally:
        os.close(root)


def listing(root: int) -> list[Listed]:
    """Return what is below ``root``, a descriptor, while the guest goes on changing it.

    At most ``MAX_ENTRIES``, no deeper than ``MAX_DEPTH``; what vanishes meanwhile or cannot be
    opened is left out. Raises OSError for the directory itself.
    """
    found: list[Listed] = []
    seen: set[int] = set()
    fd = linux.openat2(root, ".", os.O_RDONLY | os.O_DIRECTORY, _RESOLVE)
    try:
        _list(fd, b"", 0, found, seen)
    finally:
        os.close(fd)
    return found


def _list(fd: int, prefix: bytes, depth: int, found: list[Listed], seen: set[int]) -> None:
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
            found.append(Listed(prefix + name, kind, size, info.st_mtime))
            if mode == stat.S_IFDIR and depth < MAX_DEPTH:
                below = linux.openat2(fd, os.fsdecode(name), os.O_RDONLY | os.O_DIRECTORY, _RESOLVE)
                try:
                    _list(below, prefix + name + b"/", depth + 1, found, seen)
                finally:
                    os.close(below)


@dataclass(slots=True)
class _Writer:
    root: int
    pipe: BinaryIO
    left_bytes: int
    entries: int = 0
    seen: dict[int, str] = field(default_factory=dict)
    """Names by inode, to show second names as the hard links that they are."""

    def write(self) -> None:
        fd = linux.openat2(self.root, ".", os.O_RDONLY | os.O_DIRECTORY, _RESOLVE)
        try:
            self._directory(fd, "", 0)
        finally:
            os.close(fd)
        self.pipe.write(bytes(2 * tarfile.BLOCKSIZE))

    def _directory(self, fd: int, prefix: str, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise TruncatedExport(f"{prefix} is nested deeper than {MAX_DEPTH} directories")
        with os.scandir(fd) as listing:
            names = []
            for entry in listing:
                self.entries += 1
                if self.entries > MAX_ENTRIES:
                    break
                names.append(entry.name)
        # What was listed is sent: the validator allows fewer and names the one too many.
        for name in sorted(names):
            self._entry(fd, name, prefix + name, depth)
        if self.entries > MAX_ENTRIES:
            raise TruncatedExport(f"more than {MAX_ENTRIES} entries")

    def _entry(self, parent: int, name: str, full: str, depth: int) -> None:
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
        kind = stat.S_IFMT(info.st_mode)
        head = tarfile.TarInfo(full)
        head.mode = stat.S_IMODE(info.st_mode)
        head.mtime = int(info.st_mtime)
        if kind == stat.S_IFDIR:
            head.type = tarfile.DIRTYPE
            self._header(head)
            fd = linux.openat2(parent, name, os.O_RDONLY | os.O_DIRECTORY, _RESOLVE)
            try:
                self._directory(fd, f"{full}/", depth + 1)
            finally:
                os.close(fd)
        elif kind != stat.S_IFREG:
            head.type = _TYPES.get(kind, tarfile.FIFOTYPE)
            if kind == stat.S_IFLNK:
                head.linkname = os.readlink(name, dir_fd=parent)
            self._header(head)
        elif info.st_ino in self.seen:
            head.type = tarfile.LNKTYPE
            head.linkname = self.seen[info.st_ino]
            self._header(head)
        else:
            if info.st_nlink > 1:
                self.seen[info.st_ino] = full
            self._file(parent, name, head)

    def _header(self, head: tarfile.TarInfo) -> None:
        self.pipe.write(head.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))

    def _file(self, parent: int, name: str, head: tarfile.TarInfo) -> None:
        # O_NONBLOCK: neither a FIFO put there since nor a file lease of the guest may block us.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        try:
            fd = linux.openat2(parent, name, flags, _RESOLVE)
        except PermissionError:
            head.type = UNREADABLE
            self._header(head)
            return
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise TruncatedExport(f"{head.name} changed while it was read")
            head.size = info.st_size
            self._header(head)
            if head.size > self.left_bytes:
                # The validator knows the size from the header and refuses it by that.
                raise TruncatedExport(f"{head.name} is over the limit of bytes")
            self.left_bytes -= head.size
            self._contents(fd, head)
        finally:
            os.close(fd)

    def _contents(self, fd: int, head: tarfile.TarInfo) -> None:
        left = head.size
        while left:
            chunk = os.read(fd, min(left, _CHUNK))
            if not chunk:
                raise TruncatedExport(f"{head.name} shrank while it was read")
            self.pipe.write(chunk)
            left -= len(chunk)
        self.pipe.write(bytes(-head.size % tarfile.BLOCKSIZE))
