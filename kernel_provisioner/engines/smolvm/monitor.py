"""The virtual machine monitor as a process of the host: found, judged and measured from outside.

It is a child of ``smol-vmm machine run``, which is a child of our keeper. Nothing here needs the
guest, and nothing the guest does can change what is read.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_provisioner.engines.base import ProcessIdentity
from kernel_provisioner.processes import children, identify, is_running

_ROLE = b"_boot-vm"
_MACHINES = ("state", ".cache", "smolvm", "vms")
_MOST_MACHINES = 16
_MOST_READ = 65536
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK
_SECCOMP_FILTER = "2"


def find(keeper: ProcessIdentity) -> ProcessIdentity | None:
    """Return the monitor among the keeper's descendants, recognized by its role."""
    for program in children(keeper.pid):
        for pid in children(program):
            identity = identify(pid)
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if identity is not None and _ROLE in words and is_running(keeper):
                return identity
    return None


def deviations(monitor: ProcessIdentity, user: int) -> list[str]:
    """Return what of the monitor's confinement is not as asked, one sentence each.

    Every thread is looked at: a filter belongs to a thread, not to a process.
    """
    found = []
    tasks = sorted(Path(f"/proc/{monitor.pid}/task").iterdir())
    for task in tasks:
        try:
            lines = (task / "status").read_text().splitlines()
        except OSError:  # the thread ended
            continue
        status = {
            line.split(":")[0]: line.split(":", 1)[1].strip() for line in lines if ":" in line
        }
        name = status.get("Name", "?")
        if status["Seccomp"] != _SECCOMP_FILTER:
            found.append(f"the monitor's thread {name!r} runs without seccomp")
        if status["Uid"].split() != [str(user)] * 4:
            found.append(f"the monitor's thread {name!r} has the user ids {status['Uid']}")
        if int(status["CapEff"], 16):
            found.append(f"the monitor's thread {name!r} has capabilities")
    return found or ([] if tasks else ["the monitor has no threads"])


@dataclass(frozen=True, slots=True)
class Remains:
    """What a monitor left in its state: its own record of its end, and the guest's last words."""

    record: Mapping[str, Any] | None = None
    console: str = ""


def remains(directory: Path) -> Remains:
    """Return what the monitor left below a session's ``directory``, as far as it can be read.

    All of it belongs to the monitor's user, so it may be anything: no link is followed, nothing
    but a regular file is read, and of that a bounded part.
    """
    record, console = None, ""
    with contextlib.ExitStack() as opened:
        try:
            place = None
            for name in (str(directory), *_MACHINES):
                place = os.open(name, _DIRECTORY, dir_fd=place)
                opened.callback(os.close, place)
            entries = opened.enter_context(os.scandir(place))
            names = [entry.name for entry in itertools.islice(entries, _MOST_MACHINES)]
        except OSError:
            return Remains()
        for name in names:
            with contextlib.suppress(OSError):
                machine = os.open(name, _DIRECTORY, dir_fd=place)
                opened.callback(os.close, machine)
                record = record or _record(_read(machine, "vmm-exit.json"))
                console = console or _read(machine, "agent-console.log").decode(errors="replace")
    return Remains(record, console)


def _read(directory: int, name: str) -> bytes:
    """Return the last part of a regular file; nothing if there is none."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=directory)
    except OSError:
        return b""
    try:
        told = os.fstat(fd)
        if not stat.S_ISREG(told.st_mode):
            return b""
        return os.pread(fd, _MOST_READ, max(0, told.st_size - _MOST_READ))
    except OSError:
        return b""
    finally:
        os.close(fd)


def _record(data: bytes) -> Mapping[str, Any] | None:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
