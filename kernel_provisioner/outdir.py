"""The output directory of a run: absent or empty before, claimed by one run, written atomically.

Only the owner's own files are handled here; what the guest made is published by
``artifacts.publish``. A claim file keeps a second run out until the first one is over.
"""

from __future__ import annotations

import contextlib
import os
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

    def write(self, name: str, data: bytes) -> Path:
        """Write a file so that a reader sees all of it or nothing. Raises OutputRefused."""
        target = self.path / name
        staged = self.path / f".{name[:200]}.partial"
        try:
            with staged.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            staged.replace(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                staged.unlink()
            raise OutputRefused(f"{target} cannot be written ({error.strerror}).") from None
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
    return Path.cwd() / f"out-{stem[:100]}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"


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
