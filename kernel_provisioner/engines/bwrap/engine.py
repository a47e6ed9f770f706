"""The bwrap engine: starts guests with bubblewrap, as root or as an ordinary user (spec B).

As root everything runs as uid 10001, which the launcher becomes before bubblewrap; as a user the
user's own uid is shown as 10001. The engine trusts its pinned binary, the verified image and the
host's kernel.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from contextlib import ExitStack

from kernel_provisioner.engines.base import EngineFacts, GuestSpec, Leftovers, ProcessIdentity
from kernel_provisioner.engines.bwrap import cgroups, keeper, linux, waiting
from kernel_provisioner.engines.bwrap.binary import Binary, load_pins, verify_binary
from kernel_provisioner.engines.bwrap.guest import BwrapGuest, Held, remove_groups
from kernel_provisioner.engines.bwrap.launcher import run_child
from kernel_provisioner.engines.bwrap.layout import layout
from kernel_provisioner.engines.bwrap.output import OutputTail, explain, refused_by
from kernel_provisioner.engines.bwrap.paths import remove_sockets
from kernel_provisioner.engines.bwrap.prepare import Ends, prepare
from kernel_provisioner.engines.bwrap.scope import choose_scope
from kernel_provisioner.errors import StartFailed
from kernel_provisioner.processes import identify

_LAUNCH_TIMEOUT_S = 15.0


class BwrapEngine:
    """See engines.base.Engine. Stateless: one instance may start any number of guests."""

    name = "bwrap"
    isolation = "namespaces: weaker isolation"

    def verify(self, *, deep: bool = False) -> EngineFacts:
        """Digest every executed file and compare it with its pin.

        The whole check takes about a millisecond, so ``deep`` adds nothing. Raises
        EngineUnavailable.
        """
        del deep
        binary = verify_binary()
        return EngineFacts(self.name, binary.version, load_pins().files)

    def plan(self, spec: GuestSpec) -> Leftovers:
        """Return the cgroups that ``start`` will make. Raises HostRefused if none can be."""
        return Leftovers(cgroups=_choose(spec).paths)

    async def start(self, spec: GuestSpec) -> BwrapGuest:
        """Start a guest that waits for ``release``; call it on the process's main thread.

        Raises EngineUnavailable, HostRefused, StartFailed; then nothing is left.
        """
        if threading.current_thread() is not threading.main_thread():
            raise StartFailed(
                "a guest must be started from the main thread: it dies with the thread that "
                "forked it.",
                phase="launch",
            )
        binary = verify_binary()
        group = _choose(spec)
        return await _start(spec, binary, group)


def _choose(spec: GuestSpec) -> cgroups.Group:
    return cgroups.choose(spec.session, cgroups.HostView.read(), choose_scope)


async def _start(spec: GuestSpec, binary: Binary, group: cgroups.Group) -> BwrapGuest:
    as_root = os.geteuid() == 0
    plan = layout(spec)
    with ExitStack() as ours:
        with ExitStack() as theirs:
            launch, ends = prepare(spec, binary, plan, as_root, ours, theirs)
            pid = os.fork()
            if pid == 0:
                run_child(launch)
        # The child's ends are closed here now, so that its death shows as end of file.
        identity = identify(pid)
        monitor_fd = os.pidfd_open(pid)
        if identity is None:
            raise StartFailed("the launcher vanished.", phase="launch")
        ends.passed_on()
        output = OutputTail(ends.output)
        ended_by: ProcessIdentity | None = None
        try:
            group.create(cgroups.Caps.of(spec.profile))
            group.admit(pid)
            limits = group.limits()
            ended_by = keeper.start(monitor_fd, group.paths, spec.backstop_s)
            child = await _through_the_gate(ends, output, waiting.deadline_in(_LAUNCH_TIMEOUT_S))
            child_fd = linux.open_identity(child)
            if child_fd is None:
                raise explain(output.text(), "its process 1 ended", "launch")
        except BaseException:
            _abandon(spec, group, pid, monitor_fd, output, ends.control)
            if ended_by is not None:
                keeper.reap(ended_by)
            raise
        held = Held(
            spec=spec,
            group=group,
            limits=limits,
            monitor=identity,
            monitor_fd=monitor_fd,
            child=child,
            child_fd=child_fd,
            keeper=ended_by,
            control=ends.control,
            output=output,
            read_only=frozenset(item.target for item in plan.items),
            as_root=as_root,
        )
        return BwrapGuest(held)


def _abandon(
    spec: GuestSpec,
    group: cgroups.Group,
    pid: int,
    monitor_fd: int,
    output: OutputTail,
    control: socket.socket,
) -> None:
    """Undo a failed start: whatever entered the cgroup is killed with the launcher."""
    linux.pidfd_kill(monitor_fd, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(monitor_fd)
    output.close()
    control.close()
    remove_groups(group.paths, waiting.deadline_in(2))
    remove_sockets(spec.socket_dir)


async def _through_the_gate(ends: Ends, output: OutputTail, deadline: float) -> ProcessIdentity:
    """Let the launcher go on; return the sandbox's process 1 once bubblewrap reports it."""
    os.write(ends.gate, b"g")
    failure = await _read_all(ends.errors, deadline)
    if failure:
        report = json.loads(failure)
        raise refused_by(str(report["message"]), str(report["phase"]))
    info = await _read_all(ends.info, deadline, until=b"}")
    try:
        pid = int(json.loads(info)["child-pid"])
    except (ValueError, KeyError, TypeError):
        output.drain()
        raise explain(output.text(), "bwrap ended", "launch") from None
    child = identify(pid)
    if child is None:
        output.drain()
        raise explain(output.text(), "its process 1 ended", "launch")
    return child


async def _read_all(fd: int, deadline: float, until: bytes = b"") -> bytes:
    """Read to end of file, or to ``until``. The writer is the launcher or bwrap: trusted."""
    data = b""
    while True:
        try:
            await waiting.readable(fd, deadline)
        except TimeoutError:
            raise StartFailed("bwrap did not start in time.", phase="launch") from None
        chunk = os.read(fd, 65536)
        data += chunk
        if not chunk or (until and until in data):
            return data
