"""The smolvm engine: one microVM for each session, run by a pinned ``smol-vmm`` (spec B).

The program runs in the foreground as a child of the supervisor and dies with it. It never runs as
root. The engine trusts the prepared release, the verified image and the host's KVM.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kernel_provisioner.engines.base import EngineFacts, GuestSpec, Leftovers, ProcessIdentity
from kernel_provisioner.engines.bwrap import linux, seccomp, waiting
from kernel_provisioner.engines.bwrap.layout import layout
from kernel_provisioner.engines.bwrap.output import OutputTail
from kernel_provisioner.engines.leftovers import remove_directory
from kernel_provisioner.engines.smolvm import command, host, workspace
from kernel_provisioner.engines.smolvm.guest import Held, SmolvmGuest
from kernel_provisioner.engines.smolvm.launcher import STAGE, Launch, Tree, run_child
from kernel_provisioner.engines.smolvm.release import Prepared, load_prepared
from kernel_provisioner.engines.smolvm.workspace import Places
from kernel_provisioner.errors import HostRefused, StartFailed
from kernel_provisioner.paths import StateDirs, state_dirs
from kernel_provisioner.processes import end_child, identify

_LAUNCH_TIMEOUT_S = 15.0
_ASKED_S = 1.0


class SmolvmEngine:
    """See engines.base.Engine. Stateless: one instance may start any number of guests."""

    name = "smolvm"
    isolation = "microVM"

    def __init__(self, dirs: StateDirs | None = None) -> None:
        self._dirs = state_dirs() if dirs is None else dirs

    def verify(self, *, deep: bool = False) -> EngineFacts:
        """Check the host and the prepared release. Raises EngineUnavailable, HostRefused."""
        host.check_host()
        prepared = load_prepared(self._dirs, deep=deep)
        return EngineFacts(self.name, prepared.version, prepared.digests)

    def plan(self, spec: GuestSpec) -> Leftovers:
        """Return the directories that ``launch`` will make."""
        places = Places.of(spec, self._dirs)
        return Leftovers(directories=(places.directory, places.sockets))

    def launch(self, spec: GuestSpec) -> Launched:
        """See engines.base.Engine. The boot is waited for by the guest's ``wait_attested``."""
        if threading.current_thread() is not threading.main_thread():
            raise StartFailed(
                "a guest must be started from the main thread: it dies with the thread that "
                "forked it.",
                phase="launch",
            )
        prepared = load_prepared(self._dirs)
        open_files = host.open_files()
        places = Places.of(spec, self._dirs)
        user = workspace.new_user()
        try:
            workspace.make(places, prepared, user)
            return _launch(spec, prepared, places, user, open_files)
        except BaseException:
            _remove(places, spec.session)
            raise


@dataclass(slots=True)
class Launched:
    """See engines.base.Launched."""

    spec: GuestSpec
    places: Places
    user: int
    plan: Mapping[str, object]
    read_only: frozenset[str]
    monitor: ProcessIdentity
    monitor_fd: int
    open_files: int
    output: int
    errors: int
    listeners: Mapping[str, socket.socket]

    @property
    def leftovers(self) -> Leftovers:
        """What a sweep has to end and remove if the supervisor is killed now."""
        return Leftovers((self.monitor,), (), (self.places.directory, self.places.sockets))

    async def claim(self) -> SmolvmGuest:
        """Return the guest once the launcher became smol-vmm; the boot is not waited for."""
        try:
            await _executed(self.errors)
        except BaseException:
            self.abandon()
            raise
        os.close(self.errors)
        return SmolvmGuest(
            Held(
                spec=self.spec,
                places=self.places,
                user=self.user,
                plan=self.plan,
                read_only=self.read_only,
                monitor=self.monitor,
                monitor_fd=self.monitor_fd,
                output=OutputTail(self.output),
                open_files=self.open_files,
                listeners=self.listeners,
            )
        )

    def abandon(self) -> None:
        """Undo the launch."""
        _reap(self.monitor.pid, self.monitor_fd)
        os.close(self.errors)
        os.close(self.output)
        for listener in self.listeners.values():
            listener.close()
        _remove(self.places, self.spec.session)


def _reap(pid: int, pidfd: int) -> None:
    # As a user the keeper must live to end what it started; as root its namespace does that.
    end_child(pidfd, _ASKED_S if os.geteuid() else 0.0)
    os.waitpid(pid, 0)
    os.close(pidfd)


def _remove(places: Places, session: str) -> None:
    for path in (places.directory, places.sockets):
        remove_directory(path, session)


def _launch(
    spec: GuestSpec, prepared: Prepared, places: Places, user: int | None, open_files: int
) -> Launched:
    plan = layout(spec)
    files = workspace.single_files(spec.sources)
    with ExitStack() as ours, ExitStack() as theirs:
        trees: dict[str, Tree] = {}
        if user is None:
            view = workspace.own_view(spec, places, prepared)
        else:
            view, trees = _staged(spec, prepared, places, theirs)
        listeners = workspace.listen(spec, places, user)
        for listener in listeners.values():
            ours.callback(listener.close)
        output, output_end = os.pipe2(os.O_CLOEXEC)
        ours.callback(os.close, output)
        theirs.callback(os.close, output_end)
        errors, errors_end = os.pipe2(os.O_CLOEXEC)
        ours.callback(os.close, errors)
        theirs.callback(os.close, errors_end)
        stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        theirs.callback(os.close, stdin)
        launch = Launch(
            command=command.arguments(spec, view),
            environ=command.environ(view, spec.backstop_s),
            stdin=stdin,
            output=output_end,
            errors=errors_end,
            parent=os.getpid(),
            backstop_s=spec.backstop_s,
            open_files=open_files,
            user=user,
            trees=trees,
        )
        pid = os.fork()
        if pid == 0:
            run_child(launch)
        pidfd = os.pidfd_open(pid)
        identity = identify(pid)
        if identity is None:
            _reap(pid, pidfd)
            raise StartFailed("the launcher vanished.", phase="launch")
        ours.pop_all()
    return Launched(
        spec=spec,
        places=places,
        user=os.getuid() if user is None else user,
        plan=command.guest_plan(spec, plan, files, seccomp.program()),
        read_only=frozenset(item.target for item in plan.items),
        monitor=identity,
        monitor_fd=pidfd,
        open_files=open_files,
        output=output,
        errors=errors,
        listeners=listeners,
    )


def _staged(
    spec: GuestSpec, prepared: Prepared, places: Places, owner: ExitStack
) -> tuple[command.View, dict[str, Tree]]:
    """As root: open every tree without following links and name it on the stage."""

    def tree(path: Path, *, writable: bool = False) -> Tree:
        try:
            fd = linux.open_path(path)
        except OSError as error:
            raise StartFailed(
                f"{path} cannot be opened without following links "
                f"({os.strerror(error.errno or 0)}).",
                remedy="give its canonical path.",
                phase="launch",
            ) from None
        owner.callback(os.close, fd)
        return Tree(fd, writable)

    trees = {
        "e": tree(prepared.directory.resolve()),
        "i": tree(spec.image_root.resolve()),
        "g": tree(spec.guest_code.resolve()),
        "d": tree(places.state.resolve(), writable=True),
        "k": tree(places.sockets.resolve(), writable=True),
        **{f"s{number}": tree(source.path) for number, source in enumerate(spec.sources)},
    }
    view = command.View(
        engine=f"{STAGE}/e",
        image=f"{STAGE}/i",
        guest_code=f"{STAGE}/g",
        state=f"{STAGE}/d",
        sockets=f"{STAGE}/k",
        sources=[f"{STAGE}/s{number}" for number in range(len(spec.sources))],
    )
    return view, trees


async def _executed(errors: int) -> None:
    """Wait until the launcher became smol-vmm (its end of the pipe closes), or said why not."""
    deadline = waiting.deadline_in(_LAUNCH_TIMEOUT_S)
    data = b""
    while True:
        try:
            await waiting.readable(errors, deadline)
        except TimeoutError:
            raise StartFailed("smol-vmm did not start in time.", phase="launch") from None
        chunk = os.read(errors, 65536)
        data += chunk
        if not chunk:
            break
    if not data:
        return
    report = json.loads(data)
    if report["phase"] in ("stage", "drop privileges"):
        raise HostRefused(
            f"as root, the launcher failed: {report['message']}.",
            remedy="run with the capabilities SYS_ADMIN, MKNOD, SETUID, SETGID and SETPCAP, or as "
            "an ordinary user in the group of /dev/kvm.",
            phase=report["phase"],
        )
    raise StartFailed(f"the launcher failed: {report['message']}.", phase=report["phase"])
