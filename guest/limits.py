"""Resource limits that only the guest itself can set, before any user code runs.

RLIMIT_NPROC belongs here and not on the host: outside the innermost user namespace it counts every
process of the user, in it only this session's. None of these bounds memory; the cgroup does.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping

LIMITS: Mapping[str, int] = {
    "nproc": resource.RLIMIT_NPROC,
    "nofile": resource.RLIMIT_NOFILE,
    "core": resource.RLIMIT_CORE,
    "fsize": resource.RLIMIT_FSIZE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "msgqueue": resource.RLIMIT_MSGQUEUE,
    "sigpending": resource.RLIMIT_SIGPENDING,
    "nice": resource.RLIMIT_NICE,
    "rtprio": resource.RLIMIT_RTPRIO,
}


def apply(limits: Mapping[str, int]) -> None:
    """Set soft and hard limits by name (sizes in bytes). Raises KeyError, ValueError, OSError.

    A lower hard limit inherited from the host is kept: raising it needs a privilege that the
    guest does not have. The attestation shows it.
    """
    for name, value in limits.items():
        number = LIMITS[name]
        _, hard = resource.getrlimit(number)
        wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (wanted, wanted))


def read() -> dict[str, list[int]]:
    """Return soft and hard limits by name; -1 is unlimited."""
    return {name: list(resource.getrlimit(number)) for name, number in LIMITS.items()}
