"""Composes bubblewrap's arguments: they are the security model, so everything here is pure.

The one rule that is also checked on the finished list (CVE-2026-87766): mount points lie only in
bubblewrap's own tmpfs, never on or beneath something bound from the host. The image's content is
verified elsewhere; names of sources come from the owner.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kernel_provisioner.engines.base import CHANNELS, GUEST_GID, GUEST_UID, GuestEndpoint
from kernel_provisioner.errors import StartFailed
from kernel_provisioner.profiles import Profile

HOSTNAME = "backintel"
GUEST_DIR = "/opt/backintel/guest"
_PRIVATE = "/tmp/private"  # noqa: S108 - inside the guest
PRIVATE_DIRS = (
    "home",
    "config",
    "cache",
    "data",
    "state",
    "run",
    "tmp",
    "ipython",
    "matplotlib",
    "duckdb",
)
_ETC: Mapping[str, str] = {
    "passwd": f"kernel:x:{GUEST_UID}:{GUEST_GID}::{_PRIVATE}/home:/bin/bash\n",
    "group": f"kernel:x:{GUEST_GID}:\n",
    # Not ::1 too: guest code could listen there in the place of an endpoint at localhost.
    "hosts": f"127.0.0.1 localhost {HOSTNAME}\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "resolv.conf": "",
    "hostname": f"{HOSTNAME}\n",
}
ETC = frozenset(_ETC)
"""Names of the files of /etc that are ours, whatever the image has."""

_OPERANDS: Mapping[str, int] = {
    "--ro-bind": 2,
    "--ro-bind-fd": 2,
    "--ro-bind-data": 2,
    "--symlink": 2,
    "--tmpfs": 1,
    "--dir": 1,
    "--proc": 1,
    "--dev": 1,
}
"""Options that make a mount point or an entry, with the number of operands; the last is it."""
_LEADING_AWAY = ("--ro-bind", "--ro-bind-fd", "--ro-bind-data", "--symlink")
"""What may lead out of bubblewrap's tmpfs: nothing is made on or beneath these."""


@dataclass(frozen=True, slots=True)
class Bind:
    """Something of the host, seen read-only at ``target``: a path or an open descriptor of it."""

    target: str
    path: str = ""
    fd: int | None = None

    def arguments(self) -> tuple[str, str, str]:
        """Return bubblewrap's option; a descriptor cannot be swapped for something else."""
        if self.fd is not None:
            return ("--ro-bind-fd", str(self.fd), self.target)
        return ("--ro-bind", self.path, self.target)


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link of the image, made anew in bubblewrap's root."""

    target: str
    points_to: str


@dataclass(frozen=True, slots=True)
class Descriptors:
    """Inherited descriptors by what they carry."""

    seccomp: int
    info: int
    control: int
    targets: int
    listeners: Mapping[str, int]
    etc: Mapping[str, int]


def etc(endpoints: Sequence[GuestEndpoint] = ()) -> dict[str, str]:
    """Return our files of /etc by name; the host names of endpoints are known by file alone."""
    named = {endpoint.host: endpoint.address for endpoint in endpoints}
    lines = [
        f"{address} {host}\n"
        for host, address in named.items()
        if host not in (address, "localhost")
    ]
    return {**_ETC, "hosts": _ETC["hosts"] + "".join(lines)}


def rlimits(profile: Profile) -> dict[str, int]:
    """Return what the guest sets for itself (spec D3); sizes in bytes.

    No file can be larger than memory, for all writable mounts count inside it.
    """
    return {
        "nproc": profile.tasks,
        "nofile": profile.open_files,
        "core": 0,
        "fsize": profile.ram_bytes,
        "memlock": 8 << 20,
        "msgqueue": 0,
        "sigpending": 4096,
        "nice": 0,
        "rtprio": 0,
    }


def tmpfs_mounts(profile: Profile) -> dict[str, tuple[int, int]]:
    """Return (bytes, mode) of each writable mount by path (spec D2)."""
    return {
        "/workspace": (profile.workspace_bytes, 0o700),
        "/artifacts": (profile.artifacts_bytes, 0o700),
        "/tmp": (profile.temp_bytes, 0o700),  # noqa: S108 - inside the guest
        "/dev/shm": (profile.temp_bytes, 0o1777),  # noqa: S108
    }


def environment(session: str, profile: Profile) -> dict[str, str]:
    """Return the guest's whole environment (spec D3, D4): nothing of the host's is in it."""
    cpus = str(profile.cpus)
    private = {name: f"{_PRIVATE}/{name}" for name in PRIVATE_DIRS}
    return {
        "PATH": f"{GUEST_DIR}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": private["home"],
        "USER": "kernel",
        "LOGNAME": "kernel",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "TMPDIR": private["tmp"],
        "XDG_CONFIG_HOME": private["config"],
        "XDG_CACHE_HOME": private["cache"],
        "XDG_DATA_HOME": private["data"],
        "XDG_STATE_HOME": private["state"],
        "XDG_RUNTIME_DIR": private["run"],
        "IPYTHONDIR": private["ipython"],
        "MPLCONFIGDIR": private["matplotlib"],
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": f"{GUEST_DIR}/site",
        **dict.fromkeys(
            (
                "OMP_NUM_THREADS",
                "OPENBLAS_NUM_THREADS",
                "MKL_NUM_THREADS",
                "NUMEXPR_NUM_THREADS",
                "NUMEXPR_MAX_THREADS",
                "POLARS_MAX_THREADS",
                "RAYON_NUM_THREADS",
                "ARROW_NUM_THREADS",
            ),
            cpus,
        ),
        "BACKINTEL_SESSION": session,
        "BACKINTEL_PROFILE": profile.name,
        "BACKINTEL_MEMORY_BYTES": str(profile.ram_bytes),
        "BACKINTEL_CPUS": cpus,
        "BACKINTEL_DUCKDB_TEMP": private["duckdb"],
    }


def arguments(
    session: str,
    profile: Profile,
    binds: Sequence[Bind],
    links: Sequence[Link],
    fds: Descriptors,
) -> list[str]:
    """Return all of bubblewrap's options (not the command). Raises StartFailed on a broken rule."""
    options = [*_namespaces(), "--clearenv"]
    for name, value in environment(session, profile).items():
        options += ["--setenv", name, value]
    for bind in binds:
        options += bind.arguments()
    for link in links:
        options += ["--symlink", link.points_to, link.target]
    for name, fd in fds.etc.items():
        options += ["--perms", "0644", "--ro-bind-data", str(fd), f"/etc/{name}"]
    options += ["--dir", "/run", "--dir", "/sources", "--proc", "/proc", "--dev", "/dev"]
    for path, (size, mode) in tmpfs_mounts(profile).items():
        options += ["--perms", f"{mode:04o}", "--size", str(size), "--tmpfs", path]
    options += ["--perms", "0700", "--dir", _PRIVATE]
    for name in PRIVATE_DIRS:
        options += ["--perms", "0700", "--dir", f"{_PRIVATE}/{name}"]
    # bubblewrap's own root and /dev are unsized tmpfs: nothing may be written there.
    options += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/workspace"]
    options += ["--add-seccomp-fd", str(fds.seccomp), "--info-fd", str(fds.info)]
    check_mount_points(options)
    return options


def _namespaces() -> tuple[str, ...]:
    return (
        "--unshare-user",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup",
        "--disable-userns",
        "--assert-userns-disabled",
        "--uid",
        str(GUEST_UID),
        "--gid",
        str(GUEST_GID),
        "--cap-drop",
        "ALL",
        "--new-session",
        "--die-with-parent",
        "--hostname",
        HOSTNAME,
    )


def guest_command(profile: Profile, fds: Descriptors) -> list[str]:
    """Return what bubblewrap runs.

    ``frozen_modules=off`` is what ipykernel's own kernelspec says, for the debugger.
    """
    plan = {
        "control": fds.control,
        "targets": fds.targets,
        "listeners": {name: fds.listeners[name] for name in CHANNELS},
        "rlimits": rlimits(profile),
        "tmpfs": list(tmpfs_mounts(profile)),
    }
    init = f"{GUEST_DIR}/init.py"
    text = json.dumps(plan, separators=(",", ":"))
    return ["/usr/bin/python3", "-X", "frozen_modules=off", "-I", "-B", init, text]


def mount_points(options: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (option, path) of everything that the options make in the sandbox, in order."""
    position = 0
    while position < len(options):
        option = options[position]
        operands = _OPERANDS.get(option)
        if operands is None:
            position += 1
            continue
        yield option, options[position + operands]
        position += operands + 1


def check_mount_points(options: Sequence[str]) -> None:
    """Raise StartFailed if anything is made on or beneath a bind, or a bind hides an earlier one.

    A symbolic link in a bound tree could lead such a mount point onto the host
    (CVE-2026-87766, GHSA-pxhw-h44j-8pfx); in bubblewrap's own tmpfs there is nobody to put one.
    """
    binds: list[str] = []
    made: list[str] = []
    for option, path in mount_points(options):
        parts = path.split("/")
        if parts[0] or len(parts) < 2 or any(part in ("", ".", "..") for part in parts[1:]):
            raise StartFailed(f"the mount point {path!r} is not a plain absolute path.")
        for bound in binds:
            if path == bound or path.startswith(f"{bound}/"):
                raise StartFailed(f"the mount point {path} lies beneath {bound}, which is bound.")
        if option in _LEADING_AWAY:
            for earlier in made:
                if earlier == path or earlier.startswith(f"{path}/"):
                    raise StartFailed(f"{path} would hide the mount point {earlier}.")
            binds.append(path)
        made.append(path)
