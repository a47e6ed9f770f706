"""Whether this host can run a microVM, and what exactly is missing if not (spec B).

Reads only. Each refusal has its own words and remedy, because the remedies differ.
"""

from __future__ import annotations

import grp
import os
import platform
import resource
import stat
import sys
from pathlib import Path

from kernel_provisioner.engines.registry import CHOOSE_WEAKER
from kernel_provisioner.errors import EngineUnavailable, HostRefused

KVM = Path("/dev/kvm")
OPEN_FILES_NEEDED = 16384
"""The monitor's file server holds a descriptor for each file of the image that the guest touched:
6,800 were seen with the whole data stack, and at a limit of 4,096 the guest dies by SIGBUS."""
OPEN_FILES_WANTED = 1 << 20
_GLIBC_NEEDED = (2, 34)
_CAP_SYS_RESOURCE = 24


def check_host(kvm: Path = KVM) -> None:
    """Raise EngineUnavailable or HostRefused if no microVM can be started here."""
    check_libc(*platform.libc_ver())
    check_kvm(kvm)
    open_files()


def check_libc(name: str, version: str) -> None:
    """Raise EngineUnavailable for a C library that the program does not run on."""
    if sys.platform != "linux":
        return
    parts = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if name != "glibc" or parts < _GLIBC_NEEDED:
        needed = ".".join(str(part) for part in _GLIBC_NEEDED)
        raise EngineUnavailable(
            f"the smolvm engine needs glibc {needed} or newer; this host has "
            f"{name or 'another C library'} {version}".rstrip()
            + ".",
            remedy="use a newer distribution (Debian 12, Ubuntu 22.04, RHEL 9), or "
            f"{CHOOSE_WEAKER}",
        )


def check_kvm(kvm: Path = KVM) -> None:
    """Raise EngineUnavailable if the KVM device is missing or this user may not use it."""
    try:
        info = kvm.stat()
    except FileNotFoundError:
        raise EngineUnavailable(
            f"{kvm} does not exist: this host offers no hardware virtualization.",
            remedy="enable virtualization in the firmware, or nested virtualization in the "
            f"hypervisor, and load kvm_intel or kvm_amd; or {CHOOSE_WEAKER}",
        ) from None
    except OSError as error:
        raise EngineUnavailable(
            f"{kvm} cannot be examined ({error.strerror}).",
            remedy=f"see `ls -l /dev/kvm`, or {CHOOSE_WEAKER}",
        ) from None
    if not stat.S_ISCHR(info.st_mode):
        raise EngineUnavailable(
            f"{kvm} is not a character device.",
            remedy=f"remove it and load the kvm module, or {CHOOSE_WEAKER}",
        )
    if not os.access(kvm, os.R_OK | os.W_OK):
        raise refused_device(kvm, info)


def refused_device(kvm: Path, info: os.stat_result) -> EngineUnavailable:
    """Return the error of a device that this user may not use; the remedy fits its group."""
    return EngineUnavailable(
        f"this user may not use {kvm}.", remedy=f"{_permission(info)}; or {CHOOSE_WEAKER}"
    )


def _permission(info: os.stat_result) -> str:
    try:
        group = grp.getgrgid(info.st_gid)
    except KeyError:
        return "let the administrator give this user access to the device"
    user = os.environ.get("USER", "")
    if info.st_mode & 0o060 == 0o060 and user and user in group.gr_mem:
        return (
            f"this user is in the group {group.gr_name}, but this login is older: log out and in "
            "again (and restart the Jupyter server)"
        )
    if info.st_mode & 0o060 == 0o060 and info.st_gid != 0:
        return f"let the administrator run `usermod -aG {group.gr_name} USER`, then log in again"
    return "let the administrator give a group of this user read and write access to the device"


def open_files() -> int:
    """Return how many open files a monitor can have. Raises HostRefused if they are too few.

    With CAP_SYS_RESOURCE the hard limit can be raised; else it is what the login gave.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or _may_raise_limits():
        ceiling = int(Path("/proc/sys/fs/nr_open").read_text())
        return min(OPEN_FILES_WANTED, ceiling)
    if hard < OPEN_FILES_NEEDED:
        raise HostRefused(
            f"a microVM needs {OPEN_FILES_NEEDED} open files; this login allows {hard}.",
            remedy="raise the hard limit `nofile` (limits.conf, or LimitNOFILE= of the service), "
            f"or {CHOOSE_WEAKER}",
        )
    return min(hard, OPEN_FILES_WANTED)


def _may_raise_limits() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_RESOURCE & 1)
    return False
