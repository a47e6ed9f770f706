"""The virtual machine monitor as a process of the host: found, judged and measured from outside.

It is a child of ``smol-vmm machine run``, which is a child of our keeper. Nothing here needs the
guest, and nothing the guest does can change what is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernel_provisioner.engines.base import ProcessIdentity
from kernel_provisioner.processes import identify, is_running

_ROLE = b"_boot-vm"
_MAX_RECORD = 65536
_SECCOMP_FILTER = "2"


def find(keeper: ProcessIdentity) -> ProcessIdentity | None:
    """Return the monitor among the keeper's descendants, recognized by its role."""
    for program in _children(keeper.pid):
        for pid in _children(program):
            identity = identify(pid)
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if identity is not None and _ROLE in words and is_running(keeper):
                return identity
    return None


def _children(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in path.read_text().split()]
        except OSError:
            continue
    return found


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


def exit_record(state: Path) -> Mapping[str, Any] | None:
    """Return the program's own record of how its monitor ended, if it left one."""
    for path in state.glob(".cache/smolvm/vms/*/vmm-exit.json"):
        try:
            with path.open("rb") as file:
                data = json.loads(file.read(_MAX_RECORD))
        except (OSError, ValueError):
            continue
        if isinstance(data, dict):
            return data
    return None
