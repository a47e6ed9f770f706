"""Chooses, makes and reads the control groups that hold a guest to its memory, CPU and tasks.

Order of preference: a delegated cgroup v2 beside our own leaf, a systemd scope, cgroup v1
directories beneath our own; without any of them the start is refused, because rlimits do not bound
memory. Every value is written, read back and compared. The guest cannot see or reach any of this;
removal is in engines/leftovers.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from kernel_provisioner.engines.bwrap.freezer import Freezer
from kernel_provisioner.engines.leftovers import PREFIX, remove_cgroup
from kernel_provisioner.errors import HostRefused
from kernel_provisioner.profiles import Profile

CONTROLLERS = ("memory", "cpu", "pids")
BWRAP_TASKS = 2
"""bubblewrap's monitor outside the sandbox and its process 1 inside."""

_PERIOD_US = 100_000
_REMEDY = (
    "run under a systemd login session or `systemd-run --user --scope` on a cgroup v2 host, or "
    "let the administrator give this user writable memory, cpu and pids cgroup directories."
)


@dataclass(frozen=True, slots=True)
class Caps:
    """What the group allows: memory (with swap) in bytes, whole CPUs, tasks (threads count)."""

    memory_bytes: int
    cpus: int
    tasks: int

    @classmethod
    def of(cls, profile: Profile) -> Caps:
        """Return a profile's caps; bubblewrap's own two processes come on top of its tasks."""
        return cls(profile.ram_bytes, profile.cpus, profile.tasks + BWRAP_TASKS)


@dataclass(frozen=True, slots=True)
class Usage:
    """Raw counters. ``cpu_seconds`` and ``peak_bytes`` are None if the kernel keeps none."""

    memory_bytes: int
    file_bytes: int
    """Of these, pages of files on disk, which the kernel drops when it needs room. Not the guest's
    own files: its mounts are tmpfs, whose pages have nowhere to go without swap."""
    peak_bytes: int | None
    cpu_seconds: float | None
    tasks: int
    oom_kills: int


class Group(Protocol):
    """A group, before or after it exists."""

    @property
    def kind(self) -> str:
        """``cgroup v1``, ``cgroup v2`` or ``systemd scope``."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The directories that exist, or will, on the host."""

    @property
    def freezer(self) -> Freezer | None:
        """What makes its processes stand still; None if this host gives no such thing."""

    def create(self, caps: Caps) -> None:
        """Make it with its limits, read back. Raises HostRefused."""

    def admit(self, pid: int) -> None:
        """Move one process in and check that it is. Raises HostRefused."""

    def limits(self) -> dict[str, object]:
        """Return the limits as the kernel states them now."""

    def usage(self) -> Usage:
        """Read the counters. Raises OSError if the group is gone."""


def _write(path: Path, value: object) -> None:
    try:
        path.write_text(str(value))
    except OSError as error:
        raise HostRefused(f"{path} refuses {value} ({error.strerror}).", remedy=_REMEDY) from None


def _demand(path: Path, value: object) -> None:
    """Write a value and compare what the kernel then says."""
    _write(path, value)
    confirm(path, value)


def confirm(path: Path, value: object) -> None:
    """Raise HostRefused unless the control file holds exactly ``value``."""
    try:
        found = path.read_text().strip()
    except OSError as error:
        raise HostRefused(f"{path} cannot be read ({error.strerror}).", remedy=_REMEDY) from None
    if found != str(value):
        raise HostRefused(f"{path} holds {found}, not the {value} asked for.", remedy=_REMEDY)


def _number(path: Path) -> int:
    return int(path.read_text())


def _keyed(path: Path, key: str) -> int:
    """Return one counter of a flat keyed file, 0 if it is not there."""
    for line in path.read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _file_pages(stat: Path, cache: str, prefix: str = "") -> int:
    """Return the bytes of file pages that the kernel can drop, by two views of which each errs.

    The lists of file pages hold memory that an allocator gave back (MADV_FREE) and took into use
    again: until the kernel looks at it, it stays there. The cache holds pages that are locked.
    """
    listed = sum(_keyed(stat, f"{prefix}{age}_file") for age in ("active", "inactive"))
    cached = _keyed(stat, f"{prefix}{cache}") - _keyed(stat, f"{prefix}shmem")
    return max(0, min(listed, cached))


def _make(path: Path) -> None:
    try:
        path.mkdir(mode=0o755)
    except OSError as error:
        raise HostRefused(f"{path} cannot be made ({error.strerror}).", remedy=_REMEDY) from None


def _page_floor(size: int) -> int:
    page = os.sysconf("SC_PAGE_SIZE")
    return size // page * page


def _refuse_unbounded_swap(swap_present: bool, path: Path) -> None:
    if swap_present:
        raise HostRefused(
            f"the host has swap and {path} does not exist, so memory cannot be bounded.",
            remedy="enable swap accounting (kernel parameter swapaccount=1) or switch swap off.",
        )


@dataclass(frozen=True, slots=True)
class V1Group:
    """One directory for each controller, beneath our own group of that controller."""

    by_controller: Mapping[str, Path]
    swap_present: bool = False

    @property
    def kind(self) -> str:
        """Name for receipts."""
        return "cgroup v1"

    @property
    def paths(self) -> tuple[Path, ...]:
        """Each directory once; controllers may be mounted together."""
        return tuple(dict.fromkeys(self.by_controller.values()))

    @property
    def freezer(self) -> Freezer | None:
        """See Group."""
        group = self.by_controller.get("freezer")
        return Freezer.v1(group) if group else None

    def create(self, caps: Caps) -> None:
        """See Group."""
        for path in self.paths:
            _make(path)
        memory, cpu = self.by_controller["memory"], self.by_controller["cpu"]
        size = _page_floor(caps.memory_bytes)
        _demand(memory / "memory.limit_in_bytes", size)
        with_swap = memory / "memory.memsw.limit_in_bytes"
        if with_swap.exists():
            _demand(with_swap, size)
        else:
            _refuse_unbounded_swap(self.swap_present, with_swap)
        _demand(cpu / "cpu.cfs_period_us", _PERIOD_US)
        _demand(cpu / "cpu.cfs_quota_us", caps.cpus * _PERIOD_US)
        _demand(self.by_controller["pids"] / "pids.max", caps.tasks)

    def admit(self, pid: int) -> None:
        """See Group."""
        for path in self.paths:
            _write(path / "cgroup.procs", pid)
        inside = Path(f"/proc/{pid}/cgroup").read_text()
        if inside.count(f"/{self.paths[0].name}\n") < len(self.paths):
            raise HostRefused("the guest's process did not enter its cgroups.", remedy=_REMEDY)

    def limits(self) -> dict[str, object]:
        """See Group."""
        memory, cpu = self.by_controller["memory"], self.by_controller["cpu"]
        with_swap = memory / "memory.memsw.limit_in_bytes"
        return {
            "method": self.kind,
            "memory_bytes": _number(memory / "memory.limit_in_bytes"),
            "memory_and_swap_bytes": _number(with_swap) if with_swap.exists() else None,
            "cpus": _number(cpu / "cpu.cfs_quota_us") / _number(cpu / "cpu.cfs_period_us"),
            "tasks": _number(self.by_controller["pids"] / "pids.max"),
        }

    def usage(self) -> Usage:
        """See Group."""
        memory = self.by_controller["memory"]
        accounting = self.by_controller.get("cpuacct")
        return Usage(
            memory_bytes=_number(memory / "memory.usage_in_bytes"),
            file_bytes=_file_pages(memory / "memory.stat", "cache", prefix="total_"),
            peak_bytes=_number(memory / "memory.max_usage_in_bytes"),
            cpu_seconds=_number(accounting / "cpuacct.usage") / 1e9 if accounting else None,
            tasks=_number(self.by_controller["pids"] / "pids.current"),
            oom_kills=_keyed(memory / "memory.oom_control", "oom_kill"),
        )


@dataclass(frozen=True, slots=True)
class V2Group:
    """One directory of the unified hierarchy."""

    path: Path
    swap_present: bool = False
    kind: str = "cgroup v2"

    @property
    def paths(self) -> tuple[Path, ...]:
        """The one directory."""
        return (self.path,)

    @property
    def freezer(self) -> Freezer | None:
        """See Group."""
        return Freezer.v2(self.path) if (self.path / "cgroup.freeze").exists() else None

    def create(self, caps: Caps) -> None:
        """See Group."""
        _make(self.path)
        _demand(self.path / "memory.max", _page_floor(caps.memory_bytes))
        swap = self.path / "memory.swap.max"
        if swap.exists():
            _demand(swap, 0)
        else:
            _refuse_unbounded_swap(self.swap_present, swap)
        _demand(self.path / "cpu.max", f"{caps.cpus * _PERIOD_US} {_PERIOD_US}")
        _demand(self.path / "pids.max", caps.tasks)

    def check(self, caps: Caps) -> None:
        """Confirm limits that somebody else (systemd) was asked to set. Raises HostRefused."""
        confirm(self.path / "memory.max", _page_floor(caps.memory_bytes))
        swap = self.path / "memory.swap.max"
        if swap.exists():
            confirm(swap, 0)
        else:
            _refuse_unbounded_swap(self.swap_present, swap)
        confirm(self.path / "cpu.max", f"{caps.cpus * _PERIOD_US} {_PERIOD_US}")
        confirm(self.path / "pids.max", caps.tasks)

    def admit(self, pid: int) -> None:
        """See Group."""
        _write(self.path / "cgroup.procs", pid)
        if str(pid) not in (self.path / "cgroup.procs").read_text().split():
            raise HostRefused("the guest's process did not enter its cgroup.", remedy=_REMEDY)

    def limits(self) -> dict[str, object]:
        """See Group."""
        quota, period = (self.path / "cpu.max").read_text().split()
        swap = self.path / "memory.swap.max"
        size = _number(self.path / "memory.max")
        return {
            "method": self.kind,
            "memory_bytes": size,
            "memory_and_swap_bytes": size + _number(swap) if swap.exists() else None,
            "cpus": int(quota) / int(period),
            "tasks": _number(self.path / "pids.max"),
        }

    def usage(self) -> Usage:
        """See Group."""
        peak = self.path / "memory.peak"  # Linux 5.19
        return Usage(
            memory_bytes=_number(self.path / "memory.current"),
            file_bytes=_file_pages(self.path / "memory.stat", "file"),
            peak_bytes=_number(peak) if peak.exists() else None,
            cpu_seconds=_keyed(self.path / "cpu.stat", "usage_usec") / 1e6,
            tasks=_number(self.path / "pids.current"),
            oom_kills=_keyed(self.path / "memory.events", "oom_kill"),
        )


@dataclass(frozen=True, slots=True)
class HostView:
    """What the kernel says of cgroups and swap; text as in /proc, so that tests can state it."""

    own: str
    mountinfo: str
    swaps: str
    uid: int = field(default_factory=os.geteuid)

    @classmethod
    def read(cls) -> HostView:
        """Read this process's view."""
        proc = Path("/proc")
        swaps = proc / "swaps"
        return cls(
            (proc / "self/cgroup").read_text(),
            (proc / "self/mountinfo").read_text(),
            swaps.read_text() if swaps.exists() else "",
        )

    @property
    def swap_present(self) -> bool:
        """Whether any swap device is on."""
        return len(self.swaps.splitlines()) > 1

    def own_path(self, controller: str) -> Path | None:
        """Return the directory of our own group of a v1 controller, or of v2 for ``""``."""
        own = None
        for line in self.own.splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(",") and (controller or names == ""):
                own = path
        mount = self._mount(controller)
        if own is None or mount is None:
            return None
        root, point = mount
        inside = own.removeprefix(root.rstrip("/")) if own.startswith(root) else own
        return point / inside.strip("/")

    def _mount(self, controller: str) -> tuple[str, Path] | None:
        for line in self.mountinfo.splitlines():
            before, _, after = line.partition(" - ")
            fields, kind, options = before.split(), after.split()[0], after.split()[-1]
            matches = kind == "cgroup" and controller in options.split(",")
            if matches if controller else kind == "cgroup2":
                return fields[3], Path(fields[4])
        return None


def choose_v2(view: HostView, name: str) -> V2Group | str:
    """Return a group beside our own leaf of a delegated hierarchy, or why there is none."""
    own = view.own_path("")
    if own is None:
        return "cgroup v2 is not mounted"
    # A group that has processes may not hand out controllers (EBUSY), so only what is above us
    # can; the real root is exempt, and it alone has no cgroup.type.
    bases = list(own.parents) if (own / "cgroup.type").exists() else [own]
    for base in bases:
        handed_out = base / "cgroup.subtree_control"
        if not handed_out.exists():
            break
        if not (os.access(base, os.W_OK) and os.access(base / "cgroup.procs", os.W_OK)):
            break
        if set(CONTROLLERS) <= set(handed_out.read_text().split()):
            return V2Group(base / name, view.swap_present)
    return "no writable cgroup v2 above this process hands out memory, cpu and pids"


def choose_v1(view: HostView, name: str) -> V1Group | str:
    """Return directories beneath our own group of each controller, or why there are none."""
    found: dict[str, Path] = {}
    # Not demanded: without it a running guest's artifacts wait for its end. The first, so that
    # whoever removes the groups thaws before he waits for processes to die.
    freezer = view.own_path("freezer")
    if freezer is not None and os.access(freezer, os.W_OK | os.X_OK):
        found["freezer"] = freezer / name
    for controller in CONTROLLERS:
        own = view.own_path(controller)
        if own is None or not own.is_dir():
            return f"the cgroup v1 controller {controller} is not mounted"
        if not os.access(own, os.W_OK | os.X_OK):
            return f"{own} is not writable for this user"
        found[controller] = own / name
    # Only a counter: without it CPU time is added up from the processes.
    accounting = view.own_path("cpuacct")
    if accounting is not None and os.access(accounting, os.W_OK | os.X_OK):
        found["cpuacct"] = accounting / name
    return V1Group(found, view.swap_present)


def choose(session: str, view: HostView, scope: Callable[[HostView, str], Group | str]) -> Group:
    """Return the best group this host can give a session; nothing is made yet.

    Raises HostRefused with what was tried and a remedy.
    """
    name = PREFIX + session
    reasons = []
    for option in (choose_v2(view, name), scope(view, name), choose_v1(view, name)):
        if not isinstance(option, str):
            return option
        reasons.append(option)
    raise HostRefused(
        f"no memory, CPU and task limit can be set on this host: {'; '.join(reasons)}.",
        remedy=_REMEDY,
    )


def remove_all(paths: Sequence[Path], deadline: float) -> list[str]:
    """Empty and remove cgroups; return what is left. ``deadline`` is CLOCK_MONOTONIC."""
    return [f"cgroup {path}" for path in paths if not remove_cgroup(path, deadline)]
