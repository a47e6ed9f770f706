"""A launched sandbox whose process 1 is not known yet: claimed as a guest, or undone.

Between the launch and the claim nothing is waited for, and nothing that needs an event loop is
imported: the supervisor does the rest of its own start while bubblewrap works. Whoever dies in
between, the keeper ends what was launched. Trusts the launcher and bubblewrap, not the guest.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernel_provisioner.engines.base import GuestSpec, Leftovers, ProcessIdentity
from kernel_provisioner.engines.bwrap import cgroups, keeper, linux, waiting
from kernel_provisioner.engines.bwrap.freezer import SupervisorEnd
from kernel_provisioner.engines.bwrap.prepare import Ends
from kernel_provisioner.engines.leftovers import members
from kernel_provisioner.errors import StartFailed
from kernel_provisioner.processes import identify

if TYPE_CHECKING:
    from kernel_provisioner.engines.bwrap.guest import BwrapGuest
    from kernel_provisioner.engines.bwrap.output import OutputTail

_LAUNCH_TIMEOUT_S = 15.0
_UNDO_S = 2.0
_REAP_INTERVAL_S = 0.002


@dataclass(slots=True)
class Launched:
    """See engines.base.Launched. The caller of ``claim`` or ``abandon`` is the main thread."""

    spec: GuestSpec
    group: cgroups.Group
    limits: Mapping[str, object]
    monitor: ProcessIdentity
    monitor_fd: int
    keeper: ProcessIdentity
    freezer: SupervisorEnd
    ends: Ends
    held: ExitStack
    """Closes our ends of the launch; those that the guest goes on to use leave it before."""
    read_only: frozenset[str]
    as_root: bool

    @property
    def leftovers(self) -> Leftovers:
        """What a sweep has to end and remove if the supervisor is killed now."""
        return Leftovers((self.monitor, self.keeper), self.group.paths, ())

    async def claim(self) -> BwrapGuest:
        """Return the guest once bubblewrap reports its process 1.

        Raises HostRefused, StartFailed; then, and if it is cancelled, nothing is left.
        """
        from kernel_provisioner.engines.bwrap.guest import BwrapGuest, Held
        from kernel_provisioner.engines.bwrap.output import OutputTail, explain

        output: OutputTail | None = None
        try:
            output = OutputTail(os.dup(self.ends.output))
            child = await self._process_1(output, waiting.deadline_in(_LAUNCH_TIMEOUT_S))
            child_fd = linux.open_identity(child)
            if child_fd is None:
                raise explain(output.text(), "its process 1 ended", "launch")
        except BaseException:
            if output is not None:
                output.close()
            self.abandon()
            raise
        self.ends.claimed()
        self.held.close()
        return BwrapGuest(
            Held(
                spec=self.spec,
                group=self.group,
                limits=self.limits,
                monitor=self.monitor,
                monitor_fd=self.monitor_fd,
                child=child,
                child_fd=child_fd,
                keeper=self.keeper,
                freezer=self.freezer,
                control=self.ends.control,
                targets=self.ends.targets,
                output=output,
                read_only=self.read_only,
                as_root=self.as_root,
            )
        )

    def abandon(self) -> None:
        """Undo the launch: whatever entered the cgroup is killed with the launcher."""
        undo(self.group, self.monitor.pid, self.monitor_fd)
        keeper.reap(self.keeper)
        self.freezer.close()
        self.held.close()

    async def _process_1(self, output: OutputTail, deadline: float) -> ProcessIdentity:
        from kernel_provisioner.engines.bwrap.output import explain, refused_by

        failure = await _read_all(self.ends.errors, deadline)
        if failure:
            report = json.loads(failure)
            raise refused_by(str(report["message"]), str(report["phase"]))
        info = await _read_all(self.ends.info, deadline, until=b"}")
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


def undo(group: cgroups.Group, pid: int, monitor_fd: int) -> None:
    """Kill and reap a launcher and remove its cgroups; closes ``monitor_fd``."""
    # Process 1 of the sandbox is adopted by this process, and ends with its parent: it may be known
    # by its cgroup only before.
    mine = {member for path in group.paths for member in members(path)}
    linux.pidfd_kill(monitor_fd, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(monitor_fd)
    mine |= {member for path in group.paths for member in members(path)}
    deadline = waiting.deadline_in(_UNDO_S)
    cgroups.remove_all(group.paths, deadline)
    for adopted in mine - {pid}:
        _reap(adopted, deadline)


def _reap(pid: int, deadline: float) -> None:
    """Collect a dying process if it is a child; it leaves its cgroup before it can be collected."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and waiting.left(deadline):
            time.sleep(_REAP_INTERVAL_S)


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
