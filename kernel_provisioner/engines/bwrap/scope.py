"""A systemd scope as the guest's group: asked of the manager over its bus, then read back.

The launcher waits at its gate while the manager moves it, so that bubblewrap starts inside. systemd
silently ignores controllers it cannot delegate, so every value is confirmed in the cgroup itself.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from kernel_provisioner.engines.bwrap.cgroups import CONTROLLERS, Caps, HostView, Usage, V2Group
from kernel_provisioner.engines.bwrap.freezer import Freezer
from kernel_provisioner.errors import HostRefused

_TIMEOUT_S = 5.0


def choose_scope(view: HostView, name: str) -> ScopeGroup | str:
    """Return a scope of the user's (as root: the system's) manager, or why there is none."""
    busctl = shutil.which("busctl", path="/usr/bin:/bin")
    if busctl is None:
        return "systemd's busctl is not installed"
    root = view.own_path("")
    if root is None:
        return "a systemd scope needs cgroup v2"
    while (root.parent / "cgroup.controllers").exists():
        root = root.parent
    if not set(CONTROLLERS) <= set((root / "cgroup.controllers").read_text().split()):
        return "cgroup v2 has no memory, cpu and pids controllers here"
    runtime = Path("/run/systemd" if view.uid == 0 else f"/run/user/{view.uid}/systemd")
    if not (runtime / "private").exists():
        return "no systemd manager runs for this user"
    above = "system.slice" if view.uid == 0 else _user_slice(view.uid)
    return ScopeGroup(busctl, root, root / above / f"{name}.scope", view.uid, view.swap_present)


def _user_slice(uid: int) -> str:
    return f"user.slice/user-{uid}.slice/user@{uid}.service/app.slice"


def bus_call(busctl: str, uid: int, name: str, pid: int, caps: Caps, *, oom: bool) -> list[str]:
    """Return the argument list of StartTransientUnit for a scope holding ``pid``."""
    properties = [
        ("Description", "s", "BackIntel sandbox"),
        ("MemoryMax", "t", str(caps.memory_bytes)),
        ("MemorySwapMax", "t", "0"),
        ("TasksMax", "t", str(caps.tasks)),
        ("CPUQuotaPerSecUSec", "t", str(caps.cpus * 1_000_000)),
    ]
    if oom:
        # The default, stop, would remove the group and with it the evidence of why.
        properties.append(("OOMPolicy", "s", "continue"))
    flat = [word for entry in properties for word in entry]
    return [
        busctl,
        "--system" if uid == 0 else "--user",
        "--quiet",
        "call",
        "org.freedesktop.systemd1",
        "/org/freedesktop/systemd1",
        "org.freedesktop.systemd1.Manager",
        "StartTransientUnit",
        "ssa(sv)a(sa(sv))",
        name,
        "fail",
        str(len(properties) + 1),
        "PIDs",
        "au",
        "1",
        str(pid),
        *flat,
        "0",
    ]


@dataclass(slots=True)
class ScopeGroup:
    """See cgroups.Group. The manager removes the scope once it is empty."""

    busctl: str
    root: Path
    expected: Path
    uid: int
    swap_present: bool
    _caps: Caps | None = field(default=None, init=False)
    _group: V2Group | None = field(default=None, init=False)

    @property
    def kind(self) -> str:
        """Name for receipts."""
        return "systemd scope"

    @property
    def paths(self) -> tuple[Path, ...]:
        """Where the scope is, or is expected to be."""
        return (self._group.path if self._group else self.expected,)

    @property
    def freezer(self) -> Freezer | None:
        """See cgroups.Group. Where systemd lets only itself freeze, freezing is refused."""
        return self._group.freezer if self._group else None

    def create(self, caps: Caps) -> None:
        """Only note the caps: a scope cannot exist without a process."""
        self._caps = caps

    def admit(self, pid: int) -> None:
        """See cgroups.Group."""
        if self._caps is None:
            raise HostRefused("the scope's limits were not stated.", remedy="report this defect.")
        name = self.expected.name
        # OOMPolicy of scopes exists since systemd 253.
        done = self._call(name, pid, self._caps, oom=True)
        if done.returncode != 0:
            done = self._call(name, pid, self._caps, oom=False)
        if done.returncode != 0:
            raise HostRefused(
                f"systemd refused a scope: {done.stderr.strip()[:300]}.",
                remedy="start from a login session whose user manager delegates memory, cpu and "
                "pids (loginctl; Delegate= of user@.service).",
            )
        group = V2Group(self._wait_inside(pid, name), self.swap_present, self.kind)
        group.check(self._caps)
        self._group = group

    def _call(
        self, name: str, pid: int, caps: Caps, *, oom: bool
    ) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": f"/run/user/{self.uid}"}
        try:
            return subprocess.run(
                bus_call(self.busctl, self.uid, name, pid, caps, oom=oom),
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise HostRefused(
                f"systemd did not answer within {_TIMEOUT_S:g} s.",
                remedy="check the user manager: systemctl --user status.",
            ) from None

    def _wait_inside(self, pid: int, name: str) -> Path:
        """The call returns when the job is queued; the move itself shows in /proc."""
        deadline = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < deadline:
            for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
                if line.startswith("0::") and line.endswith(f"/{name}"):
                    return self.root / line[3:].strip("/")
            time.sleep(0.002)
        raise HostRefused(
            "systemd did not move the guest into its scope.",
            remedy="check the user manager: systemctl --user status.",
        )

    def limits(self) -> dict[str, object]:
        """See cgroups.Group."""
        return self._made().limits()

    def usage(self) -> Usage:
        """See cgroups.Group."""
        return self._made().usage()

    def _made(self) -> V2Group:
        if self._group is None:
            raise FileNotFoundError(str(self.expected))
        return self._group
