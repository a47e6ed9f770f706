"""Preparing the real release: one of two makes it, and a killed preparation leaves nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernel_provisioner.engines.smolvm.release import (
    AGENT_ROOT,
    PACKAGE,
    TEMPLATES,
    find_package,
    load_prepared,
    receipt_path,
)
from kernel_provisioner.paths import StateDirs

UID = 64017
"""A uid that owns nothing on any machine."""
LONGEST_S = 600
"""Half a minute on two idle processors; the bound is only against a test that never ends."""
pytestmark = pytest.mark.timeout(2 * LONGEST_S)

# Waiting for another preparation may take longer here than people are made to wait.
_PREPARE = f"""
import sys
from pathlib import Path
from kernel_provisioner.engines.smolvm import prepare
from kernel_provisioner.paths import StateDirs
prepare._LOCK_S = {LONGEST_S}
home = Path(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
prepare.prepare(StateDirs(home, home, home / "run"), lambda said: print(said, flush=True))
"""


def preparation(home: Path) -> subprocess.Popen[str]:
    """Start a process that prepares the engine in ``home`` as soon as it gets a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PREPARE, str(home)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@dataclass(frozen=True)
class Prepared:
    """What was in the engine's directory after a kill, and after two preparations at once."""

    dirs: StateDirs
    left_by_kill: list[str]
    statuses: list[int]
    said: list[str]


def expanding(engines: Path) -> bool:
    """Whether a file is being expanded below a tree that changes meanwhile: os.walk goes on where
    a directory was renamed away, Path.rglob raises.
    """
    return any(name.endswith(".partial") for _, _, names in os.walk(engines) for name in names)


def kill_one(home: Path) -> None:
    """SIGKILL a preparation while the program expands what it boots."""
    process = preparation(home)
    with process:
        try:
            go(process)
            assert process.stdout is not None
            said = [process.stdout.readline() for _ in range(2)]
            assert said[1].startswith("expanding"), said
            deadline = time.monotonic() + LONGEST_S
            while not expanding(home / "engines"):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.005)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    home = tmp_path_factory.mktemp("home")
    engines = home / "engines" / "smolvm"
    kill_one(home)
    left = sorted(path.name for path in engines.iterdir())
    both = [preparation(home) for _ in range(2)]
    try:
        for process in both:
            go(process)
        said = [process.communicate(timeout=LONGEST_S)[0] for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    return Prepared(StateDirs(home, home, home / "run"), left, [p.returncode for p in both], said)


def test_two_at_once_make_it_once(prepared: Prepared) -> None:
    assert prepared.statuses == [0, 0], prepared.said
    made, found = sorted(prepared.said, key=len, reverse=True)
    assert made.startswith("copying smolmachines")
    assert found == ""
    assert load_prepared(prepared.dirs, deep=True).program.is_file()


def test_nothing_is_left_of_a_killed_preparation(prepared: Prepared) -> None:
    assert [name.rpartition(".")[2] == "warm" for name in prepared.left_by_kill] in (
        [False, True],
        [True, False],
    )
    place = load_prepared(prepared.dirs).directory
    assert sorted(place.parent.iterdir()) == [place, receipt_path(place)]


_AS_USER = """
import os, stat, sys
from pathlib import Path
import filelock
from kernel_provisioner.engines.bwrap import linux
from kernel_provisioner.engines.smolvm.prepare import prepare
from kernel_provisioner.engines.smolvm.release import load_prepared
from kernel_provisioner.paths import StateDirs
home, user = Path(sys.argv[1]), int(sys.argv[2])
if os.geteuid() == 0:
    # Only here, so that nobody else on this host may use the device meanwhile.
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("none", str(home / "dev"), "tmpfs", 0)
    os.mknod(home / "dev/kvm", stat.S_IFCHR | 0o600, os.stat("/dev/kvm").st_rdev)
    os.chown(home / "dev/kvm", user, user)
    linux.mount(str(home / "dev/kvm"), "/dev/kvm", "", 4096)
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
dirs = StateDirs(home / "data", home / "state", home / "run")
prepare(dirs, print)
print(load_prepared(dirs, deep=True).directory)
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory that an ordinary user can reach, with the package in it."""
    made = Path(tempfile.mkdtemp(prefix="backintel-prepare-", dir="/var/tmp"))
    made.chmod(0o755)
    shutil.copytree(find_package(), made / "site" / PACKAGE)
    for name in ("data", "dev"):
        (made / name).mkdir()
        if os.geteuid() == 0:
            os.chown(made / name, UID, UID)
    yield made
    shutil.rmtree(made)


def test_an_ordinary_user_prepares_it(home: Path) -> None:
    """The program then may write where it lies, and expands its disk templates there."""
    done = subprocess.run(
        [sys.executable, "-c", _AS_USER, str(home), str(UID)],
        env={**os.environ, "PYTHONPATH": str(home / "site"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    place = Path(done.stdout.splitlines()[-1])
    assert place.is_relative_to(home / "data")
    assert sorted(place.parent.iterdir()) == [place, receipt_path(place)]
    assert {path.name for path in place.iterdir()} >= {*TEMPLATES, AGENT_ROOT}
