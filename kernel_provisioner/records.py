"""Write-ahead records of sessions (spec C7, I): what to remove if a supervisor is killed.

A record is written before anything that it names exists. "Ours" means: named by a record of this
state directory, of this boot, and for processes of the recorded start time. ``sweep`` trusts the
records only so far: processes are killed by identity, cgroups and directories only if they carry
the session's name. Cleanup is idempotent; what could not be removed keeps its record.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from kernel_provisioner.engines.base import Leftovers, ProcessIdentity
from kernel_provisioner.errors import ENDS, Reason
from kernel_provisioner.paths import StateDirs
from kernel_provisioner.processes import boot_id, is_running, kill_and_wait

SCHEMA = "backintel.session/1"
_MAX_RECORD = 1 << 20


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
    }
    write_json(dirs.sessions / f"{record.session}.json", data)


def write_json(path: Path, data: object) -> None:
    """Write a 0600 JSON file so that a reader sees the old or the new one. Raises OSError."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
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
        if path.stat().st_size > _MAX_RECORD:
            return None
        data = json.loads(path.read_text())
        if data["schema"] != SCHEMA or data["session"] != path.stem:
            return None
        return Record(
            session=data["session"],
            kernel_id=str(data["kernel_id"]),
            engine=str(data["engine"]),
            profile=str(data["profile"]),
            boot=str(data["boot"]),
            supervisor=ProcessIdentity(*map(int, data["supervisor"])),
            socket_dir=Path(data["socket_dir"]),
            created=float(data["created"]),
            leftovers=Leftovers(
                tuple(ProcessIdentity(*map(int, item)) for item in data["processes"]),
                tuple(map(Path, data["cgroups"])),
                tuple(map(Path, data["directories"])),
            ),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _records(dirs: StateDirs) -> Iterator[tuple[Path, Record]]:
    for path in sorted(dirs.sessions.glob("*.json")):
        if not path.name.startswith(".") and (record := read_record(path)):
            yield path, record


def is_live(record: Record) -> bool:
    """Whether the session's supervisor still runs, in this boot."""
    return record.boot == boot_id() and is_running(record.supervisor)


def live_sessions(dirs: StateDirs) -> list[Record]:
    """Return the records of sessions whose supervisor runs."""
    return [record for _, record in _records(dirs) if is_live(record)]


def update_leftovers(dirs: StateDirs, record: Record, leftovers: Leftovers) -> Record:
    """Write the record anew with what is now known of the guest."""
    record = replace(record, leftovers=leftovers)
    write_record(dirs, record)
    return record


def remove_record(dirs: StateDirs, session: str) -> None:
    """Forget a session: everything that its record names is gone."""
    with contextlib.suppress(FileNotFoundError):
        (dirs.sessions / f"{session}.json").unlink()


def sweep(dirs: StateDirs) -> list[str]:
    """Remove what dead sessions left; return one line for each session and each failure.

    Touches nothing of a live session. Safe to run at any time and by several processes at once.
    """
    lines: list[str] = []
    in_use = {record.socket_dir for record in live_sessions(dirs)}
    for _, record in _records(dirs):
        if is_live(record):
            continue
        failures = _clean(record, in_use)
        if failures:
            lines += [f"session {record.session}: {failure}" for failure in failures]
            continue
        _leave_receipt(dirs, record)
        remove_record(dirs, record.session)
        lines.append(f"session {record.session}: removed what its supervisor left")
    return lines


def _clean(record: Record, in_use: set[Path]) -> list[str]:
    failures: list[str] = []
    if record.boot == boot_id():
        for process in record.leftovers.processes:
            if not kill_and_wait(process, 2.0):
                failures.append(f"process {process.pid} could not be killed")
        for cgroup in record.leftovers.cgroups:
            failures += remove_cgroup(cgroup, record.session)
    for directory in record.leftovers.directories:
        failures += _remove_directory(directory, record.session)
    if record.socket_dir not in in_use:
        failures += remove_socket_dir(record.socket_dir)
    return failures


def remove_cgroup(cgroup: Path, session: str, *, timeout: float = 2.0) -> list[str]:
    """Kill all in a session's cgroup and remove it; return failures (at most one line)."""
    if session not in cgroup.name or not str(cgroup).startswith("/sys/fs/cgroup/"):
        return [f"{cgroup} does not carry the session's name; left alone"]
    deadline = time.monotonic() + timeout
    while True:
        try:
            cgroup.rmdir()
        except FileNotFoundError:
            return []
        except OSError as error:
            if time.monotonic() > deadline:
                return [f"{cgroup} could not be removed ({error.strerror})"]
            _kill_members(cgroup)
            time.sleep(0.01)
        else:
            return []


def _kill_members(cgroup: Path) -> None:
    """SIGKILL each member; membership is read again while a pidfd pins the process."""
    try:
        members = (cgroup / "cgroup.procs").read_text().split()
    except OSError:
        return
    for member in members:
        with contextlib.suppress(OSError):
            fd = os.pidfd_open(int(member))
            try:
                if member in (cgroup / "cgroup.procs").read_text().split():
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
            finally:
                os.close(fd)


def _remove_directory(directory: Path, session: str) -> list[str]:
    if session not in directory.name:
        return [f"{directory} does not carry the session's name; left alone"]
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{directory} could not be removed ({error.strerror})"]
    return []


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
