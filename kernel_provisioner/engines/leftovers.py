"""Ends and removes what a session left on the host: by identity, by name, and never by guesswork.

Used by a supervisor for its own guest and by a sweep for a dead supervisor's. A process is killed
only if its start time is the recorded one, or while it is a member of a control group that carries
the session's name; so neither a number nor a path that somebody else has since taken is touched.
Everything is idempotent and bounded in time. Standard library only.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from kernel_provisioner.engines.base import Leftovers
from kernel_provisioner.processes import descendants, kill_and_wait

PREFIX = "backintel-"
"""Every control group of ours is named ``backintel-<session>`` (a systemd scope: ``.scope``)."""
_RETRY_S = 0.002
_ASKED_S = 0.5
"""How long a process of an ordinary user may take to end what it keeps: milliseconds."""


def remove_leftovers(leftovers: Leftovers, session: str, timeout: float = 2.0) -> list[str]:
    """End and remove what a killed supervisor's guest left; return what could not be, and why.

    Blocks up to about ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    left = []
    for cgroup in leftovers.cgroups:
        if _is_of(cgroup, session):
            thaw(cgroup)  # on cgroup v1 what is frozen does not die
    # A microVM's keeper of an ordinary user ends what it keeps once it is told, but if it is killed
    # what it keeps may live on, with no record that names it. Root's has a PID namespace, and what
    # has a control group is found there.
    asked = min(_ASKED_S, timeout / 2) if os.geteuid() and not leftovers.cgroups else 0.0
    kept = (
        [each for process in leftovers.processes for each in descendants(process)] if asked else []
    )
    for process in leftovers.processes:
        if not kill_and_wait(process, max(0.0, deadline - time.monotonic()), asked=asked):
            left.append(f"process {process.pid} could not be killed")
    for process in kept:
        # What a keeper that did not hear has left.
        if not kill_and_wait(process, max(0.1, deadline - time.monotonic())):
            left.append(f"process {process.pid} could not be killed")
    for cgroup in leftovers.cgroups:
        if not _is_of(cgroup, session):
            left.append(f"{cgroup} does not carry the session's name; left alone")
        elif not remove_cgroup(cgroup, deadline):
            left.append(f"cgroup {cgroup} could not be removed")
    for directory in leftovers.directories:
        left += remove_directory(directory, session)
    return left


def _is_of(cgroup: Path, session: str) -> bool:
    inside = str(cgroup).startswith("/sys/fs/cgroup/")
    return inside and cgroup.name.removesuffix(".scope") == PREFIX + session


def remove_directory(directory: Path, session: str) -> list[str]:
    """Remove a private directory that carries the session's name; return why it could not be."""
    if directory.name != session:
        return [f"{directory} does not carry the session's name; left alone"]
    import shutil  # here: it is not imported by a launch, which is waited for

    reason = ""
    # Another sweep may be at work in it, or a thread that still writes: look again.
    for _ in range(3):
        try:
            shutil.rmtree(directory)
        except OSError as error:
            reason = error.strerror or str(error)
        if not directory.exists():
            return []
    return [f"{directory} could not be removed ({reason})"]


def thaw(cgroup: Path) -> None:
    """Let a group go on that a killed supervisor or a kill finds frozen; else nothing happens."""
    for name, word in (("freezer.state", "THAWED"), ("cgroup.freeze", "0")):
        # Opened, not created: in a group without a freezer there is no such file.
        with suppress(OSError):
            fd = os.open(cgroup / name, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(fd, word.encode())
            finally:
                os.close(fd)


def members(cgroup: Path) -> list[int]:
    """Return the processes of one control group; empty if it is gone."""
    try:
        return [int(pid) for pid in (cgroup / "cgroup.procs").read_text().split() if pid != "0"]
    except OSError:
        return []


def kill_members(cgroup: Path) -> None:
    """SIGKILL each member once; who forked meanwhile is found by the next call."""
    for pid in members(cgroup):
        with suppress(OSError):
            fd = os.pidfd_open(pid)
            try:
                # Between the listing and the pidfd the number may have passed to a process outside.
                if pid in members(cgroup):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            finally:
                os.close(fd)


def remove_cgroup(cgroup: Path, deadline: float) -> bool:
    """Kill what is in a group of ours and remove it; True once it is gone.

    Members can fork while they are listed, and removal answers EBUSY until the kernel has freed
    the last task: hence the retries, until ``deadline`` (CLOCK_MONOTONIC).
    """
    if not cgroup.name.startswith(PREFIX):
        return False
    while True:
        kill_members(cgroup)
        thaw(cgroup)
        try:
            cgroup.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_RETRY_S)
        else:
            return True
