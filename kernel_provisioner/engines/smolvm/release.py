"""The pinned release of smolmachines: where it is installed, what each file must be, what we run.

Trusts ``pins.json`` and the receipt that ``prepare`` wrote in the product's own state directory.
The installed package is only read, byte by byte against its pins, when the engine is prepared; its
Python code is never imported. What sessions execute is the verified copy. Not detected: a change
of the host's C library or kernel, and root's tampering with inode times.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kernel_provisioner.engines.registry import CHOOSE_WEAKER
from kernel_provisioner.errors import EngineUnavailable, ImageInvalid
from kernel_provisioner.images.receipt import stat_listing
from kernel_provisioner.paths import StateDirs

_LOCK = Path(__file__).with_name("pins.json")
PACKAGE = "smol"
PROGRAM = "smol-vmm"
TEMPLATES = ("overlay-template.ext4", "storage-template.ext4")
AGENT_ROOT = "agent-root"
AGENT_ARCHIVE = "agent-rootfs.tar.zst"
SCHEMA = "backintel.engine/1"
_EXECUTED: Mapping[str, tuple[str, ...]] = {
    "linux": (
        PROGRAM,
        "libkrun.so",
        "libkrunfw.so.5",
        AGENT_ARCHIVE,
        *(f"{t}.zst" for t in TEMPLATES),
    )
}
"""What a session executes or boots, by system; the rest of the package is never touched."""
_PREPARE = "run `backintel sandbox prepare`."
_MAX_RECEIPT = 65536


@dataclass(frozen=True, slots=True)
class Pins:
    """The lock of one platform: sha256 by file name below the package ``smol``."""

    version: str
    files: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The verified engine as sessions use it: a directory of our own, whole and unchanged."""

    directory: Path
    version: str
    digests: Mapping[str, str]

    @property
    def program(self) -> Path:
        """The executable that starts and is the virtual machine monitor."""
        return self.directory / PROGRAM


@cache
def load_pins(name: str = "", lock: Path = _LOCK) -> Pins:
    """Return the pins of a platform like ``linux-x86_64`` (default: this one).

    Raises EngineUnavailable if the release has nothing for it.
    """
    data = json.loads(lock.read_text())
    wanted = name or f"{sys.platform}-{platform.machine()}"
    system = wanted.partition("-")[0]
    files = data["files"].get(wanted)
    if files is None or system not in _EXECUTED:
        raise EngineUnavailable(
            f"the smolvm engine does not run on {wanted}.",
            remedy=f"use Linux on x86-64 or arm64 with KVM, or {CHOOSE_WEAKER}",
        )
    return Pins(data["version"], {n: files[f"{PACKAGE}/{n}"] for n in _EXECUTED[system]})


def find_package() -> Path:
    """Return the directory of the installed package, without importing it.

    Raises EngineUnavailable if it is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise EngineUnavailable(
            "smolmachines is not installed in this Python environment.",
            remedy=f"pip install smolmachines=={load_pins().version}",
        )
    return Path(found.origin).resolve().parent


def copy_verified(source: Path, target: Path, digest: str) -> None:
    """Copy one file of the package while digesting it. Raises EngineUnavailable if it differs."""
    remedy = f"pip install --force-reinstall smolmachines=={load_pins().version}"
    try:
        fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise EngineUnavailable(
            f"{source} cannot be opened ({error.strerror}).", remedy=remedy
        ) from None
    found = hashlib.sha256()
    with open(fd, "rb") as reader, target.open("xb") as writer:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise EngineUnavailable(f"{source} is not a regular file.", remedy=remedy)
        while chunk := reader.read(1 << 20):
            found.update(chunk)
            writer.write(chunk)
    if found.hexdigest() != digest:
        target.unlink()
        raise EngineUnavailable(
            f"{source} differs from the pinned file of smolmachines {load_pins().version}.",
            remedy=remedy,
        )


def home(dirs: StateDirs) -> Path:
    """Return the engine's directory: the prepared release, its receipt and the sessions' state."""
    return dirs.engines / "smolvm"


def release_dir(dirs: StateDirs, pins: Pins) -> Path:
    """Return where exactly this release is prepared; other pins have another place."""
    listing = json.dumps(sorted(pins.files.items())).encode()
    return home(dirs) / f"{pins.version}-{hashlib.sha256(listing).hexdigest()[:12]}"


def receipt_path(place: Path) -> Path:
    """Return where the receipt of the release prepared in ``place`` lies: beside it."""
    return place.parent / f"{place.name}.receipt.json"


def load_prepared(dirs: StateDirs, *, deep: bool = False) -> Prepared:
    """Return the prepared release after comparing it with pins and receipt (about 15 ms).

    ``deep`` digests every file again: the pinned ones, and what was expanded from them (0.3 s).
    Raises EngineUnavailable.
    """
    pins = load_pins()
    place = release_dir(dirs, pins)
    try:
        with receipt_path(place).open("rb") as file:
            receipt = json.loads(file.read(_MAX_RECEIPT))
        listing = stat_listing(place)
    except FileNotFoundError:
        raise EngineUnavailable(
            f"the smolvm engine {pins.version} is not prepared.", remedy=_PREPARE
        ) from None
    except (OSError, ValueError) as error:
        raise EngineUnavailable(
            f"the prepared smolvm engine cannot be read ({error}).", remedy=_PREPARE
        ) from None
    if receipt.get("schema") != SCHEMA or receipt.get("files") != dict(pins.files):
        raise EngineUnavailable(
            "the receipt of the smolvm engine is not for the pinned release.", remedy=_PREPARE
        )
    # Older receipts have none; such a release is prepared anew.
    if not isinstance(receipt.get("expanded"), str):
        raise EngineUnavailable(
            "the receipt of the smolvm engine does not cover what was expanded.", remedy=_PREPARE
        )
    if receipt.get("stat") != listing.digest:
        raise EngineUnavailable(
            f"a file below {place} changed since it was prepared.", remedy=_PREPARE
        )
    if deep:
        _digest_all(place, pins, receipt["expanded"])
    return Prepared(place, pins.version, pins.files)


def _digest_all(place: Path, pins: Pins, expanded: str) -> None:
    # Only here: a start does not wait for it.
    from kernel_provisioner.engines.smolvm.contents import expanded_digest

    for name, digest in pins.files.items():
        with (place / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise EngineUnavailable(f"{place / name} differs from its pin.", remedy=_PREPARE)
    try:
        found = expanded_digest(place, pins.files)
    except (ImageInvalid, OSError) as error:
        raise EngineUnavailable(
            f"the prepared smolvm engine cannot be digested ({error}).", remedy=_PREPARE
        ) from None
    if found != expanded:
        raise EngineUnavailable(
            f"the agent root or a disk template below {place} differs from what was prepared.",
            remedy=_PREPARE,
        )
