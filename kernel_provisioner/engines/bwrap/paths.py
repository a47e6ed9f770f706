"""Names and removal of the guest's sockets in the session's private directory."""

from __future__ import annotations

import stat
from pathlib import Path

from kernel_provisioner.engines.base import CHANNELS


def channel_paths(socket_dir: Path) -> dict[str, Path]:
    """Return the guest's socket paths by channel."""
    return {name: socket_dir / f"g-{port}" for port, name in enumerate(CHANNELS, start=1)}


def remove_sockets(socket_dir: Path) -> list[str]:
    """Unlink the guest's sockets; return what could not be. Nothing but a socket is touched."""
    left = []
    for path in channel_paths(socket_dir).values():
        try:
            if stat.S_ISSOCK(path.lstat().st_mode):
                path.unlink()
        except FileNotFoundError:
            continue
        except OSError as error:
            left.append(f"socket {path} ({error.strerror})")
    return left
