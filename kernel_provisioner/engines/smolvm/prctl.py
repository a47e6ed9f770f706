"""Two settings of a process that the standard library lacks; errors as OSError.

The C library's symbol is resolved at import: a forked child calls nothing that takes a lock.
"""

from __future__ import annotations

import ctypes
import os

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_prctl = ctypes.CDLL(None, use_errno=True).prctl
_prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4


def _set(option: int, value: int) -> None:
    if _prctl(option, value, 0, 0, 0) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become_subreaper() -> None:
    """Adopt the orphans among this process's descendants."""
    _set(_PR_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(signum: int) -> None:
    """Ask for a signal when the thread that forked this process ends."""
    _set(_PR_SET_PDEATHSIG, signum)
