"""The output directory of a run: absent or empty before, claimed by one run, written atomically.

Only the owner's own files are handled here; what the guest made is published by
``artifacts.publish``. A claim file keeps a second run out until the first one is over.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from kernel_provisioner.errors import OutputRefused

_CLAIM = ".backintel-run"
_REMEDY = "give --out a directory that does not exist yet or is empty."


@dataclass(frozen=True, slots=True)
class OutDir:
    """A claimed directory. ``made`` says whether the claim made it."""

    path: Path
    made: bool

    def require_room_for(self, name: str) -> None:
        """Refuse a name that is too long for this place, before anything runs.

        The file system is asked, for limits differ. Raises OutputRefused.
        """
        try:
            os.lstat(self.path / name)
        except FileNotFoundError:
            return
        except OSError as error:
            raise OutputRefused(
                f"{name!r} cannot be written into {str(self.path)!r} ({error.strerror}).",
                remedy="give the notebook or --out a shorter name.",
            ) from None

    def write(self, name: str, data: bytes) -> Path:
        """Write a file so that a reader sees all of it or nothing. Raises OutputRefused."""
        target = self.path / name
        # Of constant length: with a name as long as is allowed there is no room for more.
        staged = self.path / f".backintel-{secrets.token_hex(8)}.partial"
        try:
            with staged.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            staged.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                staged.unlink()
            raise OutputRefused(
                f"{str(target)!r} cannot be written ({error.strerror}).",
                remedy="free space there, or give --out another place, and run again.",
            ) from None
        return target

    def release(self) -> None:
        """Give the claim up; a directory that the claim made and that stayed empty is removed."""
        with contextlib.suppress(OSError):
            (self.path / _CLAIM).unlink()
        if self.made:
            with contextlib.suppress(OSError):
                self.path.rmdir()


def default_path(stem: str, now: float) -> Path:
    """Return ``out-<notebook name>-<local time>`` in the current directory."""
    # By bytes, for that is what file systems count; a character that is cut in two is dropped.
    short = os.fsencode(stem)[:100].decode(errors="ignore")
    return Path.cwd() / f"out-{short}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"


def claim(path: Path) -> OutDir:
    """Make ``path`` or take it if it is an empty directory, and claim it for this process.

    Raises OutputRefused if it is something else, not empty, not writable, or already claimed.
    """
    path = Path(os.path.abspath(path))
    made = False
    try:
        if not path.is_dir():
            path.mkdir(parents=True)
            made = True
        if os.listdir(path):
            raise OutputRefused(f"{str(path)!r} is not empty.", remedy=_REMEDY)
        os.close(os.open(path / _CLAIM, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW))
    except (FileExistsError, NotADirectoryError):
        raise OutputRefused(
            f"{str(path)!r} is not a directory, or another run uses it.", remedy=_REMEDY
        ) from None
    except OSError as error:
        if made:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise OutputRefused(
            f"{str(path)!r} cannot be written ({error.strerror}).",
            remedy="give --out a directory in which this user can write.",
        ) from None
    return OutDir(path, made)
