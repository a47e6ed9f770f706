"""Write-ahead records and the sweep: only what is provably ours is touched."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kernel_provisioner import outdir
from kernel_provisioner.artifacts.publish import STAGING_PREFIX
from kernel_provisioner.engines.base import Leftovers, ProcessIdentity
from kernel_provisioner.errors import OutputRefused, StartFailed
from kernel_provisioner.paths import StateDirs
from kernel_provisioner.processes import boot_id, identify, is_running, kill_and_wait
from kernel_provisioner.records import (
    Record,
    Swept,
    is_live,
    live_sessions,
    open_record,
    read_record,
    sweep,
    write_record,
)


@pytest.fixture
def dirs(tmp_path: Path) -> StateDirs:
    return StateDirs(tmp_path / "data", tmp_path / "state", tmp_path / "run")


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    yield process
    process.kill()
    process.wait()


def record(dirs: StateDirs, supervisor: ProcessIdentity, leftovers: Leftovers) -> Record:
    made = Record(
        session="0123456789abcdef",
        kernel_id="k",
        engine="bwrap",
        profile="analysis",
        boot=boot_id(),
        supervisor=supervisor,
        socket_dir=dirs.runtime / ("0" * 15 + "5"),
        created=time.time(),
        leftovers=leftovers,
    )
    write_record(dirs, made)
    return made


GONE = ProcessIdentity(os.getpid(), 1)  # right number, wrong start time


def test_a_record_survives_the_file(dirs: StateDirs) -> None:
    made = record(dirs, GONE, Leftovers((GONE,), (Path("/sys/fs/cgroup/x"),), (Path("/y"),)))
    made = replace(made, export_dir=Path("/e"), run_dir=Path("/r"))
    write_record(dirs, made)
    assert read_record(dirs.sessions / f"{made.session}.json") == made


def test_a_pid_with_another_start_time_is_not_the_process() -> None:
    me = identify(os.getpid())
    assert me is not None and is_running(me)
    assert not is_running(GONE)
    assert kill_and_wait(GONE, 1.0), "a stranger with the same number counts as gone"


def test_a_zombie_counts_as_gone() -> None:
    """SmolVM#189: a zombie still answers kill(pid, 0)."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    identity = ProcessIdentity(process.pid, 0)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert identify(process.pid) is None
    assert not is_running(identity)
    process.wait()


def test_sweep_frees_the_directory_of_a_killed_run(dirs: StateDirs, tmp_path: Path) -> None:
    made = replace(record(dirs, GONE, Leftovers()), run_dir=tmp_path / "out")
    # As a killed run leaves it: with no lock.
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".backintel-run").touch()
    write_record(dirs, made)
    assert sweep(dirs) == Swept([f"session {made.session}: removed what its supervisor left"])
    assert list((tmp_path / "out").iterdir()) == []


def test_sweep_leaves_the_directory_of_a_run_that_lives_alone(
    dirs: StateDirs, tmp_path: Path
) -> None:
    claimed = outdir.claim(tmp_path / "out")
    write_record(dirs, replace(record(dirs, GONE, Leftovers()), run_dir=claimed.path))
    sweep(dirs)
    with pytest.raises(OutputRefused, match="another run uses"):
        outdir.claim(claimed.path)
    claimed.release()


def test_sweep_leaves_a_live_session_alone(
    dirs: StateDirs, sleeper: subprocess.Popen[bytes]
) -> None:
    me, child = identify(os.getpid()), identify(sleeper.pid)
    assert me and child
    made = record(dirs, me, Leftovers((child,)))
    assert is_live(made)
    assert sweep(dirs) == Swept()
    assert live_sessions(dirs) == [made]
    assert is_running(child)


def test_sweep_kills_by_identity_removes_sockets_and_leaves_a_receipt(
    dirs: StateDirs, sleeper: subprocess.Popen[bytes]
) -> None:
    child = identify(sleeper.pid)
    assert child
    staging = dirs.state / "staging" / "0123456789abcdef"
    staging.mkdir(parents=True)
    made = record(dirs, GONE, Leftovers((child,), (), (staging,)))
    made.socket_dir.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(made.socket_dir / "h-1"))
    lines = sweep(dirs).done
    assert lines == [f"session {made.session}: removed what its supervisor left"]
    assert not is_running(child)
    assert not made.socket_dir.exists() and not staging.exists()
    receipt = json.loads((dirs.receipts / f"{made.session}.json").read_text())
    assert receipt["ended"]["reason"] == "GuestLost"
    assert sweep(dirs) == Swept()


def test_sweep_removes_the_directories_of_a_microvm(dirs: StateDirs) -> None:
    made = record(dirs, GONE, Leftovers())
    name = made.session
    places = (dirs.machines / name, made.socket_dir / name)
    for place in places:
        (place / "vms").mkdir(parents=True)
        (place / "vms" / "disk.raw").write_bytes(b"x")
    strangers = (dirs.engines / name, dirs.runtime / "another" / name)
    for place in strangers:
        place.mkdir(parents=True)
    write_record(dirs, replace(made, leftovers=Leftovers(directories=(*places, *strangers))))
    lines = sweep(dirs).left
    assert [place.exists() for place in (*places, *strangers)] == [False, False, True, True]
    assert sum("is not a place of ours" in line for line in lines) == 2


def test_sweep_spares_a_stranger_that_has_a_recorded_number(
    dirs: StateDirs, sleeper: subprocess.Popen[bytes]
) -> None:
    record(dirs, GONE, Leftovers((ProcessIdentity(sleeper.pid, 5),)))
    sweep(dirs)
    assert sleeper.poll() is None


@pytest.mark.parametrize("path", ["/sys/fs/cgroup/memory/other", "/etc/0123456789abcdef"])
def test_sweep_refuses_a_cgroup_that_is_not_the_sessions(dirs: StateDirs, path: str) -> None:
    made = record(dirs, GONE, Leftovers(cgroups=(Path(path),)))
    assert "left alone" in sweep(dirs).left[0]
    assert (dirs.sessions / f"{made.session}.json").exists(), "its identity is kept"


def test_sweep_refuses_a_directory_that_is_not_the_sessions(
    dirs: StateDirs, tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    record(dirs, GONE, Leftovers(directories=(precious,)))
    assert "left alone" in sweep(dirs).left[0]
    assert precious.exists()


def test_a_socket_dir_of_a_live_session_is_kept(dirs: StateDirs) -> None:
    made = record(dirs, GONE, Leftovers())
    made.socket_dir.mkdir(parents=True)
    me = identify(os.getpid())
    assert me
    again = Record(
        session="fedcba9876543210",
        kernel_id="k",
        engine="bwrap",
        profile="analysis",
        boot=boot_id(),
        supervisor=me,
        socket_dir=made.socket_dir,
        created=0.0,
    )
    write_record(dirs, again)
    sweep(dirs)
    assert made.socket_dir.exists()


def test_a_record_of_another_boot_kills_nothing(
    dirs: StateDirs, sleeper: subprocess.Popen[bytes]
) -> None:
    child = identify(sleeper.pid)
    assert child
    made = record(dirs, GONE, Leftovers((child,)))
    path = dirs.sessions / f"{made.session}.json"
    path.write_text(path.read_text().replace(made.boot, "another-boot"))
    sweep(dirs)
    assert is_running(child)
    assert not path.exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"schema": "other"}',
        "[" * 60000,
        '{"schema":"backintel.session/1","session":"0123456789abcdef","kernel_id":"","engine":"",'
        '"profile":"","boot":"","supervisor":[100000000000000000000,1],"socket_dir":"/x",'
        '"created":0,"processes":[],"cgroups":[],"directories":[]}',
    ],
)
def test_a_file_that_is_no_record_is_named_and_left_alone(dirs: StateDirs, text: str) -> None:
    dirs.sessions.mkdir(parents=True)
    path = dirs.sessions / "0123456789abcdef.json"
    path.write_text(text)
    assert sweep(dirs) == Swept(left=[f"{path} is no session record; left alone"])
    assert path.exists()
    assert live_sessions(dirs) == []


def test_a_fifo_in_place_of_a_record_does_not_hang_the_sweep(dirs: StateDirs) -> None:
    dirs.sessions.mkdir(parents=True)
    os.mkfifo(dirs.sessions / "0123456789abcdef.json")
    assert "is no session record" in sweep(dirs).left[0]


@pytest.mark.parametrize("inside_runtime", [True, False])
def test_a_record_cannot_make_a_sweep_delete_files(
    dirs: StateDirs, tmp_path: Path, inside_runtime: bool
) -> None:
    made = record(dirs, GONE, Leftovers())
    victim = made.socket_dir if inside_runtime else tmp_path / "victim"
    victim.mkdir(parents=True)
    (victim / "thesis.txt").write_text("x")
    write_record(dirs, replace(made, socket_dir=victim))
    assert sweep(dirs).left
    assert (victim / "thesis.txt").exists()


def test_sweep_removes_what_a_killed_writer_was_about_to_rename(dirs: StateDirs) -> None:
    me = identify(os.getpid())
    assert me is not None
    kept, left = [], []
    for directory in (dirs.sessions, dirs.receipts):
        directory.mkdir(parents=True)
        left.append(directory / f".0123456789abcdef.json.{me.pid}-1")
        # This process might just be writing it.
        kept.append(directory / f".0123456789abcdef.json.{me.pid}-{me.start_time}")
        kept.append(directory / ".somebodys.json")
    for path in (*kept, *left):
        path.touch()
    assert sweep(dirs) == Swept()
    assert [path for path in left if path.exists()] == []
    assert [path for path in kept if not path.exists()] == []


def test_sweep_removes_the_staging_of_a_killed_publication(dirs: StateDirs, tmp_path: Path) -> None:
    name = f"{STAGING_PREFIX}{'0' * 32}"
    staging = tmp_path / "out" / name
    staging.mkdir(mode=0o700, parents=True)
    (staging / "staging.json").write_text(json.dumps({"v": 1, "staging": name}))
    (tmp_path / "out" / "precious").touch()
    made = record(dirs, GONE, Leftovers())
    write_record(dirs, replace(made, export_dir=tmp_path / "out"))
    assert sweep(dirs) == Swept([f"session {made.session}: removed what its supervisor left"])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["precious"]


def test_a_lock_that_nobody_gives_back_fails_a_start_and_is_reported_by_a_sweep(
    dirs: StateDirs,
) -> None:
    made = record(dirs, GONE, Leftovers())
    holder = os.open(dirs.sessions, os.O_RDONLY)
    try:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(StartFailed, match="locked"):
            open_record(dirs, made)
        (line,) = sweep(dirs).left
        assert "locked" in line
        assert (dirs.sessions / f"{made.session}.json").exists(), "it is tried again"
    finally:
        os.close(holder)
    assert sweep(dirs) == Swept([f"session {made.session}: removed what its supervisor left"])
    open_record(dirs, made)
