"""The seam between a session and what isolates it: Engine starts a Guest, Guest is held by verbs.

Nothing here trusts the guest. ``kill`` and ``destroy`` need no guest cooperation; whatever a guest
attests is compared with what was asked by the caller of ``wait_attested``.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

from kernel_provisioner.profiles import Profile

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
"""Channel order; a channel's port number in ``transport: ipc`` is its index + 1."""

GUEST_UID = 10001
GUEST_GID = 10001


@dataclass(frozen=True, slots=True)
class SourceMount:
    """A read-only source: ``path`` on the host, seen as ``/sources/<name>``."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class GuestEndpoint:
    """An assigned endpoint as the guest finds it: ``host`` and ``port`` of its own loopback.

    ``address`` (IPv4) is what ``host`` means there; one that is no loopback address is added to lo.
    """

    name: str
    host: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class EndpointListener:
    """What accepts the guest's connections to one endpoint; non-blocking.

    ``framed``: not as the guest's client sent them, but in the frames of ``guest/forward.py``.
    """

    sock: socket.socket
    framed: bool


@dataclass(frozen=True, slots=True)
class GuestSpec:
    """All that an engine needs to start one guest. Paths are absolute and already verified."""

    session: str
    profile: Profile
    image_root: Path
    guest_code: Path
    socket_dir: Path
    """The session's 0700 directory; the engine binds the guest's sockets ``g-1``..``g-5`` there."""
    sources: tuple[SourceMount, ...] = ()
    endpoints: tuple[GuestEndpoint, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables of the kernel that the owner named (spec E3, F3)."""
    backstop_s: float = 86400.0
    """Seconds from ``launch`` after which the guest ends even if its supervisor is stopped."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process that cannot be confused with a later one of the same number.

    ``start_time`` is field 22 of /proc/PID/stat, in clock ticks since boot.
    """

    pid: int
    start_time: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What was verified of the engine: its version and the sha256 of each executed file."""

    name: str
    version: str
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading. ``oom_kills`` counts kills by the kernel for this guest's limit (evidence).

    ``held_bytes`` is the part of ``memory_bytes`` that the kernel cannot take back by dropping file
    pages: what brings a guest to its limit. The cached image counts in the rest.
    """

    memory_bytes: int
    held_bytes: int
    peak_memory_bytes: int
    peak_memory_method: str
    cpu_seconds: float
    tasks: int
    oom_kills: int


@dataclass(frozen=True, slots=True)
class GuestExit:
    """How the kernel process ended: ``status`` as exit code, or ``-signal``. None if unknown.

    ``detail`` is then what the host found of why, quoted: it may be the guest's words.
    """

    status: int | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What a guest leaves on the host if its supervisor is killed; recorded before it exists."""

    processes: tuple[ProcessIdentity, ...] = ()
    cgroups: tuple[Path, ...] = ()
    directories: tuple[Path, ...] = ()


@dataclass(slots=True)
class Hold:
    """A guest that stands still. ``late`` and ``seconds`` (how long it stood) hold afterwards."""

    deadline: float
    """CLOCK_MONOTONIC seconds at which it goes on, whoever still reads."""
    late: bool = False
    """It went on by itself: what was read may be of two moments."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry below /artifacts as its file system says. Names are hostile bytes.

    ``kind`` is the type that it has in the tar stream; ``mtime`` in seconds.
    """

    name: bytes
    kind: bytes
    size: int
    mtime: float


class Guest(Protocol):
    """One started guest. All methods are safe to call after it died."""

    @property
    def channels(self) -> Mapping[str, Path]:
        """Host Unix sockets, one per name in CHANNELS, connectable from start on."""

    @property
    def limits(self) -> Mapping[str, object]:
        """Host-side limits as read back (cgroup values, paths), for the receipt."""

    @property
    def leftovers(self) -> Leftovers:
        """What the write-ahead record must hold for a sweep."""

    async def wait_attested(self, timeout: float) -> Mapping[str, object]:
        """Return the guest's facts after comparing them. Raises AttestationFailed, StartFailed."""

    async def open_endpoints(self, timeout: float) -> Mapping[str, EndpointListener]:
        """Listen inside for each endpoint of the spec; once, between attestation and ``release``.

        Returns listeners by the endpoint's name; what they accept is hostile as all that the guest
        sends. The caller closes them. Raises StartFailed.
        """

    async def release(self, connection: Mapping[str, object], timeout: float) -> None:
        """Send the go frame: the guest becomes the kernel; returns once its sockets are bound.

        Raises StartFailed with the phase and what the guest printed.
        """

    def signal(self, signum: int, msg_id: str = "") -> None:
        """Send a signal to the kernel's process group. A dead guest is not an error.

        With ``msg_id`` an interrupt is for that request only: the kernel ignores it when it has
        gone on to another.
        """

    async def wait(self) -> GuestExit:
        """Wait until the guest is gone."""

    def kill(self) -> None:
        """SIGKILL the whole guest by identity; needs nothing of it."""

    def sample(self) -> Sample:
        """Read memory, CPU and out-of-memory evidence from the host's side."""

    def artifacts(self) -> BinaryIO:
        """Return /artifacts as an uncompressed tar stream, also after ``kill``.

        The stream is hostile. Raises StartFailed if the guest never came up, NoAnswer if it cannot
        be asked now.
        """

    def frozen(self) -> AbstractAsyncContextManager[Hold]:
        """Make the guest stand still, for at most 2 s; a dead guest stands anyway.

        Raises FreezeRefused if this host or engine cannot. One at a time.
        """

    def listing(self) -> Sequence[Listed]:
        """Look at /artifacts without stopping the guest; bounded, the first entries by name.

        Blocks. Raises StartFailed if there is no guest, OSError if it changes too quickly,
        NoAnswer if it cannot be asked now, and ExportRefused if its answer cannot be used.
        """

    async def destroy(self, timeout: float) -> Sequence[str]:
        """Remove all that the guest left; idempotent; returns what could not be removed."""


class Launched(Protocol):
    """A guest that was launched and not seen yet. Ends by itself if this process dies."""

    @property
    def leftovers(self) -> Leftovers:
        """What a sweep has to end and remove if the supervisor is killed now."""

    async def claim(self) -> Guest:
        """Return the guest. Raises StartFailed, HostRefused; then nothing is left."""

    def abandon(self) -> None:
        """Undo the launch; instead of ``claim``."""


class Engine(Protocol):
    """A way to make guests."""

    @property
    def name(self) -> str:
        """The engine's name in configuration and receipts."""

    @property
    def isolation(self) -> str:
        """What people are shown (spec B): ``microVM`` or ``namespaces: weaker isolation``."""

    def verify(self, *, deep: bool = False) -> EngineFacts:
        """Check every executed file against its pin; ``deep`` digests all again.

        Raises EngineUnavailable.
        """

    def plan(self, spec: GuestSpec) -> Leftovers:
        """Return what ``launch`` will create, before anything is (the write-ahead record)."""

    def launch(self, spec: GuestSpec) -> Launched:
        """Start a guest that waits for ``release``, and wait for nothing of it.

        For the process's main thread. Raises StartFailed, HostRefused, EngineUnavailable; then
        nothing is left.
        """
