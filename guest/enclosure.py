"""Encloses the kernel inside a microVM: namespaces, a read-only root, no privileges, seccomp.

Runs as root of the microVM, before any user code, and follows a plan that the host made and later
compares with what the kernel's own process reads back (``attest.py``). Only Linux system calls that
the standard library lacks are made through ctypes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

CLONE_NEWNS = 0x00020000
_CLONE_NEWNET = 0x40000000
_NAMESPACES = CLONE_NEWNS | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | _CLONE_NEWNET
"""Mount, cgroup, UTS, IPC, PID and network: all but the user namespace."""
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PR_SET_CHILD_SUBREAPER = 36
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_LAST_CAPABILITY = 63
_EINVAL = 22
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914
_IFF_UP = 1
_ROOT = "/run/root"
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_MASKED = ("cmdline", "kcore", "keys", "timer_list")
"""Files of /proc that tell of the virtual machine and its host; an empty file covers each."""

_libc = ctypes.CDLL(None, use_errno=True)
_mount = _libc.mount
_mount.argtypes = [ctypes.c_char_p] * 3 + [ctypes.c_ulong, ctypes.c_char_p]
_prctl = _libc.prctl
_prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4


class _Filter(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _mount_on(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    result = _mount(
        source.encode(), os.fsencode(target), kind.encode() or None, flags, data.encode() or None
    )
    _check(result, f"mount on {target}")


def _bind(source: str, target: str, flags: int) -> None:
    """Bind one mount; the flags count only from the second call on."""
    if os.path.isdir(source):
        os.makedirs(target, 0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), 0o755, exist_ok=True)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT, 0o644))
    _mount_on(source, target, "", _MS_BIND)
    _mount_on("none", target, "", _MS_REMOUNT | _MS_BIND | flags)


def mount_nowhere(kind: str, place: str) -> int:
    """Mount a file system where no path leads; return a descriptor of its root. Raises OSError.

    ``place`` is used for a moment; before there is an enclosure, so that none sees it.
    """
    os.makedirs(place, 0o700, exist_ok=True)
    _mount_on(kind, place, kind, _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    try:
        return os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    finally:
        _check(_libc.umount2(place.encode(), _MNT_DETACH), f"umount {place}")
        os.rmdir(place)


def become_subreaper() -> None:
    """Adopt orphans, so that the enclosure's process 1 is a child of this process."""
    _check(_prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "subreaper")


@contextlib.contextmanager
def network_of(process: int) -> Iterator[None]:
    """Have this thread in a process's network, given by pidfd: what it opens there stays there."""
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        _check(_libc.setns(process, _CLONE_NEWNET), "enter the network")
        try:
            yield
        finally:
            _check(_libc.setns(own, _CLONE_NEWNET), "leave the network")
    finally:
        os.close(own)


def enclose(
    plan: Mapping[str, Any],
    control: socket.socket,
    inherited: Sequence[int],
    output: int,
    report: int,
    group: int,
) -> int:
    """Start the kernel's process in an enclosure; return the pid of the enclosure's process 1.

    Who writes to ``group`` enters a cgroup; -1 if there is none, and whether it worked is for the
    caller to see.
    ``output`` takes what it prints; one line goes to ``report``: ``exit N`` with the kernel's wait
    status, or ``fail TEXT`` if the enclosure could not be made. Every other process in it is dead
    when that process 1 is.
    """
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            # First, so that nothing of it is ever outside and its namespace begins there.
            with contextlib.suppress(OSError):
                os.write(group, b"0")
            _check(_libc.unshare(_NAMESPACES), "unshare")
            first = os.fork()
            if first == 0:
                os.close(writer)
                _process_1(plan, control, inherited, output, report)
            os.write(writer, str(first).encode())
        except OSError as error:
            os.write(report, f"fail {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(middle, 0)
    return int(text or 0)


def _process_1(
    plan: Mapping[str, Any],
    control: socket.socket,
    inherited: Sequence[int],
    output: int,
    report: int,
) -> None:
    """Build the root, start the kernel, reap until it ends. Never returns."""
    try:
        # The agent's own connections are none of the enclosure's business.
        fds = {control.fileno(), output, *inherited}
        _close_others(fds | {0, 1, 2, report})
        os.setsid()
        os.umask(0o022)
        _build_root(plan)
        _raise_loopback()
        socket.sethostname(plan["hostname"])
        kernel = os.fork()
        if kernel == 0:
            _become_kernel(plan, control, inherited, output)
        # What is open here must not keep the kernel's peers from seeing its end.
        for fd in fds:
            os.close(fd)
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == kernel:
                os.write(report, f"exit {status}".encode())
                break
    except BaseException as error:  # nothing may unwind into the agent's stack
        os.write(report, f"fail {error}".encode()[:500])
    finally:
        # The kernel ends all other processes of this PID namespace with its process 1.
        os._exit(0)


def _build_root(plan: Mapping[str, Any]) -> None:
    """Make the root that the kernel sees and leave the old one for good."""
    owner = f"uid={plan['uid']},gid={plan['gid']}"
    read_only = _MS_RDONLY | _MS_NOSUID | _MS_NODEV
    _mount_on("none", "/", "", _MS_REC | _MS_PRIVATE)
    os.makedirs(_ROOT, 0o755, exist_ok=True)
    _mount_on("root", _ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755,size=4m")
    for source, target in plan["binds"]:
        _bind(source, _ROOT + target, read_only)
    for points_to, target in plan["links"]:
        os.makedirs(os.path.dirname(_ROOT + target), 0o755, exist_ok=True)
        os.symlink(points_to, _ROOT + target)
    # Outside the new root, so that the kernel sees only what is bound from there.
    files = "/run/files"
    os.makedirs(files, 0o755, exist_ok=True)
    for name, text in {**plan["etc"], "masked": ""}.items():
        with open(f"{files}/{name}", "w") as file:
            file.write(text)
        os.chmod(f"{files}/{name}", 0o644)
    for name in plan["etc"]:
        _bind(f"{files}/{name}", f"{_ROOT}/etc/{name}", read_only)
    for name in ("run", "sources", "proc", "dev"):
        os.makedirs(f"{_ROOT}/{name}", 0o755, exist_ok=True)
    _mount_on("proc", f"{_ROOT}/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    for name in _MASKED:
        if os.path.exists(f"{_ROOT}/proc/{name}"):
            _bind(f"{files}/masked", f"{_ROOT}/proc/{name}", read_only)
    _build_devices()
    for target, (size, mode) in plan["tmpfs"].items():
        os.makedirs(_ROOT + target, 0o755, exist_ok=True)
        options = f"size={size},mode={mode:04o},{owner}"
        _mount_on("tmpfs", _ROOT + target, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    for path in plan["private"]:
        os.mkdir(_ROOT + path, 0o700)
        os.chown(_ROOT + path, plan["uid"], plan["gid"])
    for target in ("/dev", ""):
        _mount_on("none", _ROOT + target, "", _MS_REMOUNT | _MS_BIND | read_only)
    os.chdir(_ROOT)
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount the old root")
    os.chdir("/")


def _build_devices() -> None:
    """Make a small /dev; its own mount is made read-only at the end."""
    dev = f"{_ROOT}/dev"
    _mount_on("dev", dev, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=0755,size=64k")
    for name in _DEVICES:
        _bind(f"/dev/{name}", f"{dev}/{name}", _MS_NOSUID)
    for name, points_to in (
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        ("ptmx", "pts/ptmx"),
    ):
        os.symlink(points_to, f"{dev}/{name}")
    os.mkdir(f"{dev}/shm")
    os.mkdir(f"{dev}/pts")
    options = "newinstance,ptmxmode=0666,mode=620"
    _mount_on("devpts", f"{dev}/pts", "devpts", _MS_NOSUID | _MS_NOEXEC, options)


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack_from("h", fcntl.ioctl(sock, _SIOCGIFFLAGS, request), 16)
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def _become_kernel(
    plan: Mapping[str, Any], control: socket.socket, inherited: Sequence[int], output: int
) -> None:
    """Give up everything and become ``plan["argv"]``. Never returns."""
    try:
        # The largest process is to go first when memory ends, not the agent, which is exempt.
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("0")
        os.setpriority(os.PRIO_PROCESS, 0, 0)
        os.chdir("/workspace")
        keep = {control.fileno(), *inherited}
        for fd in keep:
            os.set_inheritable(fd, True)
        null = os.open("/dev/null", os.O_RDONLY)
        for number, fd in enumerate((null, output, output)):
            os.dup2(fd, number)
        _close_others(keep | {0, 1, 2})
        _reset_signals()
        _drop_privileges(plan["uid"], plan["gid"])
        _install_filter(bytes.fromhex(plan["seccomp"]))
        argv = [*plan["argv"]]
        os.execve(argv[0], argv, plan["environment"])  # noqa: S606 - that is the purpose
    except BaseException as error:  # nothing may unwind into process 1
        os.write(2, f"the kernel's process could not be started: {error}\n".encode())
    finally:
        os._exit(126)


def _close_others(keep: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            try:
                os.close(int(name))
            except OSError:  # the descriptor of the listing itself
                continue


def _reset_signals() -> None:
    for number in signal.valid_signals():
        try:
            signal.signal(number, signal.SIG_DFL)
        except (OSError, ValueError):  # SIGKILL, SIGSTOP and those of the C library
            continue
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _drop_privileges(uid: int, gid: int) -> None:
    for capability in range(_LAST_CAPABILITY + 1):
        # EINVAL says that the running kernel knows no such capability.
        if _prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0 and ctypes.get_errno() != _EINVAL:
            _check(-1, "drop the bounding set")
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _install_filter(program: bytes) -> None:
    filters = _Filter(len(program) // 8, program)
    address = ctypes.addressof(filters)
    _check(_prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, address, 0, 0), "seccomp")


def namespaces(names: Sequence[str]) -> dict[str, str]:
    """Return this process's own namespaces, for the host to compare with the kernel's."""
    return {name: os.readlink(f"/proc/self/ns/{name}") for name in names}
