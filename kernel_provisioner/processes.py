"""Processes by identity: a pid counts only together with its start time.

A pid alone may have been given to a stranger meanwhile, so nothing here signals one without
comparing field 22 of /proc/PID/stat, and the signal goes through a pidfd opened before that
comparison. Standard library only.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from pathlib import Path

from kernel_provisioner.engines.base import ProcessIdentity


def start_time(pid: int) -> int | None:
    """Return the start time of ``pid`` in clock ticks since boot, or None if there is none.

    A zombie counts as gone: it runs no code and only waits to be reaped (SmolVM#189).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The command name may hold spaces and parentheses; fields count from the last ")".
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def identify(pid: int) -> ProcessIdentity | None:
    """Return the identity of a running process, or None if it is gone."""
    started = start_time(pid)
    return None if started is None else ProcessIdentity(pid, started)


def is_running(process: ProcessIdentity) -> bool:
    """Whether this very process still runs."""
    return start_time(process.pid) == process.start_time


def children(pid: int) -> list[int]:
    """Return the numbers of a process's children; empty if it is gone."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in path.read_text().split()]
        except OSError:
            continue
    return found


def descendants(process: ProcessIdentity) -> list[ProcessIdentity]:
    """Return what this very process has started, and what that has, as far as it still runs."""
    found: list[ProcessIdentity] = []
    numbers = children(process.pid)
    while numbers:
        identity = identify(numbers.pop())
        if identity is not None and identity not in found:
            found.append(identity)
            numbers += children(identity.pid)
    return found if is_running(process) else []


def open_pidfd(pid: int) -> int | None:
    """Return a pidfd, or None if there is no such process. Raises OSError for want of descriptors.

    A number that is no process's any more may still name the session of others, as a killed
    keeper's does for a moment, of which Linux 6.12 says EINVAL; or be a thread's by now, of which
    6.12 says EINVAL and 6.18 ENOENT.
    """
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def kill_and_wait(process: ProcessIdentity, timeout: float, *, asked: float = 0.0) -> bool:
    """SIGKILL this very process and wait at most ``timeout`` seconds. True once it is gone.

    With ``asked`` it first gets SIGTERM and that many seconds more, to end what it keeps.
    """
    fd = open_pidfd(process.pid)
    if fd is None:
        return True
    try:
        if not is_running(process):
            return True
        if asked > 0 and _signal_and_wait(fd, signal.SIGTERM, asked):
            return True
        return _signal_and_wait(fd, signal.SIGKILL, timeout) or not is_running(process)
    finally:
        os.close(fd)


def end_child(pidfd: int, asked: float) -> None:
    """End a child that is not reaped: by SIGTERM, and by SIGKILL after ``asked`` seconds."""
    if asked <= 0 or not _signal_and_wait(pidfd, signal.SIGTERM, asked):
        _signal_and_wait(pidfd, signal.SIGKILL, 0.0)


def _signal_and_wait(fd: int, signum: int, timeout: float) -> bool:
    """Send a signal and wait; return whether the process ended."""
    try:
        signal.pidfd_send_signal(fd, signum)
    except ProcessLookupError:
        return True
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        if poller.poll(left * 1000):
            return True
    return False


def boot_id() -> str:
    """Return the kernel's random identity of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
