"""The few Linux calls that Python's standard library lacks, with errors as OSError.

Responsible for argument layouts only; what is called when, and why, stands with the callers. All
libc symbols are resolved at import, so that a forked child calls nothing that takes a lock.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from pathlib import Path

from kernel_provisioner.engines.base import ProcessIdentity
from kernel_provisioner.processes import is_running, open_pidfd

CLONE_NEWNS = 0x00020000
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_REC = 0x4000
MS_PRIVATE = 0x40000

RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08

_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_LAST_CAPABILITY = 63

# These numbers are the same on x86_64 and aarch64 (all syscalls since 5.1 share one table).
_SYS_OPEN_TREE = 428
_SYS_MOVE_MOUNT = 429
_SYS_CLOSE_RANGE = 436
_SYS_OPENAT2 = 437

_AT_FDCWD = -100
_AT_EMPTY_PATH = 0x1000
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_CLOSE_RANGE_CLOEXEC = 4

_libc = ctypes.CDLL(None, use_errno=True)
_prctl = _libc.prctl
_prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
_unshare = _libc.unshare
_unshare.argtypes = [ctypes.c_int]
_mount = _libc.mount
_mount.argtypes = [
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
]
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Leave the namespaces named by ``flags`` for new ones. Raises OSError."""
    _check(_unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Attach a file system; an empty string passes a null pointer. Raises OSError."""
    result = _mount(
        source.encode(), os.fsencode(target), kind.encode() or None, flags, data.encode() or None
    )
    _check(result, f"mount on {target}")


def open_tree(fd: int) -> int:
    """Return a detached recursive bind of what ``fd`` (O_PATH) names. Raises OSError."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH | _AT_RECURSIVE
    return _check(
        _syscall(_SYS_OPEN_TREE, ctypes.c_int(fd), b"", ctypes.c_uint(flags)), "open_tree"
    )


def move_mount(tree: int, target: str) -> None:
    """Attach a detached mount at ``target``. Raises OSError."""
    result = _syscall(
        _SYS_MOVE_MOUNT,
        ctypes.c_int(tree),
        b"",
        ctypes.c_int(_AT_FDCWD),
        os.fsencode(target),
        ctypes.c_uint(_MOVE_MOUNT_F_EMPTY_PATH),
    )
    _check(result, f"move_mount on {target}")


def openat2(dir_fd: int, path: str, flags: int, resolve: int) -> int:
    """Open ``path`` under ``dir_fd`` with RESOLVE_* restrictions; close-on-exec. Raises OSError."""
    how = struct.pack("QQQ", flags | os.O_CLOEXEC, 0, resolve)
    result = _syscall(
        _SYS_OPENAT2,
        ctypes.c_int(dir_fd),
        os.fsencode(path),
        how,
        ctypes.c_size_t(len(how)),
    )
    return _check(result, f"open {path!r}")


def open_path(path: Path) -> int:
    """Return an O_PATH fd of an absolute path of which no component is a symbolic link.

    A link put there after the path was checked makes this fail instead of leading elsewhere.
    Raises OSError.
    """
    return openat2(_AT_FDCWD, str(path), os.O_PATH, RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS)


def close_on_exec_from(first: int) -> None:
    """Mark every fd from ``first`` on close-on-exec (Linux 5.11). Raises OSError."""
    result = _syscall(
        _SYS_CLOSE_RANGE,
        ctypes.c_uint(first),
        ctypes.c_uint(0xFFFFFFFF),
        ctypes.c_uint(_CLOSE_RANGE_CLOEXEC),
    )
    _check(result, "close_range")


def drop_capabilities() -> None:
    """Empty the capability bounding and ambient sets of this thread. Raises OSError."""
    for capability in range(_LAST_CAPABILITY + 1):
        # EINVAL says that the running kernel knows no such capability.
        if _prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0 and ctypes.get_errno() != 22:
            _check(-1, "drop capability bounding set")
    _check(_prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "clear ambient set")


def set_no_new_privs() -> None:
    """Forbid that an exec raises privileges. Raises OSError."""
    _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends. Raises OSError."""
    _check(_prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "child subreaper")


def set_parent_death_signal() -> None:
    """Ask for SIGKILL when the thread that forked this process ends. Raises OSError."""
    _check(_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "parent death signal")


def parent_pid(pid: int) -> int | None:
    """Return the parent of ``pid``, None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return int(text[text.rindex(b")") + 2 :].split()[1])


def open_identity(identity: ProcessIdentity) -> int | None:
    """Return a pidfd of exactly this process, None if it is gone (or only a later namesake lives).

    The start time is compared after the pidfd exists: from then on the number cannot be reused
    without the pidfd saying so.
    """
    fd = open_pidfd(identity.pid)
    if fd is None:
        return None
    if is_running(identity):
        return fd
    os.close(fd)
    return None


def pidfd_kill(fd: int, signum: int) -> bool:
    """Send a signal through a pidfd; False if the process is gone already."""
    try:
        signal.pidfd_send_signal(fd, signum)
    except ProcessLookupError:
        return False
    return True


def cpu_ticks(pid: int) -> int:
    """Return clock ticks of CPU used by a process and its reaped children, 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return 0
    return sum(int(word) for word in text[text.rindex(b")") + 2 :].split()[11:15])
