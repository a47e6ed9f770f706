"""Profiles (spec D): what one session may use, and whether this host can give it.

Decisions here are pure and trust nobody's numbers; only ``host_capacity`` reads the host. Standard
library only: the supervisor imports this module on the start-up path.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from kernel_provisioner.errors import HostRefused, ProfileRefused

MIB = 1024 * 1024
DEADLINE_ACTIONS = ("interrupt", "cancel")
AFTER_END = ("restart", "stay")
"""Whether a manager's automatic restart may replace a guest that was destroyed."""
MAX_DEADLINE_S = 30 * 86400.0
"""Upper bound of a deadline: beyond it a timer could overflow, and nobody waits that long."""
KERNEL_RESERVE_BYTES = 128 * MIB
"""RAM that full tmpfs mounts must leave to the kernel process (an idle one was measured at 78 MiB).

Without it a full mount would end in an out-of-memory kill instead of ENOSPC (spec D2).
"""
RAM_SHARE = 0.85
ADMISSION_NOTE = (
    "Admission compares one profile with the whole host; it does not reserve capacity between "
    "sessions."
)
ONE_DEADLINE = frozenset({"benchmark"})
"""Profiles whose cell and run deadline are one value (spec D)."""


@dataclass(frozen=True, slots=True)
class Profile:
    """Limits of one session. Sizes in bytes, times in seconds.

    ``/dev/shm`` has a limit of its own, equal to ``temp_bytes``; all mounts count inside
    ``ram_bytes`` (spec D2).
    """

    name: str
    ram_bytes: int
    cpus: int
    workspace_bytes: int
    artifacts_bytes: int
    temp_bytes: int
    cell_deadline_s: float
    run_deadline_s: float
    cells: int | None
    on_cell_deadline: str
    grace_s: float = 5.0
    tasks: int = 128
    open_files: int = 1024
    after_end: str = "stay"

    @property
    def mounts_bytes(self) -> int:
        """Bytes that the writable mounts hold when all are full, ``/dev/shm`` included."""
        return self.workspace_bytes + self.artifacts_bytes + 2 * self.temp_bytes


@dataclass(frozen=True, slots=True)
class HostCapacity:
    """What this process may use of the host: whole CPUs (affinity) and bytes of RAM."""

    cpus: int
    ram_bytes: int

    @property
    def admissible_ram_bytes(self) -> int:
        """The largest RAM a profile may ask for (spec D1: 85 %)."""
        return int(self.ram_bytes * RAM_SHARE)


BUILTIN: Mapping[str, Profile] = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            Profile(
                "analysis",
                2048 * MIB,
                2,
                512 * MIB,
                128 * MIB,
                256 * MIB,
                cell_deadline_s=120.0,
                run_deadline_s=900.0,
                cells=40,
                on_cell_deadline="cancel",
            ),
            Profile(
                "large",
                4096 * MIB,
                3,
                1024 * MIB,
                128 * MIB,
                512 * MIB,
                cell_deadline_s=300.0,
                run_deadline_s=1800.0,
                cells=40,
                on_cell_deadline="cancel",
            ),
            Profile(
                "benchmark",
                768 * MIB,
                1,
                128 * MIB,
                64 * MIB,
                128 * MIB,
                cell_deadline_s=120.0,
                run_deadline_s=120.0,
                cells=1,
                on_cell_deadline="cancel",
            ),
            Profile(
                "interactive",
                2048 * MIB,
                2,
                512 * MIB,
                128 * MIB,
                256 * MIB,
                cell_deadline_s=120.0,
                run_deadline_s=28800.0,
                cells=None,
                on_cell_deadline="interrupt",
                after_end="restart",
            ),
        )
    }
)


def problem(profile: Profile) -> tuple[str, str] | None:
    """Return (field, reason) of the first malformed field, or None for a sound profile."""
    whole: dict[str, object] = {
        "cpus": profile.cpus,
        "ram_bytes": profile.ram_bytes,
        "workspace_bytes": profile.workspace_bytes,
        "artifacts_bytes": profile.artifacts_bytes,
        "temp_bytes": profile.temp_bytes,
        "tasks": profile.tasks,
        "open_files": profile.open_files,
    }
    if profile.cells is not None:
        whole["cells"] = profile.cells
    for field, number in whole.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            return field, f"is {number!r}; a whole number of at least 1 is needed"
    for field, seconds, zero in (
        ("cell_deadline_s", profile.cell_deadline_s, False),
        ("run_deadline_s", profile.run_deadline_s, False),
        ("grace_s", profile.grace_s, True),
    ):
        reason = seconds_problem(seconds, zero_allowed=zero)
        if reason:
            return field, reason
    if profile.cell_deadline_s > profile.run_deadline_s:
        return (
            "cell_deadline_s",
            f"is {profile.cell_deadline_s:g} s, over the run deadline of "
            f"{profile.run_deadline_s:g} s",
        )
    if profile.on_cell_deadline not in DEADLINE_ACTIONS:
        return (
            "on_cell_deadline",
            f"is {profile.on_cell_deadline!r}; {' or '.join(DEADLINE_ACTIONS)} is needed",
        )
    if profile.after_end not in AFTER_END:
        return "after_end", f"is {profile.after_end!r}; {' or '.join(AFTER_END)} is needed"
    if profile.mounts_bytes + KERNEL_RESERVE_BYTES > profile.ram_bytes:
        return (
            "ram_bytes",
            f"is {_mib(profile.ram_bytes)}, but full mounts take {_mib(profile.mounts_bytes)} of "
            f"it (workspace + artifacts + 2 x temp, as /dev/shm has temp's size) and the kernel "
            f"needs {_mib(KERNEL_RESERVE_BYTES)}",
        )
    return None


def seconds_problem(value: object, *, zero_allowed: bool = False) -> str | None:
    """Return why ``value`` is no duration in seconds, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"is {value!r}; a number of seconds is needed"
    # An int may be too large for a float; comparing is exact, converting would raise.
    if isinstance(value, float) and not math.isfinite(value):
        return f"is {value!r}; a finite number of seconds is needed"
    if value < 0 or (value == 0 and not zero_allowed):
        least = "at least 0" if zero_allowed else "above 0"
        return f"is {value!r}; a number of seconds {least} is needed"
    if value > MAX_DEADLINE_S:
        return f"is over the longest duration of {MAX_DEADLINE_S:.0f} s (30 days)"
    return None


def with_deadlines(
    profile: Profile, *, cell_s: float | None = None, run_s: float | None = None
) -> Profile:
    """Return ``profile`` with other deadlines, each in seconds; None keeps the profile's own.

    A run deadline below the profile's own cell deadline lowers that too: a cell cannot outlive its
    run. A profile of ONE_DEADLINE takes a single value for both. Raises ProfileRefused if the two
    values contradict each other.
    """
    if profile.name in ONE_DEADLINE:
        given = {value for value in (cell_s, run_s) if value is not None}
        if len(given) > 1:
            raise ProfileRefused(
                f"profile {profile.name!r} has one deadline for cell and run, but {cell_s:g} s and "
                f"{run_s:g} s were given.",
                remedy="give one of them, or both with one value.",
            )
        both = given.pop() if given else profile.run_deadline_s
        changed = replace(profile, cell_deadline_s=both, run_deadline_s=both)
    else:
        run = profile.run_deadline_s if run_s is None else run_s
        cell = min(profile.cell_deadline_s, run) if cell_s is None else cell_s
        if cell > run:
            raise ProfileRefused(
                f"profile {profile.name!r}: the cell deadline of {cell:g} s is over the "
                f"run deadline of {run:g} s.",
                remedy="let the run deadline be at least the cell deadline.",
            )
        changed = replace(profile, cell_deadline_s=cell, run_deadline_s=run)
    check(changed)
    return changed


def check(profile: Profile) -> None:
    """Raise ProfileRefused naming profile, field and reason if ``profile`` is malformed."""
    found = problem(profile)
    if found:
        raise ProfileRefused(
            f"profile {profile.name!r}: {found[0]} {found[1]}.",
            remedy="correct that value.",
        )


def admit(profile: Profile, host: HostCapacity) -> None:
    """Raise ProfileRefused, with the figures, if ``host`` cannot hold ``profile`` (spec D1).

    Admission does not reserve: two sessions may each be admitted and together exceed the host.
    """
    check(profile)
    reasons = []
    if profile.cpus > host.cpus:
        reasons.append(f"{profile.cpus} CPUs, but this process may use {host.cpus}")
    if profile.ram_bytes > host.admissible_ram_bytes:
        reasons.append(
            f"{_mib(profile.ram_bytes)} of RAM, but at most {_mib(host.admissible_ram_bytes)} "
            f"({RAM_SHARE:.0%} of {_mib(host.ram_bytes)}) can be given"
        )
    if not reasons:
        return
    fitting = [
        other.name
        for other in BUILTIN.values()
        if other.cpus <= host.cpus and other.ram_bytes <= host.admissible_ram_bytes
    ]
    raise ProfileRefused(
        f"profile {profile.name!r} asks for {' and '.join(reasons)}.",
        remedy=(
            f"choose a profile that fits ({', '.join(fitting)}) or a larger host."
            if fitting
            else "no built-in profile fits this host; use a larger one."
        ),
    )


def host_capacity() -> HostCapacity:
    """Return the CPUs of this process's affinity mask and min(physical RAM, own cgroup limit).

    Raises HostRefused if the amount of memory cannot be read.
    """
    # Only Linux has an affinity mask; elsewhere every CPU is usable.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError) as error:
        raise HostRefused(
            f"the amount of physical memory cannot be read ({error}).",
            remedy="run on Linux or macOS.",
        ) from None
    limit = cgroup_memory_limit(
        _read(Path("/proc/self/cgroup")), _read(Path("/proc/self/mountinfo")), _read
    )
    return HostCapacity(cpus, physical if limit is None else min(physical, limit))


def cgroup_memory_limit(membership: str, mountinfo: str, read: Callable[[Path], str]) -> int | None:
    """Return the smallest memory limit in bytes of a process's cgroups and their ancestors.

    ``membership`` is /proc/PID/cgroup, ``mountinfo`` /proc/PID/mountinfo (cgroups(7), proc(5));
    ``read`` returns a file's text, or "" where there is none. None means that no limit is set.
    """
    groups: dict[str, str] = {}
    for line in membership.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            number, controllers, path = parts
            if number == "0" and not controllers:
                groups["v2"] = path
            elif "memory" in controllers.split(","):
                groups["v1"] = path
    limits = []
    for line in mountinfo.splitlines():
        fields, _, tail = line.partition(" - ")
        left, right = fields.split(), tail.split()
        if len(left) < 5 or len(right) < 3:
            continue
        root, point, kind, options = left[3], left[4], right[0], right[2].split(",")
        if kind == "cgroup2" and "v2" in groups:
            path, file = groups["v2"], "memory.max"
        elif kind == "cgroup" and "memory" in options and "v1" in groups:
            path, file = groups["v1"], "memory.limit_in_bytes"
        else:
            continue
        for folder in _with_ancestors(path, root):
            text = read(Path(point) / folder / file).strip()
            if text.isdecimal():
                limits.append(int(text))
    return min(limits, default=None)


def _with_ancestors(path: str, root: str) -> list[str]:
    """Return a cgroup and its ancestors up to the mount's root, relative to the mount point."""
    prefix = root.rstrip("/")
    inside = path == prefix or path.startswith(prefix + "/")
    # Outside the mount (another cgroup namespace) only the mount's own root can be read.
    parts = [part for part in path[len(prefix) :].split("/") if part] if inside else []
    if ".." in parts:
        parts = []
    return ["/".join(parts[:depth]) for depth in range(len(parts), -1, -1)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _mib(size: int) -> str:
    return f"{size / MIB:.0f} MiB"
