"""The real SmolVM started by an ordinary user, who has a home and the group of /dev/kvm."""

from __future__ import annotations

import grp
import hashlib
import json
import os
import pwd
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import proven
import pytest
from live_guest import PACE, STALLED
from product import (
    ASKING,
    PROFILE,
    answering,
    left_behind,
    needs_emulation,
    run_notebook,
    write_notebook,
)

from kernel_provisioner.paths import StateDirs

pytestmark = needs_emulation

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
KVM = Path("/dev/kvm")
NAME = "analyst"


@dataclass(frozen=True)
class User:
    """Somebody who may use /dev/kvm by a supplementary group, with a prepared engine and image."""

    uid: int
    group: int
    home: Path

    @property
    def dirs(self) -> StateDirs:
        """The places that the product takes for this user, of whom nothing is configured."""
        runtime = Path(f"/tmp/backintel-{self.uid}")
        share = self.home / ".local"
        return StateDirs(share / "share/backintel", share / "state/backintel", runtime)

    @property
    def options(self) -> dict[str, Any]:
        """How a process of this user is started."""
        environ = {"PATH": "/usr/bin:/bin", "HOME": str(self.home), "LANG": "C.UTF-8"}
        return {
            "user": self.uid,
            "group": self.uid,
            "extra_groups": [self.group],
            "env": {**environ, "USER": NAME, "PYTHONUNBUFFERED": "1"},
            "cwd": self.home,
        }

    def make(self, name: str) -> Path:
        """Make a directory of the user's in its home."""
        path = self.home / name
        path.mkdir()
        os.chown(path, self.uid, self.uid)
        return path

    def test(self, *words: str) -> str:
        """Run tests of this directory as the user; return what was printed once all passed."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-otimeout=0"),
                *("--durations=5", f"--basetemp={self.home}/pytest"),
                *words,
            ],
            **{**self.options, "cwd": HERE},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300 * PACE,
            check=False,
        )
        print(done.stdout)
        assert done.returncode == 0
        assert " skipped" not in done.stdout
        counted = re.search(f"{re.escape(proven.COUNTED)}([0-9]+)", done.stdout)
        assert counted is not None
        STALLED.extend(["as told by the tests of the user"] * int(counted[1]))
        assert left_behind(self.dirs) == []
        return done.stdout


@pytest.fixture(scope="module")
def user() -> Iterator[User]:
    """An account as distributions make it; it stays, for this machine is thrown away."""
    subprocess.run(["/usr/sbin/useradd", "--create-home", "-G", "kvm", NAME], check=True)
    entry = pwd.getpwnam(NAME)
    found = User(entry.pw_uid, grp.getgrnam("kvm").gr_gid, Path(entry.pw_dir))
    for name in (".local", ".local/share", ".local/state"):
        found.make(name)
    adopt = REPOSITORY / "tools/live/adopt.py"
    subprocess.run(
        [
            *(sys.executable, adopt, "/image", "/payload/engine", "/payload/facts.json"),
            str(found.uid),
        ],
        env={**os.environ, "BACKINTEL_HOME": str(found.dirs.data)},
        check=True,
    )
    before = KVM.stat()
    os.chown(KVM, 0, found.group)
    KVM.chmod(0o660)
    yield found
    os.chown(KVM, before.st_uid, before.st_gid)
    KVM.chmod(before.st_mode & 0o777)
    subprocess.run(["/usr/bin/umount", found.dirs.image / "live/root"], check=True)


def test_a_notebook_of_a_user_runs_to_its_receipt(user: User) -> None:
    place = user.make("run")
    out = place / "out"
    with answering() as port:
        notebook = write_notebook(
            place / "small.ipynb",
            ["open('/artifacts/a.csv', 'w').write('a,b\\n1,2\\n')", ASKING.format(port=port)],
        )
        given = ("--profile", PROFILE, "--endpoint", f"store=localhost:{port}")
        done = run_notebook(notebook, out, *given, **user.options)
    assert done.status == 0, done.said
    executed = nbformat.read(out / "small.ipynb", as_version=4)
    assert executed.cells[1].outputs[0].text.strip() == "the host, to 'who answers?'"
    receipt = json.loads((out / "receipt.json").read_text())
    assert (receipt["backend"], receipt["isolation"]) == ("smolvm", "microVM")
    assert receipt["limits"]["monitor_uid"] == user.uid
    assert receipt["ended"]["reason"] == "Shutdown"
    assert receipt["leftovers"] == []
    (artifact,) = receipt["artifacts"]
    data = (out / "artifacts/a.csv").read_bytes()
    assert data == b"a,b\n1,2\n"
    assert artifact["sha256"] == hashlib.sha256(data).hexdigest()
    assert {path.stat().st_uid for path in out.rglob("*")} == {user.uid}
    assert left_behind(user.dirs) == []
    proven.note(
        "ordinary user",
        f"user {user.uid} by the group of /dev/kvm: status 0, receipt, 1 artifact, nothing left; "
        f"ready after {receipt['timings_ms']['ready'] / 1000:.0f} s",
    )


@pytest.mark.full
@pytest.mark.parametrize("how", ["enforced", "without"])
def test_monitor_of_a_user_is_confined(user: User, how: str) -> None:
    name = f"test_monitor_is_this_very_user_and_confined[{how}]"
    assert "1 passed" in user.test(f"user/test_monitor.py::{name}")


@pytest.mark.parametrize("victim", ["supervisor", "monitor"])
@pytest.mark.parametrize("phase", ["booting", pytest.param("idle", marks=pytest.mark.full)])
def test_nothing_of_a_user_outlives_a_kill(user: User, phase: str, victim: str) -> None:
    said = user.test(f"test_kills.py::test_kill_while_{phase}[{victim}]")
    assert "1 passed" in said
