"""The keeper: a process outside the guest's reach that ends it when nobody else does.

bubblewrap's die-with-parent and the timer on its monitor both end process 1 of the sandbox by its
parent-death signal. Guest code has the uid of that process and can rewrite it: through /proc/1/mem
it was measured to clear the signal and to outlive a killed supervisor. Nor does process 1 have that
signal before it has set the sandbox up: with its parents killed then, it waited for ever for them.
So a fork of the supervisor, in no namespace and no cgroup of the guest, watches both from before
bubblewrap starts and sends SIGKILL itself, to all that is in the guest's cgroups. It also freezes
the guest for the supervisor, and lets it go on in time should the supervisor not.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kernel_provisioner.engines.base import ProcessIdentity
from kernel_provisioner.engines.bwrap.freezer import Freezer, KeeperEnd
from kernel_provisioner.engines.leftovers import kill_members, members
from kernel_provisioner.processes import identify

_INSIST_S = 0.01
"""How often a kill is repeated until the kernel has taken the sandbox down."""


def start(
    monitor_fd: int,
    groups: Sequence[Path],
    backstop_s: float,
    freezer: Freezer | None,
    orders: socket.socket,
) -> ProcessIdentity:
    """Fork the keeper; call it on a process's main thread. Raises OSError.

    It ends all in ``groups`` when the calling process or bubblewrap's monitor is gone, or
    ``backstop_s`` seconds from now, and ends itself when nobody is left. ``orders`` is the keeper's
    end of ``freezer.pair``. The caller reaps it.
    """
    owner = os.pidfd_open(os.getpid())
    try:
        pid = os.fork()
        if pid == 0:
            deadline = time.monotonic() + backstop_s
            _run(owner, monitor_fd, orders.fileno(), groups, deadline, freezer)
    finally:
        os.close(owner)
    identity = identify(pid)
    if identity is None:
        raise OSError("the keeper of the sandbox ended at once")
    return identity


def reap(keeper: ProcessIdentity) -> None:
    """Collect a keeper whose guest is gone; kill it first, for it has nothing left to do."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(keeper.pid, signal.SIGKILL)  # our own child, not yet reaped: the pid is its own
        os.waitpid(keeper.pid, 0)


def _run(
    owner: int,
    monitor: int,
    orders: int,
    groups: Sequence[Path],
    deadline: float,
    freezer: Freezer | None,
) -> NoReturn:
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        owner, monitor, orders = _only(owner, monitor, orders)
        poller = select.poll()
        for fd in (owner, monitor):
            poller.register(fd, select.POLLIN)
        poller.register(orders, select.POLLIN)
        hold = KeeperEnd(orders, freezer)
        while (left := deadline - (now := time.monotonic())) > 0:
            ready = {fd for fd, _ in poller.poll(max(0.0, min(left, hold.wakeup - now)) * 1000)}
            if owner in ready or monitor in ready:
                break
            if orders in ready:
                hold.serve(poller)
            if time.monotonic() >= hold.wakeup:
                hold.release(b"L")
        # On cgroup v1 what is frozen does not even die.
        hold.release(b"L")
        while any(members(group) for group in groups):
            for group in groups:
                kill_members(group)
            time.sleep(_INSIST_S)
    finally:
        os._exit(0)


def _only(*fds: int) -> list[int]:
    """Keep just these descriptors, from 3 on: the rest would hold the supervisor's sockets open."""
    spare = [os.dup(fd) for fd in fds]
    high = [os.dup2(fd, max(spare) + 1 + number) for number, fd in enumerate(spare)]
    kept = [os.dup2(fd, 3 + number) for number, fd in enumerate(high)]
    os.closerange(3 + len(kept), os.sysconf("SC_OPEN_MAX"))
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    return kept
