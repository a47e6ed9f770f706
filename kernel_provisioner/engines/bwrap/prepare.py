"""Opens all that a launch passes on: descriptors of trees and sockets, memfds, pipes.

Everything is opened by the supervisor before the fork, without following links, so that neither
the launcher nor bubblewrap resolves a name that somebody could change meanwhile.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kernel_provisioner.engines.base import GuestSpec
from kernel_provisioner.engines.bwrap import command, linux, seccomp
from kernel_provisioner.engines.bwrap.binary import Binary
from kernel_provisioner.engines.bwrap.launcher import Launch, staged
from kernel_provisioner.engines.bwrap.layout import Layout
from kernel_provisioner.engines.bwrap.paths import channel_paths, remove_sockets
from kernel_provisioner.errors import StartFailed

_BACKLOG = 64


@dataclass(slots=True)
class Ends:
    """The supervisor's ends of what it shares with the child."""

    gate: int
    errors: int
    info: int
    output: int
    control: socket.socket
    targets: int
    """Where the message id of the request goes that the next interrupt is for."""
    unclaimed: ExitStack
    """Undoes control, targets and the bound sockets if the launch fails before they are owned."""

    def claimed(self) -> None:
        """Say that they have an owner now."""
        self.unclaimed.pop_all()
        self.unclaimed.pop_all()


def prepare(
    spec: GuestSpec,
    binary: Binary,
    plan: Layout,
    as_root: bool,
    ours: ExitStack,
    theirs: ExitStack,
) -> tuple[Launch, Ends]:
    """Open everything the child needs; ``theirs`` is to be closed right after the fork.

    ``ours`` closes what matters only during the launch; control and sockets pass on to the guest.
    Raises StartFailed naming what cannot be opened.
    """

    def keep(fd: int) -> int:
        theirs.callback(os.close, fd)
        return fd

    unclaimed = ours.enter_context(ExitStack())
    gate_read, gate = _pipe(theirs, ours)
    errors_write, errors = reversed(_pipe(ours, theirs))
    info_write, info = reversed(_pipe(ours, theirs))
    output_write, output = reversed(_pipe(ours, theirs))
    control, guest_control = socket.socketpair()
    unclaimed.callback(control.close)
    control.setblocking(False)
    control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    theirs.callback(guest_control.close)
    targets_read, targets = _pipe(theirs, unclaimed)
    os.set_blocking(targets, False)
    unclaimed.callback(remove_sockets, spec.socket_dir)
    listeners = {name: theirs.enter_context(sock) for name, sock in _listen(spec.socket_dir)}
    fds = command.Descriptors(
        seccomp=keep(_memfd("seccomp", seccomp.program())),
        info=info_write,
        control=guest_control.fileno(),
        targets=targets_read,
        listeners={name: sock.fileno() for name, sock in listeners.items()},
        etc={
            name: keep(_memfd(name, text.encode()))
            for name, text in command.etc(spec.endpoints).items()
        },
    )
    trees = {name: keep(_open_root(path)) for name, path in plan.trees.items()}
    binds, bound_fds = _binds(plan, trees, as_root, keep)
    options = command.arguments(spec.session, spec.profile, binds, plan.links, fds)
    encoded = b"".join(option.encode() + b"\0" for option in options)
    args = keep(_memfd("arguments", encoded))
    launch = Launch(
        command=["bwrap", "--args", str(args), "--", *command.guest_command(spec.profile, fds)],
        keep=[
            args,
            fds.seccomp,
            fds.info,
            fds.control,
            fds.targets,
            *fds.listeners.values(),
            *fds.etc.values(),
            *bound_fds,
        ],
        stdin=keep(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)),
        output=output_write,
        gate=gate_read,
        errors=errors_write,
        parent=os.getpid(),
        backstop_s=spec.backstop_s,
        program_fd=None if as_root else keep(_open_program(binary)),
        stage_files=binary.contents if as_root else {},
        stage_trees={name: (fd, stat.S_ISDIR(os.fstat(fd).st_mode)) for name, fd in trees.items()}
        if as_root
        else {},
    )
    return launch, Ends(gate, errors, info, output, control, targets, unclaimed)


def _pipe(reader_owner: ExitStack, writer_owner: ExitStack) -> tuple[int, int]:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    reader_owner.callback(os.close, reader)
    writer_owner.callback(os.close, writer)
    return reader, writer


def _memfd(name: str, data: bytes) -> int:
    """Return a descriptor of anonymous memory holding ``data``, at its start."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _listen(socket_dir: Path) -> Iterator[tuple[str, socket.socket]]:
    """Bind the guest's five sockets on the host; only their descriptors go inside.

    A directory shared with the guest would let it replace a socket by a link to one of the host's.
    """
    for name, path in channel_paths(socket_dir).items():
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.unlink(missing_ok=True)
            sock.bind(str(path))
            path.chmod(0o600)
            sock.listen(_BACKLOG)
        except OSError as error:
            sock.close()
            raise StartFailed(
                f"the guest's socket {path} cannot be bound ({error.strerror}).", phase="launch"
            ) from None
        yield name, sock


def _open_root(path: Path) -> int:
    try:
        return linux.open_path(path)
    except OSError as error:
        raise StartFailed(
            f"{path} cannot be opened without following links ({os.strerror(error.errno or 0)}).",
            remedy="give its canonical path.",
            phase="launch",
        ) from None


def _binds(
    plan: Layout, trees: dict[str, int], as_root: bool, keep: Callable[[int], int]
) -> tuple[list[command.Bind], list[int]]:
    """Return the binds and, as a user, the descriptors they name.

    As root the launcher stages the trees in its own mount namespace, where names are safe.
    """
    binds = []
    fds = []
    for item in plan.items:
        if as_root:
            path = "/".join(part for part in (staged(item.base), item.inside) if part)
            binds.append(command.Bind(item.target, path=path))
            continue
        root = trees[item.base]
        fd = keep(_open_inside(root, item.inside) if item.inside else os.dup(root))
        fds.append(fd)
        binds.append(command.Bind(item.target, fd=fd))
    return binds, fds


def _open_inside(root: int, inside: str) -> int:
    try:
        return linux.openat2(
            root, inside, os.O_PATH, linux.RESOLVE_BENEATH | linux.RESOLVE_NO_SYMLINKS
        )
    except OSError as error:
        raise StartFailed(
            f"the image's /{inside} cannot be opened ({os.strerror(error.errno or 0)}).",
            remedy="backintel sandbox prepare",
            phase="launch",
        ) from None


def _open_program(binary: Binary) -> int:
    """Return a descriptor of the verified program as installed.

    It is executed from where it lies, not from a copy: its library is found relative to it, and
    an administrator's AppArmor profile is attached by its path.
    """
    return os.open(binary.program, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
