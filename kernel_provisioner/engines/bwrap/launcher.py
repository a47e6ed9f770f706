"""The child between fork and bubblewrap: waits at the gate, stages files, drops root, execs.

Runs in a fork of the supervisor, so it only makes system calls prepared beforehand and always ends
in exec or ``_exit``. It is trusted; what it starts is confined before it can act.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from kernel_provisioner.engines.base import GUEST_GID, GUEST_UID
from kernel_provisioner.engines.bwrap import linux
from kernel_provisioner.engines.bwrap.binary import PROGRAM

STAGE_MOUNT = "/run"
STAGE = f"{STAGE_MOUNT}/backintel"
"""Where root's private mount namespace holds what the guest's user must reach. /run exists
everywhere, only root can write there, and sources below it are refused (spec E4)."""
_STAGE_SIZE = 8 << 20


@dataclass(frozen=True, slots=True)
class Launch:
    """All that the child needs. Descriptors are the supervisor's own numbers."""

    command: Sequence[str]
    keep: Sequence[int]
    stdin: int
    output: int
    gate: int
    errors: int
    parent: int
    backstop_s: float
    program_fd: int | None
    """A verified executable to exec by descriptor; None as root, where the stage holds it."""
    stage_files: Mapping[str, bytes]
    """As root: verified bytes by path below the stage."""
    stage_trees: Mapping[str, tuple[int, bool]]
    """As root: (O_PATH descriptor, is a directory) by name below the stage."""


def staged(name: str) -> str:
    """Return the path of a staged tree as bubblewrap sees it."""
    return f"{STAGE}/{name}"


def run_child(launch: Launch) -> NoReturn:
    """Become bubblewrap. On an error write ``{"phase", "message"}`` to ``launch.errors``."""
    phase = "launch"
    try:
        # Before anything can block: while this process waits at the gate nothing else ends it, for
        # it holds the gate's other end itself.
        linux.set_parent_death_signal()
        if os.getppid() != launch.parent:
            os._exit(126)
        _reset_signals()
        os.setsid()
        # Host limits apply from the first instruction of bubblewrap on: nothing happens before
        # the supervisor has put this process into its cgroups and read them back.
        if os.read(launch.gate, 1) != b"g":
            os._exit(126)
        if launch.program_fd is None:
            phase = "stage"
            _stage(launch)
            phase = "drop privileges"
            _drop_root()
        phase = "launch"
        linux.set_no_new_privs()
        # Again, because a change of credentials clears it; the parent may have gone meanwhile.
        linux.set_parent_death_signal()
        if os.getppid() != launch.parent:
            os._exit(126)
        _arrange_descriptors(launch)
        # The backstop: this timer outlives exec, and SIGALRM ends bubblewrap's monitor, and with
        # it the sandbox, even while the supervisor is stopped. The guest cannot reach either.
        signal.setitimer(signal.ITIMER_REAL, launch.backstop_s)
        phase = "exec"
        program = staged(PROGRAM) if launch.program_fd is None else launch.program_fd
        os.execve(program, list(launch.command), {})  # noqa: S606 - that is the purpose
    except BaseException as error:  # nothing may unwind into the supervisor's stack
        report = json.dumps({"phase": phase, "message": str(error)[:500]}).encode()
        with contextlib.suppress(OSError):
            os.write(launch.errors, report)
    finally:
        os._exit(126)


def _reset_signals() -> None:
    """Undo what the supervisor ignores or blocks: both would pass through exec."""
    for number in signal.valid_signals():
        # SIGKILL, SIGSTOP and the C library's own signals cannot be set.
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _stage(launch: Launch) -> None:
    """In a mount namespace of our own, put program and trees where an unprivileged user gets.

    The trees come by descriptors opened without following links, so nobody can swap them.
    """
    trees = {name: linux.open_tree(fd) for name, (fd, _) in launch.stage_trees.items()}
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    flags = linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("tmpfs", STAGE_MOUNT, "tmpfs", flags, f"mode=0711,size={_STAGE_SIZE}")
    os.umask(0o022)
    os.mkdir(STAGE, 0o711)
    for name, data in launch.stage_files.items():
        path = staged(name)
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o755)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)
    for name, tree in trees.items():
        path = staged(name)
        if launch.stage_trees[name][1]:
            os.mkdir(path, 0o755)
        else:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
        linux.move_mount(tree, path)


def _drop_root() -> None:
    """Become the guest's user for good: bubblewrap as root would map it to the host's root."""
    linux.drop_capabilities()
    os.setgroups([])
    os.setresgid(GUEST_GID, GUEST_GID, GUEST_GID)
    os.setresuid(GUEST_UID, GUEST_UID, GUEST_UID)


def _arrange_descriptors(launch: Launch) -> None:
    os.dup2(launch.stdin, 0)
    os.dup2(launch.output, 1)
    os.dup2(launch.output, 2)
    linux.close_on_exec_from(3)
    for fd in launch.keep:
        os.set_inheritable(fd, True)
