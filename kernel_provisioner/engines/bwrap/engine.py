"""The bwrap engine: starts guests with bubblewrap, as root or as an ordinary user (spec B).

As root everything runs as uid 10001, which the launcher becomes before bubblewrap; as a user the
user's own uid is shown as 10001. The engine trusts its pinned binary, the verified image and the
host's kernel.
"""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack

from kernel_provisioner.engines.base import EngineFacts, GuestSpec, Leftovers
from kernel_provisioner.engines.bwrap import cgroups, freezer, keeper, linux
from kernel_provisioner.engines.bwrap.binary import Binary, load_pins, verify_binary
from kernel_provisioner.engines.bwrap.launcher import run_child
from kernel_provisioner.engines.bwrap.launching import Launched, undo
from kernel_provisioner.engines.bwrap.layout import layout
from kernel_provisioner.engines.bwrap.prepare import prepare
from kernel_provisioner.errors import StartFailed
from kernel_provisioner.processes import identify


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

    def launch(self, spec: GuestSpec) -> Launched:
        """See engines.base.Engine. Raises EngineUnavailable, HostRefused, StartFailed."""
        if threading.current_thread() is not threading.main_thread():
            raise StartFailed(
                "a guest must be started from the main thread: it dies with the thread that "
                "forked it.",
                phase="launch",
            )
        return _launch(spec, verify_binary(), _choose(spec))


def _choose(spec: GuestSpec) -> cgroups.Group:
    return cgroups.choose(spec.session, cgroups.HostView.read(), _scope)


def _scope(view: cgroups.HostView, name: str) -> cgroups.Group | str:
    # Only where it is needed: it starts programs, and a launch waits for what is imported.
    from kernel_provisioner.engines.bwrap.scope import choose_scope

    return choose_scope(view, name)


def _launch(spec: GuestSpec, binary: Binary, group: cgroups.Group) -> Launched:
    as_root = os.geteuid() == 0
    plan = layout(spec)
    with ExitStack() as ours:
        with ExitStack() as theirs:
            launch, ends = prepare(spec, binary, plan, as_root, ours, theirs)
            # Who reaps process 1 tells how a guest ended: see BwrapGuest._outside_kill.
            linux.adopt_orphans()
            pid = os.fork()
            if pid == 0:
                run_child(launch)
        # The child's ends are closed here now, so that its death shows as end of file.
        identity = identify(pid)
        monitor_fd = os.pidfd_open(pid)
        asks, orders = freezer.pair()
        ended_by = None
        try:
            if identity is None:
                raise StartFailed("the launcher vanished.", phase="launch")
            group.create(cgroups.Caps.of(spec.profile))
            group.admit(pid)
            limits = group.limits()
            with orders:
                ended_by = keeper.start(
                    monitor_fd, group.paths, spec.backstop_s, group.freezer, orders
                )
            # Only now, capped and kept, may the launcher go on.
            os.write(ends.gate, b"g")
        except BaseException as error:
            asks.close()
            orders.close()
            undo(group, pid, monitor_fd)
            if ended_by is not None:
                keeper.reap(ended_by)
            if isinstance(error, BrokenPipeError):
                raise StartFailed("the launcher was killed.", phase="launch") from None
            raise
        return Launched(
            spec=spec,
            group=group,
            limits=limits,
            monitor=identity,
            monitor_fd=monitor_fd,
            keeper=ended_by,
            freezer=freezer.SupervisorEnd(asks),
            ends=ends,
            held=ours.pop_all(),
            read_only=frozenset(item.target for item in plan.items),
            as_root=as_root,
        )
