"""What the sandbox prints outside Jupyter's channels: kept bounded, quoted when a start fails.

The text is hostile once user code runs: only the last 64 KiB are kept, and it is read at a bounded
rate, so that a flood blocks its writer and not the host.
"""

from __future__ import annotations

import asyncio
import os

from kernel_provisioner.errors import HostRefused, StartFailed
from kernel_provisioner.plaintext import quoted

KEPT = 65536
_PAUSE_S = 0.05
_QUOTED = 1500

_KNOWN = (
    (
        ("setting up uid map: Permission denied", "Failed RTM_NEWADDR"),
        "this host restricts user namespaces (AppArmor, as Ubuntu does since 23.10).",
        "let the administrator load an AppArmor profile with `userns,` for the bwrap program that "
        "`backintel sandbox check` names.",
    ),
    (
        ("No permissions to creat", "Creating new namespace failed", "No space left on device"),
        "this host does not let this user make namespaces.",
        "let the administrator allow unprivileged user namespaces (user.max_user_namespaces, "
        "kernel.unprivileged_userns_clone; in a container, its seccomp profile).",
    ),
    (
        ("Can't mount proc",),
        "this host refuses a fresh /proc to the sandbox, and the host's own is never used.",
        "in a container, run it with an unmasked /proc (systempaths=unconfined).",
    ),
)


class OutputTail:
    """Reads a pipe on the running event loop and keeps the last 64 KiB. Owns the descriptor."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd: int | None = fd
        self._kept = bytearray()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(fd, self._take)

    def _take(self) -> None:
        if self._fd is None:
            return
        self._loop.remove_reader(self._fd)
        if self._read():
            # At most one buffer per pause: 1.3 MB/s, whatever the guest writes.
            self._timer = self._loop.call_later(_PAUSE_S, self._watch)

    def _watch(self) -> None:
        if self._fd is not None:
            self._loop.add_reader(self._fd, self._take)

    def _read(self) -> bool:
        """Read once; False at end of file or if there is nothing."""
        if self._fd is None:
            return False
        try:
            data = os.read(self._fd, KEPT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._kept += data
        del self._kept[:-KEPT]
        return bool(data)

    def drain(self) -> None:
        """Read what is there now; for a guest that is dead."""
        if self._fd is not None:
            before = -1
            while self._read() and len(self._kept) != before:
                before = len(self._kept)

    def text(self) -> str:
        """Return what was kept, decoded with replacement."""
        return self._kept.decode(errors="replace")

    def close(self) -> None:
        """Stop reading and close the pipe; idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None


def explain(printed: str, how: str, phase: str) -> StartFailed:
    """Return the error of a failed start: a known cause with its remedy, else what was printed."""
    tail = quoted(printed.strip(), _QUOTED)
    for signs, cause, remedy in _KNOWN:
        if any(sign in printed for sign in signs):
            return StartFailed(f"{cause} bwrap said: {tail}", remedy=remedy, phase=phase)
    said = f" It printed: {tail}" if tail else ""
    return StartFailed(f"the guest did not come up: {how}.{said}", phase=phase)


def refused_by(message: str, phase: str) -> HostRefused | StartFailed:
    """Return the error for a step that the launcher could not do."""
    message = quoted(message, _QUOTED)
    if phase in ("stage", "drop privileges"):
        return HostRefused(
            f"as root, the launcher failed: {message}.",
            remedy="run with the capabilities SYS_ADMIN, SETUID, SETGID and SETPCAP, or as an "
            "ordinary user.",
            phase=phase,
        )
    return StartFailed(f"the launcher failed: {message}.", phase=phase)
