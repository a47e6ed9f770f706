"""The provisioner's request for a session, parsed in the supervisor.

It comes over the control socket from the Jupyter server's process, which is trusted; it is checked
for its shape only, so that a mistake is told and not a traceback.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_provisioner.engines.base import GuestEndpoint
from kernel_provisioner.errors import Reason, StartFailed
from kernel_provisioner.paths import StateDirs
from kernel_provisioner.profiles import Profile


@dataclass(frozen=True, slots=True)
class Start:
    """The provisioner's request, parsed. Times are CLOCK_MONOTONIC seconds."""

    session: str
    kernel_id: str
    previous: str | None
    replaced: Reason | None
    """Why the guest ended that this one replaces without anybody having asked for it."""
    engine: str
    engine_requested: str
    profile: Profile
    sources: tuple[Mapping[str, str], ...]
    endpoints: tuple[GuestEndpoint, ...]
    environment: Mapping[str, str]
    key: str
    signature_scheme: str
    socket_dir: Path
    dirs: StateDirs
    started_at: float
    run_dir: Path | None
    """The directory that the owner claimed, where a run owns the session."""

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> Start:
        """Raises StartFailed when a field is missing or of the wrong type."""
        try:
            return cls(
                session=str(message["session"]),
                kernel_id=str(message["kernel_id"]),
                previous=message["previous"],
                replaced=None if message["replaced"] is None else Reason(message["replaced"]),
                engine=str(message["engine"]),
                engine_requested=str(message["engine_requested"]),
                profile=Profile(**message["profile"]),
                sources=tuple(message["sources"]),
                endpoints=tuple(_endpoint(entry) for entry in message["endpoints"]),
                environment=dict(message["environment"]),
                key=str(message["key"]),
                signature_scheme=str(message["signature_scheme"]),
                socket_dir=Path(message["socket_dir"]),
                dirs=StateDirs(*(Path(message["dirs"][n]) for n in ("data", "state", "runtime"))),
                started_at=float(message["started_at"]),
                run_dir=None if message["run_dir"] is None else Path(message["run_dir"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StartFailed(f"the start request is malformed ({error}).") from None


def _endpoint(entry: Mapping[str, Any]) -> GuestEndpoint:
    name, host, address = (str(entry[key]) for key in ("name", "host", "address"))
    return GuestEndpoint(name, host, address, int(entry["port"]))
