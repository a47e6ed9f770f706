"""The digest of what the program expanded: its agent root and disk templates, which no pin covers.

Only for preparation and for ``sandbox check --deep``: a start compares stat facts instead.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

from kernel_provisioner.images.digest import walk

_CHUNK = 1 << 20
_OFFSET = struct.Struct(">Q")


def expanded_digest(place: Path, pinned: Collection[str]) -> str:
    """Return the sha256 (hex) of all below ``place`` but the files ``pinned`` at its top.

    It covers kind, path, mode, link target and contents. Raises ImageInvalid for a special file,
    OSError if the tree cannot be read.
    """
    top = hashlib.sha256(b"backintel-expanded-1\n")
    for entry in walk(place):
        if entry.path in pinned:
            continue
        value = _file_digest(place / entry.path) if entry.kind == "f" else entry.target
        top.update(os.fsencode(f"{entry.kind}\0{entry.path}\0{entry.mode:o}\0{value}\0\n"))
    return top.hexdigest()


def _file_digest(path: Path) -> str:
    """Digest a file without reading its holes: the disk templates are 30 GiB with 20 MB of data.

    Blocks of zeros count like holes, so that it does not matter how the file system stores them.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with open(fd, "rb", buffering=0):
        size = os.fstat(fd).st_size
        digest = hashlib.sha256(_OFFSET.pack(size))
        for offset in _chunks_with_data(fd, size):
            chunk = os.pread(fd, _CHUNK, offset)
            if chunk.count(0) != len(chunk):
                digest.update(_OFFSET.pack(offset) + chunk)
    return digest.hexdigest()


def _chunks_with_data(fd: int, size: int) -> Iterator[int]:
    """Yield, ascending, the offset of each chunk of the file that is not one hole."""
    at = 0
    while at < size:
        try:
            data = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                return
            raise
        at = data - data % _CHUNK
        yield at
        at += _CHUNK
