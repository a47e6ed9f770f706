"""Where the product keeps its files (spec C7). Environment variables move files, never checks.

Standard library only. Directories are made on use, by their owner, with the modes stated here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kernel_provisioner.errors import ConfigError, HostRefused


@dataclass(frozen=True, slots=True)
class StateDirs:
    """Roots of the product's state: prepared files, session records, and run-time sockets."""

    data: Path
    state: Path
    runtime: Path

    @property
    def image(self) -> Path:
        """Prepared analysis images and their receipts."""
        return self.data / "image"

    @property
    def engines(self) -> Path:
        """Prepared engines and their receipts."""
        return self.data / "engines"

    @property
    def machines(self) -> Path:
        """State of running microVMs, one directory per session."""
        return self.engines / "smolvm" / "sessions"

    @property
    def prepare_lock(self) -> Path:
        """The file lock that preparation and staging hold."""
        return self.data / "prepare.lock"

    @property
    def sessions(self) -> Path:
        """Write-ahead records, one file per live session."""
        return self.state / "sessions"

    @property
    def receipts(self) -> Path:
        """Receipts of ended sessions."""
        return self.state / "receipts"

    @property
    def proofs(self) -> Path:
        """Boot proofs, one file per engine."""
        return self.state / "proofs"


def state_dirs(environ: Mapping[str, str] | None = None) -> StateDirs:
    """Return the roots for this user: ``/var/lib/backintel`` as root, XDG directories otherwise.

    ``BACKINTEL_HOME`` (an absolute path) moves data and state together. Raises ConfigError for a
    relative one.
    """
    env = os.environ if environ is None else environ
    uid = os.geteuid()
    runtime = Path(f"/tmp/backintel-{uid}")  # noqa: S108 - 0700, checked by private_dir()
    moved = env.get("BACKINTEL_HOME", "")
    if moved:
        home = Path(moved)
        if not home.is_absolute():
            raise ConfigError(
                f"BACKINTEL_HOME is {moved!r}, not an absolute path.",
                remedy="give the full path of a directory.",
            )
        return StateDirs(home, home, runtime)
    if uid == 0:
        root = Path("/var/lib/backintel")
        return StateDirs(root, root, runtime)
    data = env.get("XDG_DATA_HOME") or str(Path.home() / ".local/share")
    state = env.get("XDG_STATE_HOME") or str(Path.home() / ".local/state")
    return StateDirs(Path(data) / "backintel", Path(state) / "backintel", runtime)


def private_dir(path: Path) -> Path:
    """Make ``path`` (0700) or check that it is ours alone.

    Raises HostRefused if it is a link, another user's, or open to others: in a shared ``/tmp``
    somebody else may have made it first.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        pass  # a file or a link: told below
    except OSError as error:
        raise HostRefused(
            f"{path} cannot be made ({error.strerror}).",
            remedy=f"let this user write to {path.parent}.",
        ) from None
    info = path.lstat()
    if (
        not stat.S_ISDIR(info.st_mode)
        or info.st_uid != os.geteuid()
        or stat.S_IMODE(info.st_mode) & 0o077
    ):
        raise HostRefused(
            f"{path} is not a directory that only this user can open.",
            remedy=f"remove {path} or give it to this user with mode 0700.",
        )
    return path


def guest_code_dir() -> Path:
    """Return the guest's code: inside the installed package, else in the checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "_guest"
    return installed if installed.is_dir() else package.parent / "guest"
