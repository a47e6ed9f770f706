"""Generates the guest's seccomp program (both engines): a deny list in classic BPF, no dependency.

Default allow; a foreign architecture or the x32 ABI kills the process; a syscall newer than the
newest reviewed one is answered ENOSYS, so that a new kernel interface is never silently allowed.
The output is deterministic and its digest is pinned by a test. Numbers are those of the kernel's
``arch/x86/entry/syscalls/syscall_64.tbl`` and ``scripts/syscall.tbl``.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Mapping

from kernel_provisioner.errors import HostRefused

NEWEST_REVIEWED = 466
"""removexattrat (Linux 6.13). Raise it only after reviewing what was added since."""

_AUDIT_ARCH: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000

_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_GREATER_EQUAL = 0x35
_JUMP_SET = 0x45
_RETURN = 0x06

_KILL_PROCESS = 0x80000000
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000

_OFFSET_NR = 0
_OFFSET_ARCH = 4
_OFFSET_ARGS = 16

# Numbers as (x86_64, aarch64); None where the architecture has no such syscall.
_DENIED: Mapping[str, tuple[int | None, int | None]] = {
    # New kernel attack surface that data analysis never needs.
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    # Other processes' memory and descriptors.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # Namespaces and mounts.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    # The kernel's key rings are not namespaced.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # NUMA placement reaches across processes.
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # The machine itself.
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "nfsservctl": (180, 42),
    "lookup_dcookie": (212, 18),
    # Old x86 interfaces.
    "uselib": (134, None),
    "ustat": (136, None),
    "sysfs": (139, None),
    "modify_ldt": (154, None),
    "_sysctl": (156, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    "create_module": (174, None),
}

# Answered "not implemented", so that the C library falls back to what can be filtered by argument.
_ABSENT: Mapping[str, tuple[int, int]] = {
    "clone3": (435, 435),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "memfd_secret": (447, 447),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "lsm_set_self_attr": (460, 460),
}

_CLONE = (56, 220)
_IOCTL = (16, 29)
_SOCKET = (41, 198)
_SOCKETPAIR = (53, 199)
_PERSONALITY = (135, 92)

# Every CLONE_NEW* but CLONE_NEWTIME, which clone() cannot express (its bit is the exit signal's).
_CLONE_NAMESPACES = 0x7E020000
_TIOCSTI = 0x5412
_TIOCLINUX = 0x541C
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_PERSONALITY_QUERY = 0xFFFFFFFF

Instruction = tuple[int, int, int, int]
"""code, jump if true, jump if false (both count instructions to skip), operand."""


def denied_syscalls(machine: str) -> Mapping[int, int]:
    """Return errno by syscall number for the unconditional denials of an architecture."""
    column = list(_AUDIT_ARCH).index(machine)
    denied: dict[int, int] = {}
    for numbers in _DENIED.values():
        number = numbers[column]
        if number is not None:
            denied[number] = errno.EPERM
    for present in _ABSENT.values():
        denied[present[column]] = errno.ENOSYS
    return denied


def instructions(machine: str) -> Iterator[Instruction]:
    """Yield the program of an architecture that ``_AUDIT_ARCH`` names."""
    column = list(_AUDIT_ARCH).index(machine)

    def load(offset: int) -> Instruction:
        return (_LOAD, 0, 0, offset)

    def argument(index: int) -> Instruction:
        # The low 32 bits (both architectures are little endian): the kernel itself ignores the
        # rest for these arguments; comparing all 64 is what let CVE-2019-10063 through.
        return load(_OFFSET_ARGS + 8 * index)

    def answer(action: int) -> Instruction:
        return (_RETURN, 0, 0, action)

    def only_values(
        number: int, index: int, allowed: tuple[int, ...], error: int
    ) -> Iterator[Instruction]:
        """For one syscall: allow these values of an argument, fail all others."""
        yield (_JUMP_EQUAL, 0, len(allowed) + 3, number)
        yield argument(index)
        for position, value in enumerate(allowed):
            yield (_JUMP_EQUAL, len(allowed) - position, 0, value)
        yield answer(_ERRNO | error)
        yield answer(_ALLOW)

    yield load(_OFFSET_ARCH)
    yield (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine])
    yield answer(_KILL_PROCESS)
    yield load(_OFFSET_NR)
    if machine == "x86_64":
        yield (_JUMP_GREATER_EQUAL, 0, 1, _X32_BIT)
        yield answer(_KILL_PROCESS)
    yield (_JUMP_GREATER_EQUAL, 0, 1, NEWEST_REVIEWED + 1)
    yield answer(_ERRNO | errno.ENOSYS)
    for number, error in sorted(denied_syscalls(machine).items()):
        yield (_JUMP_EQUAL, 0, 1, number)
        yield answer(_ERRNO | error)

    yield (_JUMP_EQUAL, 0, 4, _CLONE[column])
    yield argument(0)
    yield (_JUMP_SET, 0, 1, _CLONE_NAMESPACES)
    yield answer(_ERRNO | errno.EPERM)
    yield answer(_ALLOW)

    yield (_JUMP_EQUAL, 0, 5, _IOCTL[column])
    yield argument(1)
    yield (_JUMP_EQUAL, 1, 0, _TIOCSTI)
    yield (_JUMP_EQUAL, 0, 1, _TIOCLINUX)
    yield answer(_ERRNO | errno.EPERM)
    yield answer(_ALLOW)

    # libzmq lists interfaces by netlink and aborts on any error but EOPNOTSUPP and EINVAL.
    yield (_JUMP_EQUAL, 0, 4, _SOCKET[column])
    yield argument(0)
    yield (_JUMP_EQUAL, 0, 1, _AF_NETLINK)
    yield answer(_ERRNO | errno.EOPNOTSUPP)
    yield load(_OFFSET_NR)
    families = (_AF_UNIX, _AF_INET, _AF_INET6)
    yield from only_values(_SOCKET[column], 0, families, errno.EAFNOSUPPORT)
    yield from only_values(_SOCKETPAIR[column], 0, families, errno.EAFNOSUPPORT)
    yield from only_values(_PERSONALITY[column], 0, (0, _PERSONALITY_QUERY), errno.EPERM)
    yield answer(_ALLOW)


def program(machine: str = "") -> bytes:
    """Return the program as an array of struct sock_filter, for an architecture or this one.

    Raises HostRefused for an architecture without a reviewed program.
    """
    name = machine or os.uname().machine
    if name not in _AUDIT_ARCH:
        raise HostRefused(
            f"there is no reviewed seccomp program for the architecture {name}.",
            remedy=f"use a host of one of these architectures: {', '.join(_AUDIT_ARCH)}.",
        )
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions(name))
