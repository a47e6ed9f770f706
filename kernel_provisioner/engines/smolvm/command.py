"""Composes the arguments of ``smol-vmm machine run`` and the guest's plan; everything here is pure.

They are the security model of the microVM's edge: no network option is ever given, mounts are
read-only, sockets are named one by one. Names inside the machine are neutral, because its kernel
command line shows them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kernel_provisioner.engines.base import CHANNELS, GUEST_GID, GUEST_UID, GuestSpec
from kernel_provisioner.engines.bwrap.command import (
    GUEST_DIR,
    HOSTNAME,
    PRIVATE_DIRS,
    environment,
    etc,
    rlimits,
    tmpfs_mounts,
)
from kernel_provisioner.engines.bwrap.layout import Layout
from kernel_provisioner.engines.smolvm.release import AGENT_ROOT, PROGRAM

GUEST_SOCKETS = "/run/backintel"
AGENT = "agent"
MOST_ENDPOINTS = 16
"""The monitor takes 64 sockets; the channels and the agent need six."""
_GUEST_CODE = "/mnt/g"
_STORAGE_GIB = 3
_OVERLAY_GIB = 1
_MIB = 1 << 20
_BEYOND_MIB = 16
"""Not asked for, because libkrun gives some 11 MiB on top: the profile is the most there is.

Measured by the guest's MemTotal: 326 MiB of 320 asked for, 514 of 512, 765 of 768.
"""
_PRIVATE = "/tmp/private"  # noqa: S108 - inside the guest
SOURCE_FILE = "file"
"""A single file's name in the directory that is made for it: only directories can be mounted."""


@dataclass(frozen=True, slots=True)
class View:
    """The host's paths as the monitor sees them. ``sources`` are directories, in order."""

    engine: str
    image: str
    guest_code: str
    state: str
    sockets: str
    sources: Sequence[str]


def arguments(spec: GuestSpec, view: View) -> list[str]:
    """Return the command line of one microVM. It holds no secret."""
    profile = spec.profile
    options = [
        f"{view.engine}/{PROGRAM}",
        "--error-format",
        "json",
        "--state-dir",
        view.state,
        "machine",
        "run",
        "--interactive",
        "--image",
        view.image,
        "--cpus",
        str(profile.cpus),
        "--mem",
        str(math.ceil(profile.ram_bytes / _MIB) - _BEYOND_MIB),
        "--storage",
        str(_STORAGE_GIB),
        "--overlay",
        str(_OVERLAY_GIB),
        # Only a later backstop: the watchdog and the launcher's own timer come first.
        "--timeout",
        f"{math.ceil(spec.backstop_s) + 5}s",
        "--volume",
        f"{view.guest_code}:{_GUEST_CODE}:ro",
    ]
    for number, path in enumerate(view.sources):
        options += ["--volume", f"{path}:/mnt/s{number}:ro"]
    for name in (AGENT, *(str(port) for port in range(1, len(CHANNELS) + 1))):
        options += ["--expose-socket", f"{GUEST_SOCKETS}/{name}:{view.sockets}/{host_name(name)}"]
    for name in map(endpoint_name, range(len(spec.endpoints))):
        # The other way round: here the host listens.
        options += ["--mount-socket", f"{view.sockets}/{name}:{GUEST_SOCKETS}/{name}"]
    return [*options, "--", "/usr/bin/python3", "-I", "-B", f"{_GUEST_CODE}/agent.py"]


def host_name(name: str) -> str:
    """Return the host's name of a guest socket."""
    return name if name == AGENT else f"g-{name}"


def endpoint_name(number: int) -> str:
    """Return the name of an endpoint's socket, on the host and in the machine."""
    return f"e-{number}"


def environ(view: View, start_s: float) -> dict[str, str]:
    """Return the monitor's whole environment: an inherited ``SMOLVM_*`` could replace it.

    ``start_s`` bounds the boot inside the program; ours comes first.
    """
    seconds = str(math.ceil(start_s) + 5)
    return {
        "HOME": view.state,
        "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "SMOLVM_LIB_DIR": view.engine,
        "SMOLVM_BOOT_BINARY": f"{view.engine}/{PROGRAM}",
        "SMOLVM_AGENT_ROOTFS": f"{view.state}/{AGENT_ROOT}",
        "SMOLVM_SECCOMP": "enforce",
        "SMOLVM_LANDLOCK": "enforce",
        "SMOLVM_AGENT_READY_TIMEOUT_SECS": seconds,
        "SMOLVM_START_TIMEOUT_SECS": seconds,
    }


def endpoints(spec: GuestSpec) -> dict[str, Any]:
    """Return the agent's frame that has it listen: address, port and where each leads."""
    return {
        "op": "endpoints",
        "endpoints": [
            [endpoint.address, endpoint.port, f"{GUEST_SOCKETS}/{endpoint_name(number)}"]
            for number, endpoint in enumerate(spec.endpoints)
        ],
    }


def guest_plan(
    spec: GuestSpec, plan: Layout, files: frozenset[int], seccomp: bytes
) -> dict[str, Any]:
    """Return the agent's first frame: how the kernel's enclosure is made.

    ``files`` are the numbers of the sources that are single files.
    """
    profile = spec.profile
    places = {"image": "", "guest": _GUEST_CODE}
    for number in range(len(spec.sources)):
        inside = f"/{SOURCE_FILE}" if number in files else ""
        places[f"source-{number}"] = f"/mnt/s{number}{inside}"
    binds = []
    for item in plan.items:
        inside = f"/{item.inside}" if item.inside else ""
        binds.append([places[item.base] + inside, item.target])
    return {
        "op": "plan",
        "channels": list(CHANNELS),
        "binds": binds,
        "links": [[link.points_to, link.target] for link in plan.links],
        "etc": etc(spec.endpoints),
        "tmpfs": {path: list(limits) for path, limits in tmpfs_mounts(profile).items()},
        "private": [_PRIVATE, *(f"{_PRIVATE}/{name}" for name in PRIVATE_DIRS)],
        "hostname": HOSTNAME,
        "uid": GUEST_UID,
        "gid": GUEST_GID,
        "environment": environment(spec.session, profile),
        "rlimits": rlimits(profile),
        "max_export": profile.artifacts_bytes,
        "seccomp": seccomp.hex(),
        "argv": [
            "/usr/bin/python3",
            "-X",
            "frozen_modules=off",
            "-I",
            "-B",
            f"{GUEST_DIR}/init.py",
        ],
    }
