"""A consistent copy of a SQLite source (spec E2), made beside an active writer.

The owner's database is opened read-only; nothing is written beside it and it is not checkpointed.
Its content may be anybody's: only SQLite's own backup touches it, no statement of its schema runs.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from kernel_provisioner.engines.bwrap.linux import open_path
from kernel_provisioner.errors import SourceRefused

_LOCK_WAIT_S = 30.0
"""How long to wait for a moment between two commits, where no deadline is given."""
_LOCK_RETRY_S = 0.002
"""SQLite's own waiting backs off to 100 ms and so never meets the gap of a busy writer."""


class _TooLate(Exception):
    pass


def stage_sqlite(database: Path, copy: Path, *, deadline: float | None = None) -> None:
    """Make ``copy`` a consistent copy of a SQLite database (spec E2).

    It is of one moment, also beside an active writer; the original is opened read-only and never
    checkpointed. The copy gets mode 0444 and rollback journal mode, for a database in WAL mode
    cannot be opened on a read-only mount. ``copy`` must be absent, in a directory that only this
    process writes to; it is absent again after an error. ``deadline`` is in ``time.monotonic()``
    seconds. Raises SourceRefused.
    """
    end = time.monotonic() + _LOCK_WAIT_S if deadline is None else deadline

    reason, remedy = "changed while it was copied", "run again when its writer has started."
    try:
        # A database in WAL mode without a log has no writer. Opened with mode=ro it would get new
        # -wal and -shm files beside it; immutable leaves the directory untouched. Should a writer
        # come meanwhile, its log or the changed file shows it and the copy is made again.
        for _ in range(2):
            before = _quiet(database)
            options = "mode=ro&immutable=1" if before else "mode=ro"
            uri = f"file:{quote(str(database))}?{options}"
            _copy_database(database, uri, copy, end, bounded=deadline is not None)
            if before is None or before == _quiet(database):
                copy.chmod(0o444)
                return
            copy.unlink()
    except _TooLate:
        reason = "could not be copied before the deadline"
        remedy = "stop its writers or allow more time."
    except sqlite3.Error as error:
        reason = f"cannot be copied as a SQLite database ({error})"
        remedy = "open it once with its own program; it may be damaged, locked or half written."
    except FileExistsError:
        # Not ours, so not ours to remove.
        raise SourceRefused(
            f"the database {str(database)!r} cannot be staged: {str(copy)!r} exists.",
            remedy="remove it.",
        ) from None
    except OSError as error:
        reason = f"cannot be staged ({error.strerror})"
        remedy = "check it, and the space in the product's state directory."
    for leftover in (copy, Path(f"{copy}-journal")):
        leftover.unlink(missing_ok=True)
    raise SourceRefused(f"the database {str(database)!r} {reason}.", remedy=remedy)


def _copy_database(database: Path, uri: str, copy: Path, end: float, *, bounded: bool) -> None:
    """Copy by SQLite's backup; ``end`` bounds waiting for locks, and if ``bounded`` copying too."""

    def tick(_status: int, _remaining: int, _total: int) -> None:
        if bounded and time.monotonic() >= end:
            raise _TooLate

    os.close(os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    # SQLite opens by name and follows links: what it has open must be the file that the name is
    # without any, or somebody put a link to another database there since the source was checked.
    path = open_path(database)
    try:
        expected = _inode(path)
    finally:
        os.close(path)
    with (
        closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=0)) as source,
        closing(sqlite3.connect(copy, isolation_level=None)) as target,
    ):
        # A durable copy is not needed: it is deleted with the session.
        target.execute("PRAGMA synchronous=OFF")
        _begin(source, end)
        if expected not in _open_inodes():
            raise sqlite3.OperationalError("it was replaced while it was opened")
        source.backup(target, pages=1024, progress=tick, sleep=0.02)
        target.execute("PRAGMA journal_mode=DELETE").fetchone()


def _open_inodes() -> set[tuple[int, int]]:
    # All of them, for SQLite may reuse a descriptor of an earlier connection.
    return {_inode(int(name)) for name in os.listdir("/proc/self/fd")}


def _inode(fd: int) -> tuple[int, int]:
    try:
        info = os.fstat(fd)
    except OSError:
        return (-1, -1)  # closed since it was listed
    return (info.st_dev, info.st_ino)


def _begin(source: sqlite3.Connection, end: float) -> None:
    """Open a read transaction: it pins one moment, so a writer cannot restart the backup."""
    source.execute("BEGIN")
    while True:
        try:
            source.execute("PRAGMA user_version").fetchone()
        except sqlite3.OperationalError as error:
            # The primary code is the low byte (https://sqlite.org/rescode.html).
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            if time.monotonic() >= end:
                raise _TooLate from None
            time.sleep(_LOCK_RETRY_S)
        else:
            return


def _quiet(database: Path) -> tuple[int, ...] | None:
    """Return a stamp of a WAL-mode database that has no log, or None for any other."""
    with database.open("rb") as file:
        wal_mode = file.read(20)[18:20] == b"\x02\x02"  # SQLite file format, section 1.3.3
        info = os.fstat(file.fileno())
    log = Path(f"{database}-wal")
    if not wal_mode or log.exists():
        return None
    return (info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)
