"""The output directory of a run: absent or empty before, claimed by one run, written atomically.

Only the owner's own files are handled here; what the guest made is published by
``artifacts.publish``. A claim file, locked for as long as the run lives, keeps a second run out. A
killed run leaves the file but not the lock: its session's end or a sweep, or the next run there,
removes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from kernel_provisioner.errors import OutputRefused
from kernel_provisioner.locks import is_entry, try_lock

STAGED = ".unchecked"
"""Where a run has artifacts published before it has checked that they are what is required."""
_CLAIM = ".backintel-run"
_MADE = b"made\n"
"""What the claim file says if the claim made the directory, else nothing."""
_PARTIAL = re.compile(r"\.backintel-[0-9a-f]{16}\.partial")
_REMEDY = "give --out a directory that does not exist yet or is empty."
# What stands in the claim's place is a link, a directory, a socket or a FIFO: no claim.
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ENXIO)
_NO_CLAIM = (*_NO_FILE, errno.ENOENT, errno.ENOTDIR)
# Each further attempt needs another run that came or went in between.
_ATTEMPTS = 8
# O_NONBLOCK: a FIFO in its place must not be waited for.
_CLAIM_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class OutDir:
    """A claimed directory. ``made`` says whether the claim, or the one it replaced, made it."""

    path: Path
    made: bool
    lock: int
    """The claim file. Not inherited: no child of a killed run keeps its directory."""

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
        self.require_claim()
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

    def require_claim(self) -> None:
        """Raise OutputRefused if another run has the directory by now: this one was removed."""
        if self._is_anothers():
            raise OutputRefused(
                f"{str(self.path)!r} was removed while the run went on, and another run uses it.",
                remedy="run again, and let the directory be until the run is over.",
            )

    def discard_staged(self) -> None:
        """Remove artifacts that were not checked to the end."""
        if not self._is_anothers():
            shutil.rmtree(self.path / STAGED, ignore_errors=True)

    def release(self) -> None:
        """Give the claim up; a directory that the claim made and that stayed empty is removed."""
        try:
            with contextlib.suppress(OSError):
                if not self._is_anothers():
                    _forget(self.path, self.made)
        finally:
            os.close(self.lock)

    def _is_anothers(self) -> bool:
        """Whether the claim there is not this one. Without any, nobody else is here."""
        claim = self.path / _CLAIM
        try:
            return os.path.lexists(claim) and not is_entry(claim, self.lock)
        except OSError:
            return True


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
        for _ in range(_ATTEMPTS):
            if not path.is_dir():
                with contextlib.suppress(FileExistsError):
                    path.mkdir(parents=True)
                    made = True
                if not path.is_dir():
                    raise NotADirectoryError
            if claimed := _take(path, made):
                return claimed
    except NotADirectoryError:
        raise OutputRefused(f"{str(path)!r} is not a directory.", remedy=_REMEDY) from None
    except OSError as error:
        if made:
            with contextlib.suppress(OSError):
                path.rmdir()
        raise OutputRefused(
            f"{str(path)!r} cannot be written ({error.strerror or error}).",
            remedy="give --out a directory in which this user can write and where space is free.",
        ) from None
    raise _in_use(path)


def _take(path: Path, made: bool) -> OutDir | None:
    """Claim a directory; None if it was another one meanwhile. Raises OutputRefused, OSError."""
    try:
        names = os.listdir(path)
        if names and _CLAIM not in names:
            raise _not_empty(path, names)
        create = 0 if names else os.O_CREAT | os.O_EXCL
        lock = os.open(path / _CLAIM, _CLAIM_FLAGS | create, 0o600)
    except (FileNotFoundError, FileExistsError):
        return None
    except OSError as error:
        if error.errno in _NO_FILE:
            raise _not_empty(path, [_CLAIM]) from None
        raise
    locked = None
    try:
        if not _is_claim(lock):
            raise _not_empty(path, [_CLAIM])
        locked = try_lock(lock)
        # Where nothing can be locked, only who made the file may know that no other run has it.
        if locked is False or (locked is None and names):
            raise _in_use(path)
        if is_entry(path / _CLAIM, lock):
            made = made or os.pread(lock, len(_MADE), 0) == _MADE
            if names:
                _remove_partial(path)
            if strange := [name for name in os.listdir(path) if name != _CLAIM]:
                (path / _CLAIM).unlink()
                raise _not_empty(path, strange)
            if made:
                os.pwrite(lock, _MADE, 0)
            taken, lock = lock, -1
            return OutDir(path, made, taken)
    except OSError:
        if create and locked is not False:
            with contextlib.suppress(OSError):
                (path / _CLAIM).unlink()
        raise
    finally:
        if lock >= 0:
            os.close(lock)
    return None


def remove_abandoned(path: Path) -> list[str]:
    """Remove what a killed run left besides its results; return what could not be, and why.

    A directory whose claim is locked, cannot be locked or is none of ours is left alone.
    """
    try:
        lock = os.open(path / _CLAIM, _CLAIM_FLAGS)
    except OSError as error:
        if error.errno in _NO_CLAIM:
            return []
        return [f"{path / _CLAIM} could not be opened ({error.strerror})"]
    try:
        if _is_claim(lock) and try_lock(lock) and is_entry(path / _CLAIM, lock):
            made = os.pread(lock, len(_MADE), 0) == _MADE
            _remove_partial(path)
            _forget(path, made)
    except OSError as error:
        return [f"{error.filename or path} could not be removed ({error.strerror or error})"]
    finally:
        os.close(lock)
    return []


def _is_claim(fd: int) -> bool:
    info = os.fstat(fd)
    ours = stat.S_ISREG(info.st_mode) and info.st_uid == os.geteuid()
    return ours and os.pread(fd, len(_MADE) + 1, 0) in (b"", _MADE)


def _remove_partial(path: Path) -> None:
    """Remove what a dead run had not finished. Raises OSError."""
    for name in os.listdir(path):
        kind = (path / name).lstat().st_mode
        if name == STAGED and stat.S_ISDIR(kind):
            shutil.rmtree(path / name)
        elif _PARTIAL.fullmatch(name) and stat.S_ISREG(kind):
            (path / name).unlink()


def _forget(path: Path, made: bool) -> None:
    """Remove the claim, while it is locked, and the directory if it was made for it and is empty.

    Raises OSError if the claim stays.
    """
    (path / _CLAIM).unlink(missing_ok=True)
    if made:
        with contextlib.suppress(OSError):
            path.rmdir()


def _not_empty(path: Path, names: list[str]) -> OutputRefused:
    # Named, for `ls` does not show a hidden one.
    return OutputRefused(f"{str(path)!r} is not empty (it has {min(names)!r}).", remedy=_REMEDY)


def _in_use(path: Path) -> OutputRefused:
    return OutputRefused(
        f"another run uses {str(path)!r}.",
        remedy="give --out another directory, or wait until that run is over.",
    )
