"""Names of the guest's sockets in the session's directory."""

from __future__ import annotations

from pathlib import Path

from kernel_provisioner.engines.base import CHANNELS


def channel_paths(socket_dir: Path) -> dict[str, Path]:
    """Return the guest's socket paths by channel."""
    return {name: socket_dir / f"g-{port}" for port, name in enumerate(CHANNELS, start=1)}
