"""Publication of artifacts (spec J1): all of them by one rename, or nothing.

Contents are written into a private staging directory beside the destination, through directory
descriptors and without following links, so nothing that the guest names decides where a byte lands.
A crash leaves only the staging directory; a sweep, or the next publication beside it, removes it
once its lock shows that no process is at work in it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kernel_provisioner.artifacts.tarstream import (
    ExportLimits,
    Member,
    StreamReader,
    read_members,
    shown,
)
from kernel_provisioner.errors import ExportRefused, OutputRefused
from kernel_provisioner.locks import is_entry, try_lock

STAGING_PREFIX = ".backintel-export-"
_STAGING_NAME = re.compile(re.escape(STAGING_PREFIX) + r"[0-9a-f]{32}")
_RECORD = "staging.json"
_TREE = "tree"
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Some file systems have no fsync of directories.
_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS}


@dataclass(frozen=True, slots=True)
class Artifact:
    """One published file: ``name`` relative to the destination, ``size`` in bytes, hex digest."""

    name: str
    size: int
    sha256: str

    def as_dict(self) -> dict[str, object]:
        """Return the form that stands in receipts."""
        return {"name": self.name, "size": self.size, "sha256": self.sha256}


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose the published files shall be, where that is not the calling user (needs root)."""

    uid: int
    gid: int


def publish(
    stream: BinaryIO,
    destination: Path,
    limits: ExportLimits,
    owner: Owner | None = None,
    *,
    deadline: float | None = None,
) -> list[Artifact]:
    """Validate ``stream`` and make ``destination`` hold exactly its files; return them by name.

    ``destination`` must be absent or an empty directory, its parent must exist. Files get mode
    0644, directories 0755, and the caller as owner unless ``owner`` says otherwise. ``deadline``
    (``time.monotonic()`` seconds) bounds the reading of the stream, and nothing is published
    after it. The caller closes the stream.

    Raises OutputRefused for a destination that cannot be used (before anything is read) and
    ExportRefused for a bad entry, a broken or stalled stream, or a full disk; in every such case
    nothing is published.
    """
    name = destination.name
    if name in ("", "..") or "\0" in str(destination):
        raise OutputRefused(
            f"{str(destination)!r} names no directory for artifacts.",
            remedy="name a new or empty directory.",
        )
    with _opened_parent(destination.parent) as parent:
        _check_destination(parent, name, destination)
        _sweep(parent)
        with _staging(parent, destination) as (staging_name, staging):
            reader = StreamReader(stream, deadline)
            try:
                artifacts = _fill(staging, reader, limits, owner)
            except OSError as error:
                raise _write_failed(error, destination) from None
            # A caller that gave up at the deadline must not find the artifacts published later.
            reader.check_deadline()
            try:
                os.rename(f"{staging_name}/{_TREE}", name, src_dir_fd=parent, dst_dir_fd=parent)
            except OSError as error:
                raise OutputRefused(
                    f"{str(destination)!r} cannot be replaced by the artifacts "
                    f"({error.strerror}); nothing was published.",
                    remedy="name a new or empty directory.",
                ) from None
        # The artifacts are complete and visible now; what fails from here on is only durability
        # of the name against a power cut.
        with suppress(OSError):
            os.fsync(parent)
    return artifacts


@contextmanager
def _opened_parent(parent: Path) -> Iterator[int]:
    try:
        fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise OutputRefused(
            f"the directory {str(parent)!r} cannot be opened ({error.strerror}).",
            remedy="make it first, or name another output directory.",
        ) from None
    try:
        yield fd
    finally:
        os.close(fd)


def _check_destination(parent: int, name: str, destination: Path) -> None:
    try:
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputRefused(
            f"{str(destination)!r} cannot be used ({error.strerror}).",
            remedy="name a new or empty directory.",
        ) from None
    if not stat.S_ISDIR(info.st_mode):
        raise OutputRefused(
            f"{str(destination)!r} exists and is not a directory.",
            remedy="name a new or empty directory.",
        )
    try:
        fd = os.open(name, _DIR_FLAGS, dir_fd=parent)
        try:
            empty = not os.listdir(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise OutputRefused(
            f"{str(destination)!r} cannot be read ({error.strerror}).",
            remedy="name a new or empty directory.",
        ) from None
    if not empty:
        raise OutputRefused(
            f"{str(destination)!r} is not empty; nothing is ever mixed or overwritten.",
            remedy="name a new or empty directory, or remove what is in it.",
        )


@contextmanager
def _staging(parent: int, destination: Path) -> Iterator[tuple[str, int]]:
    """Make a locked staging directory; it is gone afterwards, whatever happened inside."""
    name, fd = _new_staging(parent, destination)
    try:
        try:
            _write_record(fd, name)
            os.mkdir(_TREE, 0o700, dir_fd=fd)
        except OSError as error:
            raise _write_failed(error, destination) from None
        yield name, fd
    finally:
        # What cannot be removed now is removed by the next sweep: the lock ends with the fd.
        with suppress(OSError):
            shutil.rmtree(name, dir_fd=parent)
        os.close(fd)


def _new_staging(parent: int, destination: Path) -> tuple[str, int]:
    # A sweep may take a directory between mkdir and lock; then another name is used. One sweep
    # touches a name once, so a few attempts are plenty.
    for _ in range(8):
        name = STAGING_PREFIX + secrets.token_hex(16)
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise _write_failed(error, destination) from None
            raise OutputRefused(
                f"the directory {str(destination.parent)!r} cannot be written to "
                f"({error.strerror}).",
                remedy="name an output directory that this user may write to.",
            ) from None
        try:
            fd = os.open(name, _DIR_FLAGS, dir_fd=parent)
        except FileNotFoundError:
            continue
        if try_lock(fd) is not False and is_entry(name, fd, dir_fd=parent):
            return name, fd
        os.close(fd)
    raise ExportRefused(
        f"no staging directory could be kept in {str(destination.parent)!r}; nothing was "
        "published.",
        remedy="run again.",
    )


def _write_record(staging: int, name: str) -> None:
    fd = os.open(_RECORD, _NEW_FILE_FLAGS, 0o600, dir_fd=staging)
    try:
        os.write(fd, json.dumps({"v": 1, "staging": name}).encode())
    finally:
        os.close(fd)


def remove_abandoned(parent: Path) -> list[str]:
    """Remove what killed publications left in a directory; return what could not be, and why."""
    with suppress(OutputRefused), _opened_parent(parent) as fd:
        return [f"{parent / failure}" for failure in _sweep(fd)]
    return []  # the directory is gone, and with it what was in it


def _sweep(parent: int) -> list[str]:
    """Remove staging directories of dead publications: ours by owner, mode, name and record.

    One that is locked, or cannot be locked, or is not provably ours, is left alone. Returns what
    could not be removed.
    """
    failures: list[str] = []
    try:
        names = os.listdir(parent)
    except OSError:
        return failures
    for name in filter(_STAGING_NAME.fullmatch, names):
        with suppress(OSError, ValueError):
            fd = os.open(name, _DIR_FLAGS, dir_fd=parent)
            try:
                info = os.fstat(fd)
                ours = info.st_uid == os.geteuid() and not info.st_mode & 0o077
                if (
                    ours
                    and try_lock(fd)
                    and is_entry(name, fd, dir_fd=parent)
                    and _recorded(fd, name)
                ):
                    try:
                        shutil.rmtree(name, dir_fd=parent)
                    except OSError as error:
                        failures.append(f"{name} could not be removed ({error.strerror})")
            finally:
                os.close(fd)
    return failures


def _recorded(staging: int, name: str) -> bool:
    """Tell whether the record is the staging directory's own; an empty one died before it."""
    if not os.listdir(staging):
        return True
    fd = os.open(
        _RECORD, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=staging
    )
    try:
        record = os.read(fd, 4096)
    finally:
        os.close(fd)
    # A crash or a full disk may have left the record, written first, empty.
    return not record or json.loads(record) == {"v": 1, "staging": name}


def _fill(
    staging: int, reader: StreamReader, limits: ExportLimits, owner: Owner | None
) -> list[Artifact]:
    """Write the accepted entries below ``staging/tree`` and make them durable."""
    tree = os.open(_TREE, _DIR_FLAGS, dir_fd=staging)
    artifacts: list[Artifact] = []
    directories: set[tuple[str, ...]] = {()}
    files: list[tuple[str, ...]] = []
    try:
        for member in read_members(reader, limits):
            folder = member.path if member.kind == "directory" else member.path[:-1]
            _make_directories(tree, folder, directories)
            if member.kind == "file":
                artifacts.append(_write_file(tree, member))
                files.append(member.path)
        _seal(tree, files, directories, owner)
    finally:
        os.close(tree)
    return sorted(artifacts, key=lambda artifact: artifact.name)


def _make_directories(tree: int, folder: tuple[str, ...], known: set[tuple[str, ...]]) -> None:
    for depth in range(1, len(folder) + 1):
        path = folder[:depth]
        if path not in known:
            with _opened(tree, path[:-1]) as fd:
                os.mkdir(path[-1], 0o700, dir_fd=fd)
            known.add(path)


def _write_file(tree: int, member: Member) -> Artifact:
    digest = hashlib.sha256()
    with _opened(tree, member.path[:-1]) as folder:
        fd = os.open(member.path[-1], _NEW_FILE_FLAGS, 0o600, dir_fd=folder)
    with open(fd, "wb", buffering=0) as file:
        for chunk in member.data:
            digest.update(chunk)
            view = memoryview(chunk)
            while view:
                view = view[file.write(view) :]
    return Artifact("/".join(member.path), member.size, digest.hexdigest())


def _seal(
    tree: int,
    files: Sequence[tuple[str, ...]],
    directories: set[tuple[str, ...]],
    owner: Owner | None,
) -> None:
    """Set final modes and owner and flush, deepest first.

    Flushing after all is written lets one journal commit serve many files.
    """
    for path in files:
        with _opened(tree, path[:-1]) as folder:
            fd = os.open(path[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            _finish(fd, 0o644, owner)
            os.fsync(fd)
        finally:
            os.close(fd)
    for path in sorted(directories, key=len, reverse=True):
        with _opened(tree, path) as fd:
            _finish(fd, 0o755, owner)
            try:
                os.fsync(fd)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise


def _finish(fd: int, mode: int, owner: Owner | None) -> None:
    if owner is not None:
        os.fchown(fd, owner.uid, owner.gid)
    os.fchmod(fd, mode)


@contextmanager
def _opened(tree: int, path: tuple[str, ...]) -> Iterator[int]:
    """Open a directory below ``tree`` component by component, no link followed."""
    fd = os.dup(tree)
    try:
        for part in path:
            below = os.open(part, _DIR_FLAGS, dir_fd=fd)
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def _write_failed(error: OSError, destination: Path) -> ExportRefused:
    if error.errno in _NO_SPACE:
        return ExportRefused(
            f"no space is left for the artifacts in {str(destination.parent)!r} "
            f"({error.strerror}); nothing was published.",
            remedy="free some space or name an output directory elsewhere.",
        )
    about = f" of {shown(os.fspath(error.filename))}" if isinstance(error.filename, str) else ""
    return ExportRefused(
        f"writing{about} into {str(destination.parent)!r} failed ({error.strerror}); nothing was "
        "published.",
        remedy="check the output directory's file system.",
    )
