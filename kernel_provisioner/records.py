"""Write-ahead records of sessions (spec C7, I): what to remove if a supervisor is killed.

A record is written before anything that it names exists. "Ours" means: named by a record of this
state directory, of this boot, and for processes of the recorded start time. ``sweep`` trusts the
records only so far: processes are killed by identity, cgroups and directories only if they carry
the session's name. Cleanup is idempotent; what could not be removed keeps its record. Sweeps run
at any time, several at once and beside starting sessions, hence the lock around socket directories.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_provisioner.engines.base import Leftovers, ProcessIdentity
from kernel_provisioner.engines.leftovers import remove_leftovers
from kernel_provisioner.errors import ENDS, Reason, StartFailed
from kernel_provisioner.paths import StateDirs
from kernel_provisioner.processes import boot_id, identify, is_running

SCHEMA = "backintel.session/1"
_MAX_RECORD = 1 << 20
_MAX_PID = 1 << 22
"""The kernel's own upper bound of pid_max."""
_LOCK_TIMEOUT_S = 2.0
_SOCKET_DIR = re.compile(r"[0-9a-f]{16}")
# What write_json writes before the rename; the identity is its writer's.
_STAGED = re.compile(r"\.[0-9A-Za-z._-]+\.json\.(?P<pid>[0-9]+)-(?P<start>[0-9]+)")


@dataclass(frozen=True, slots=True)
class Record:
    """One session's record. ``created`` is wall time in seconds, for people only."""

    session: str
    kernel_id: str
    engine: str
    profile: str
    boot: str
    supervisor: ProcessIdentity
    socket_dir: Path
    created: float
    leftovers: Leftovers = field(default_factory=Leftovers)
    export_dir: Path | None = None
    """Where artifacts are being published: a killed publication leaves its staging there."""
    run_dir: Path | None = None
    """The output directory of the run that owns the session: killed, it leaves its claim there."""


def write_record(dirs: StateDirs, record: Record) -> None:
    """Write or replace a record atomically. Raises OSError."""
    dirs.sessions.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = {
        "schema": SCHEMA,
        "session": record.session,
        "kernel_id": record.kernel_id,
        "engine": record.engine,
        "profile": record.profile,
        "boot": record.boot,
        "supervisor": [record.supervisor.pid, record.supervisor.start_time],
        "socket_dir": str(record.socket_dir),
        "created": record.created,
        "processes": [[p.pid, p.start_time] for p in record.leftovers.processes],
        "cgroups": [str(path) for path in record.leftovers.cgroups],
        "directories": [str(path) for path in record.leftovers.directories],
        "export_dir": str(record.export_dir) if record.export_dir else None,
        "run_dir": str(record.run_dir) if record.run_dir else None,
    }
    write_json(dirs.sessions / f"{record.session}.json", data)


def write_json(path: Path, data: object) -> None:
    """Write a 0600 JSON file so that a reader sees the old or the new one. Raises OSError."""
    me = identify(os.getpid())
    assert me is not None  # this process runs
    staged = path.with_name(f".{path.name}.{me.pid}-{me.start_time}")
    with contextlib.suppress(FileNotFoundError):
        staged.unlink()
    fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(data, file, indent=1)
            file.write("\n")
        staged.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            staged.unlink()
        raise


def read_record(path: Path) -> Record | None:
    """Parse a record; None if it vanished or is not one of ours."""
    try:
        # Never waits for a writer, should somebody have put a FIFO here.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            text = file.read(_MAX_RECORD + 1)
        data = json.loads(text)
        if len(text) > _MAX_RECORD or data["schema"] != SCHEMA or data["session"] != path.stem:
            return None
        return Record(
            session=data["session"],
            kernel_id=str(data["kernel_id"]),
            engine=str(data["engine"]),
            profile=str(data["profile"]),
            boot=str(data["boot"]),
            supervisor=_identity(data["supervisor"]),
            socket_dir=Path(data["socket_dir"]),
            created=float(data["created"]),
            leftovers=Leftovers(
                tuple(map(_identity, data["processes"])),
                tuple(map(Path, data["cgroups"])),
                tuple(map(Path, data["directories"])),
            ),
            export_dir=Path(data["export_dir"]) if data.get("export_dir") else None,
            run_dir=Path(data["run_dir"]) if data.get("run_dir") else None,
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _identity(data: list[Any]) -> ProcessIdentity:
    """Raise ValueError for numbers that no process has."""
    pid, started = data
    if not (isinstance(pid, int) and isinstance(started, int)) or not 0 < pid <= _MAX_PID:
        raise ValueError
    return ProcessIdentity(pid, started)


def open_record(dirs: StateDirs, record: Record) -> None:
    """Write a session's first record, before anything of it exists. Raises OSError, StartFailed.

    From here on no sweep touches its socket directory, which after a restart is also that of a
    session that may just be swept.
    """
    dirs.sessions.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _socket_dirs_locked(dirs):
        write_record(dirs, record)


@contextlib.contextmanager
def _socket_dirs_locked(dirs: StateDirs) -> Iterator[None]:
    """Hold the lock that orders first records and removals; it is held for milliseconds.

    Raises StartFailed if somebody holds it for two seconds (a process stopped in the middle).
    """
    fd = os.open(dirs.sessions, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise StartFailed(
                        f"{dirs.sessions} stays locked by another process.",
                        remedy="look for a stopped backintel process and end it.",
                    ) from None
                time.sleep(0.002)
        yield
    finally:
        os.close(fd)


def _paths(dirs: StateDirs) -> list[Path]:
    return [path for path in sorted(dirs.sessions.glob("*.json")) if path.name[0] != "."]


def _records(dirs: StateDirs) -> Iterator[Record]:
    for path in _paths(dirs):
        if record := read_record(path):
            yield record


def is_live(record: Record) -> bool:
    """Whether the session's supervisor still runs, in this boot."""
    return record.boot == boot_id() and is_running(record.supervisor)


def live_sessions(dirs: StateDirs) -> list[Record]:
    """Return the records of sessions whose supervisor runs."""
    return [record for record in _records(dirs) if is_live(record)]


def remove_record(dirs: StateDirs, session: str) -> None:
    """Forget a session: everything that its record names is gone."""
    with contextlib.suppress(FileNotFoundError):
        (dirs.sessions / f"{session}.json").unlink()


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did: a line for each session that is gone, and for each thing that is not."""

    done: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def sweep(dirs: StateDirs) -> Swept:
    """Remove what dead sessions left; tell what was removed, and what was not and why.

    Touches nothing of a live session. Safe to run at any time and by several processes at once.
    Never raises: what fails is reported, and tried again by the next sweep.
    """
    swept = Swept()
    for path in _paths(dirs):
        record = read_record(path)
        if record is None:
            if path.is_symlink() or path.exists():
                swept.left.append(f"{path} is no session record; left alone")
            continue
        if is_live(record):
            continue
        try:
            failures = _clean(dirs, record)
            if not failures:
                _leave_receipt(dirs, record)
                remove_record(dirs, record.session)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            failures = [f"{where}{error.strerror or error}"]
        if failures:
            swept.left.extend(f"session {record.session}: {failure}" for failure in failures)
        else:
            swept.done.append(f"session {record.session}: removed what its supervisor left")
    swept.left.extend(_remove_staged(dirs.sessions) + _remove_staged(dirs.receipts))
    return swept


def _clean(dirs: StateDirs, record: Record) -> list[str]:
    leftovers = record.leftovers
    if record.boot != boot_id():
        # Numbers and cgroups of another boot mean nothing now.
        leftovers = Leftovers(directories=leftovers.directories)
    place = record.socket_dir
    is_ours = place.parent == dirs.runtime and _SOCKET_DIR.fullmatch(place.name) is not None
    homes = {dirs.state / "staging", dirs.machines, *([place] if is_ours else [])}
    strange = [path for path in leftovers.directories if path.parent not in homes]
    failures = [f"{path} is not a place of ours; left alone" for path in strange]
    ours = tuple(path for path in leftovers.directories if path.parent in homes)
    leftovers = Leftovers(leftovers.processes, leftovers.cgroups, ours)
    failures += remove_leftovers(leftovers, record.session)
    if record.export_dir is not None:
        from kernel_provisioner.artifacts.publish import remove_abandoned

        failures += remove_abandoned(record.export_dir)
    if record.run_dir is not None:
        from kernel_provisioner import outdir

        failures += outdir.remove_abandoned(record.run_dir)
    if not is_ours:
        return [*failures, f"{place} is not a place of ours; left alone"]
    try:
        with _socket_dirs_locked(dirs):
            if record.socket_dir not in {live.socket_dir for live in live_sessions(dirs)}:
                failures += remove_socket_dir(place)
    except StartFailed as error:
        failures.append(error.message)
    return failures


def _remove_staged(directory: Path) -> list[str]:
    """Remove files that a killed process was about to rename; return what could not be."""
    failures = []
    for path in directory.glob(".*"):
        found = _STAGED.fullmatch(path.name)
        if found is None or is_running(ProcessIdentity(int(found["pid"]), int(found["start"]))):
            continue
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            failures.append(f"{path} could not be removed ({error.strerror})")
    return failures


def remove_socket_dir(path: Path) -> list[str]:
    """Remove a session's socket directory: only sockets and the directory itself."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{path} could not be opened ({error.strerror})"]
    try:
        for name in os.listdir(fd):
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=fd)
        path.rmdir()
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{path} could not be removed ({error.strerror})"]
    finally:
        os.close(fd)
    return []


def _leave_receipt(dirs: StateDirs, record: Record) -> None:
    """Give a session whose supervisor was killed a receipt that says so, if it has none."""
    target = dirs.receipts / f"{record.session}.json"
    if target.exists():
        return
    how = "its supervisor was killed"
    end = ENDS[Reason.GUEST_LOST]
    dirs.receipts.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_json(
        target,
        {
            "schema": "backintel.receipt/1",
            "session": record.session,
            "kernel_id": record.kernel_id,
            "backend": record.engine,
            "profile": record.profile,
            "created": record.created,
            "ended": {
                "reason": Reason.GUEST_LOST.value,
                "class": end.kind,
                "message": end.text.format(how=how),
            },
            "artifacts": [],
        },
    )
