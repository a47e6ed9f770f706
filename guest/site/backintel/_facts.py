"""The facts of this sandbox as the notebook may rely on them: its limits and its sources.

Memory and CPUs come from the environment that the engine sets from the profile; the sizes of the
mounts are read back from the kernel.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ARTIFACTS = Path("/artifacts")
WORKSPACE = Path("/workspace")
SOURCES = Path("/sources")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of this session; sizes in bytes. ``*_free_bytes`` is as of the call.

    Whatever is written to the mounts counts inside ``memory_bytes`` as well.
    """

    session: str
    profile: str
    memory_bytes: int
    cpus: int
    workspace_bytes: int
    workspace_free_bytes: int
    artifacts_bytes: int
    artifacts_free_bytes: int
    network: bool = False


def capacity(mount: Path) -> tuple[int, int]:
    """Return (size, free) of ``mount`` in bytes. Raises OSError if it is missing."""
    facts = os.statvfs(mount)
    return facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize


def limits() -> Limits:
    """Return the limits of this session.

    Raises RuntimeError outside a sandbox, where the environment does not state them.
    """
    try:
        memory = int(os.environ["BACKINTEL_MEMORY_BYTES"])
        cpus = int(os.environ["BACKINTEL_CPUS"])
    except (KeyError, ValueError):
        raise RuntimeError(
            "this is not a BackIntel sandbox: BACKINTEL_MEMORY_BYTES and BACKINTEL_CPUS are not "
            "set. Choose the kernel 'BackIntel sandbox' or use `backintel run`."
        ) from None
    workspace, workspace_free = capacity(WORKSPACE)
    artifacts, artifacts_free = capacity(ARTIFACTS)
    return Limits(
        session=os.environ.get("BACKINTEL_SESSION", ""),
        profile=os.environ.get("BACKINTEL_PROFILE", ""),
        memory_bytes=memory,
        cpus=cpus,
        workspace_bytes=workspace,
        workspace_free_bytes=workspace_free,
        artifacts_bytes=artifacts,
        artifacts_free_bytes=artifacts_free,
    )


def sources() -> dict[str, Path]:
    """Return the read-only sources by name; each path is a directory or a single file."""
    if not SOURCES.is_dir():
        return {}
    return {path.name: path for path in sorted(SOURCES.iterdir())}
