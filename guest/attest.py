"""Reads back what holds inside the sandbox, before any user code runs.

It only reports; the host compares. Every fact comes from the kernel (``/proc``, ``statvfs``,
``getrlimit``), none from what was asked for.
"""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import struct
import sys

import limits

_SIOCGIFFLAGS = 0x8913
_STATUS = (
    "Uid",
    "Gid",
    "Groups",
    "NoNewPrivs",
    "Seccomp",
    "Seccomp_filters",
    "CapInh",
    "CapPrm",
    "CapEff",
    "CapBnd",
    "CapAmb",
)
_NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")


def facts(tmpfs: list[str]) -> dict[str, object]:
    """Return all facts as JSON values; ``tmpfs`` names the mounts whose size is asked.

    Raises OSError if the kernel does not answer.
    """
    status = _status()
    return {
        "uid": _numbers(status["Uid"]),
        "gid": _numbers(status["Gid"]),
        "groups": _numbers(status["Groups"]),
        "no_new_privs": int(status["NoNewPrivs"]),
        "seccomp_mode": int(status["Seccomp"]),
        "seccomp_filters": int(status.get("Seccomp_filters", "0")),
        "capabilities": {name: int(status[name], 16) for name in _STATUS if name.startswith("Cap")},
        "rlimits": limits.read(),
        "interfaces": _interfaces(),
        "mounts": _mounts(),
        "tmpfs": {path: _space(path) for path in tmpfs},
        "hostname": platform.node(),
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "session": os.getsid(0),
        "group": os.getpgrp(),
        "cwd": os.getcwd(),
        "umask": _umask(),
        "terminal": _has_terminal(),
        "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES},
        "fds": _open_fds(),
        "environment": sorted(os.environ),
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "machine": platform.machine(),
    }


def _status() -> dict[str, str]:
    with open("/proc/self/status") as file:
        pairs = (line.split(":", 1) for line in file if ":" in line)
        return {name: value.strip() for name, value in pairs if name in _STATUS}


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split()]


def _interfaces() -> dict[str, int]:
    """Return SIOCGIFFLAGS by interface name."""
    with open("/proc/self/net/dev") as file:
        names = [line.split(":", 1)[0].strip() for line in file.readlines()[2:]]
    flags = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for name in names:
            answer = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16s16x", name.encode()))
            flags[name] = struct.unpack_from("H", answer, 16)[0]
    return flags


def _mounts() -> list[list[str]]:
    """Return [target, file system type, mount options], in mount order.

    Sources and roots are left out: they are paths of the host.
    """
    found = []
    with open("/proc/self/mountinfo") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            fields = before.split()
            target = fields[4].encode().decode("unicode_escape")  # \\040 for a blank
            found.append([target, after.split()[0], fields[5]])
    return found


def _space(path: str) -> dict[str, int]:
    info = os.statvfs(path)
    stat = os.stat(path)
    return {
        "bytes": info.f_blocks * info.f_frsize,
        "free_bytes": info.f_bfree * info.f_frsize,
        "mode": stat.st_mode & 0o7777,
        "uid": stat.st_uid,
    }


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _open_fds() -> dict[str, str]:
    """Return what each open descriptor is, by kind: socket, pipe or a path."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor of this very listing
            continue
        found[name] = target.split(":[")[0]
    return found
