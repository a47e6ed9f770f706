"""Looks at the host as somebody who knows only names: processes, control groups, files, mounts.

Nothing here asks the product what it thinks is there.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from kernel_provisioner.engines.base import ProcessIdentity
from kernel_provisioner.paths import StateDirs
from kernel_provisioner.processes import identify

_RECEIPT = re.compile(r"[0-9a-f]{16}\.json")


def command(pid: int) -> bytes:
    """Return a process's command line, empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def children(pid: int) -> list[int]:
    """Return the children that a process's first thread started."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def first_child(pid: int | None) -> int | None:
    """Return the oldest child, if any."""
    found = children(pid) if pid is not None else []
    return found[0] if found else None


def control_groups(session: str) -> list[Path]:
    """Return the session's directories below our own control groups."""
    found = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        for root in (Path("/sys/fs/cgroup") / controllers, Path("/sys/fs/cgroup")):
            found += (root / own.lstrip("/")).glob(f"backintel-{session}*")
    return found


def members(session: str) -> list[ProcessIdentity]:
    """Return the processes in the session's control groups."""
    pids: set[int] = set()
    for group in control_groups(session):
        with suppress(OSError):
            pids |= {int(word) for word in (group / "cgroup.procs").read_text().split()}
    return _alive(pids)


def marked(home: str) -> list[ProcessIdentity]:
    """Return the processes that were started with this HOME: supervisors and their launchers."""
    wanted = f"HOME={home}".encode()
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    pids.append(int(name))
    return _alive(pids)


def _alive(pids: Iterable[int]) -> list[ProcessIdentity]:
    return [found for pid in pids if (found := identify(pid)) is not None]


def mounts() -> set[str]:
    """Return the mount points that this process sees."""
    return {line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()}


def residue(
    dirs: StateDirs, sessions: Iterable[str], socket_dirs: Iterable[Path], exports: Path
) -> list[str]:
    """Return what is still there that a sweep should have removed."""
    left = [str(path) for path in entries(dirs.sessions)]
    left += [str(path) for path in entries(dirs.receipts) if not _RECEIPT.fullmatch(path.name)]
    left += [str(path) for path in entries(dirs.state / "staging")]
    left += [str(path) for path in entries(exports) if path.name != "artifacts"]
    left += [str(path) for path in socket_dirs if path.exists()]
    for session in sessions:
        left += [str(path) for path in control_groups(session)]
    return left


def entries(directory: Path) -> list[Path]:
    """Return what is in a directory; nothing if there is none."""
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []


def gone_by(deadline: float, look: Callable[[], list[ProcessIdentity]]) -> list[ProcessIdentity]:
    """Look until nothing is found; return what is left at ``deadline`` (CLOCK_MONOTONIC).

    What counts is a look that begins after it: one takes long where there are many processes.
    """
    while True:
        begun = time.monotonic()
        found = look()
        if not found or begun >= deadline:
            return found
        time.sleep(0.01)
