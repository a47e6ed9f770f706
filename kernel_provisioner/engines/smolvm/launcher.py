"""The child between fork and smol-vmm: stages files, drops root, execs, and keeps what it started.

As root the monitor gets a user of its own for this session and sees, in mount, PID, network and IPC
namespaces of its own, only what it needs: a private /tmp with the verified trees, its state and its
sockets, and a /dev/kvm that only it may open. Runs in a fork of the supervisor, makes only system
calls prepared beforehand; the keeper stays between the supervisor and smol-vmm until the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from kernel_provisioner.engines.bwrap import linux
from kernel_provisioner.engines.smolvm import prctl
from kernel_provisioner.engines.smolvm.command import SOURCE_FILE

STAGE = "/tmp"  # noqa: S108 - a private mount; Landlock lets the monitor write below /tmp alone
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWNET = 0x40000000
_CLONE_NEWPID = 0x20000000
_MS_RDONLY, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 8, 32, 4096
_STAGE_SIZE = 1 << 20
_DEVICE = "/dev/kvm"
_MOST_DESCRIPTORS = 1 << 16


@dataclass(frozen=True, slots=True)
class Tree:
    """Something of the host for the stage: an O_PATH descriptor, and whether it may be written."""

    fd: int
    writable: bool = False


@dataclass(frozen=True, slots=True)
class Launch:
    """All that the child needs. Descriptors are the supervisor's own numbers."""

    command: Sequence[str]
    environ: Mapping[str, str]
    stdin: int
    output: int
    errors: int
    parent: int
    backstop_s: float
    open_files: int
    user: int | None
    """As root: the user that the monitor becomes. None: stay who we are, without a stage."""
    trees: Mapping[str, Tree]
    """As root: what the stage holds, by name."""


def run_child(launch: Launch) -> NoReturn:
    """Become the keeper of smol-vmm. On an error write ``{"phase", "message"}`` to the pipe."""
    phase = "launch"
    try:
        _reset_signals()
        os.setsid()
        os.umask(0o022)
        resource.setrlimit(resource.RLIMIT_NOFILE, (launch.open_files, launch.open_files))
        # A core would hold the guest's memory.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        phase = "stage"
        if launch.user is not None:
            linux.unshare(_CLONE_NEWPID)
        alive, ours = os.pipe2(os.O_CLOEXEC)
        child = os.fork()
        if child == 0:
            os.close(ours)
            _become_program(launch, alive)
        os.close(alive)
        phase = "drop privileges"
        if launch.user is not None:
            _drop_root(launch.user)
        _keep(launch, child, ours)
    except BaseException as error:  # nothing may unwind into the supervisor's stack
        _report(launch, phase, error)
    finally:
        os._exit(126)


def _report(launch: Launch, phase: str, error: BaseException) -> None:
    report = json.dumps({"phase": phase, "message": str(error)[:500]}).encode()
    with contextlib.suppress(OSError):
        os.write(launch.errors, report)


def _keep(launch: Launch, child: int, ours: int) -> NoReturn:
    """Stay the program's parent, and end all of it with the supervisor or at the backstop.

    smol-vmm itself is not enough: killed early in a boot it leaves its monitor behind. As root the
    program is process 1 of a PID namespace, so its end, which follows from ours, ends all. As a
    user the orphans come to this process, which must therefore live to be told.
    """
    linux.set_no_new_privs()
    waited = {signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD}
    if launch.user is None:
        prctl.become_subreaper()
        signal.pthread_sigmask(signal.SIG_BLOCK, waited)
        prctl.set_parent_death_signal(signal.SIGTERM)
    else:
        waited = {signal.SIGCHLD}
        signal.pthread_sigmask(signal.SIG_BLOCK, waited)
        linux.set_parent_death_signal()
    if os.getppid() != launch.parent:
        os._exit(126)
    # This timer ends the machine even while the supervisor is stopped; the guest cannot reach it.
    signal.setitimer(signal.ITIMER_REAL, launch.backstop_s)
    os.write(ours, b"g")
    # No descriptor of the supervisor's may stay open here: ends of file are how ends are seen.
    os.closerange(0, _MOST_DESCRIPTORS)
    while True:
        arrived = signal.sigwait(waited)
        if arrived != signal.SIGCHLD:
            _end_descendants()
            os._exit(128 + arrived)
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                _end_descendants()
                os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
            if pid == 0:
                break


def _end_descendants() -> None:
    """Kill children until there are none: killed ones hand their own children over to us."""
    me = f"/proc/self/task/{os.getpid()}/children"
    while True:
        with open(me) as listing:
            for pid in listing.read().split():
                # Our own child, not reaped yet: the number is still its.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _become_program(launch: Launch, alive: int) -> NoReturn:
    phase = "stage"
    try:
        if launch.user is not None:
            _stage(launch, launch.user)
            phase = "drop privileges"
            _drop_root(launch.user)
        phase = "launch"
        linux.set_no_new_privs()
        # Last, because a change of credentials clears it; then the keeper may be gone already.
        linux.set_parent_death_signal()
        if os.read(alive, 1) != b"g":
            os._exit(126)
        os.dup2(launch.stdin, 0)
        os.dup2(launch.output, 1)
        os.dup2(launch.output, 2)
        linux.close_on_exec_from(3)
        phase = "exec"
        os.execve(launch.command[0], list(launch.command), dict(launch.environ))  # noqa: S606
    except BaseException as error:  # nothing may unwind into the keeper's stack
        _report(launch, phase, error)
    finally:
        os._exit(126)


def _drop_root(user: int) -> None:
    linux.drop_capabilities()
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _reset_signals() -> None:
    """Undo what the supervisor ignores or blocks: both would pass through exec."""
    for number in signal.valid_signals():
        # SIGKILL, SIGSTOP and the C library's own signals cannot be set.
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _stage(launch: Launch, user: int) -> None:
    """Make the monitor's own view. The trees come by descriptors, so nobody can swap them."""
    trees = {name: linux.open_tree(tree.fd) for name, tree in launch.trees.items()}
    device = os.stat(_DEVICE).st_rdev
    linux.unshare(linux.CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC)
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    plain = linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("tmpfs", STAGE, "tmpfs", plain, f"mode=0711,size={_STAGE_SIZE}")
    for name, tree in launch.trees.items():
        target = f"{STAGE}/{name}"
        if stat.S_ISDIR(os.fstat(tree.fd).st_mode):
            os.mkdir(target, 0o755)
        else:
            # The monitor shares directories only: one that holds nothing but this file.
            os.mkdir(target, 0o755)
            target = f"{target}/{SOURCE_FILE}"
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        linux.move_mount(trees[name], target)
        if not tree.writable:
            flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | plain
            linux.mount("none", target, "", flags)
    os.mkdir(f"{STAGE}/dev", 0o755)
    linux.mount("dev", f"{STAGE}/dev", "tmpfs", linux.MS_NOSUID, "mode=0755,size=4k")
    own = f"{STAGE}/dev/kvm"
    os.mknod(own, stat.S_IFCHR | 0o600, device)
    os.chown(own, user, user)
    linux.mount(own, _DEVICE, "", _MS_BIND)
    # The PID namespace's own: the program looks itself and its monitor up by number.
    linux.mount("proc", "/proc", "proc", plain | _MS_NOEXEC)
