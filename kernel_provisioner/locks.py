"""Locks that the kernel lets go with the process that holds them. Standard library only."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

# NFS has no flock of directories, and some file systems have none at all.
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOLCK, errno.ENOSYS}


def try_lock(fd: int) -> bool | None:
    """Take the lock of an open file: True, False if another process has it, None if impossible."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return None
        raise
    return True


def is_entry(path: Path | str, fd: int, dir_fd: int | None = None) -> bool:
    """Whether the open file is still what the path names: a lock of a removed one excludes nobody.

    Raises OSError.
    """
    try:
        info = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (info.st_dev, info.st_ino) == (held.st_dev, held.st_ino)
