"""A launch that comes to no guest leaves nothing, or says what it left and keeps its record."""

from __future__ import annotations

import errno
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest
from live_guest import PROFILE, LiveGuest

from kernel_provisioner.engines.bwrap import cgroups, engine
from kernel_provisioner.engines.bwrap.binary import verify_binary
from kernel_provisioner.errors import StartFailed
from kernel_provisioner.paths import StateDirs, state_dirs
from kernel_provisioner.records import Swept, sweep

pytestmark = pytest.mark.sandbox


class Killing:
    """The session's real group, whose member is killed once its limits were read."""

    def __init__(self, group: cgroups.Group) -> None:
        self._group = group
        self.kind, self.paths = group.kind, group.paths
        self.create, self.usage = group.create, group.usage
        self.freezer = group.freezer
        self.victim = 0

    def admit(self, pid: int) -> None:
        """Remember whom to kill."""
        self.victim = pid
        self._group.admit(pid)

    def limits(self) -> dict[str, object]:
        """Read them, then kill."""
        limits = self._group.limits()
        os.kill(self.victim, signal.SIGKILL)
        os.waitid(os.P_PID, self.victim, os.WEXITED | os.WNOWAIT)
        return limits


def children() -> set[int]:
    """Return this process's children, also those that ended and were not reaped."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def test_a_launcher_killed_at_its_gate_leaves_nothing() -> None:
    live = LiveGuest("bwrap")
    try:
        before = children()
        group = Killing(engine._choose(live.spec))
        with pytest.raises(StartFailed, match="the launcher was killed"):
            engine._launch(live.spec, verify_binary(), group)
        assert children() <= before, "the keeper"
    finally:
        live.close()


# A supervisor whose launch is hindered: a group inside the guest's cannot be removed by us.
SUPERVISOR = """
import json, os, socket, sys
from kernel_provisioner import wire
from kernel_provisioner.session.opening import Opening
from kernel_provisioner.session.request import Start
opening = Opening(Start.parse(json.load(sys.stdin)))
opening.begin()
assert opening.launched is not None, opening.check()
groups = opening.launched.leftovers.cgroups
os.mkdir(groups[0] / "in-the-way")
print(json.dumps([str(path) for path in groups]), flush=True)
from kernel_provisioner.session.supervisor import serve
ours, theirs = socket.socketpair()
serve(theirs, wire.FrameReader(), [{"op": "close"}], opening)
"""


def _request(dirs: StateDirs, session: str) -> Mapping[str, object]:
    return {
        "session": session,
        "kernel_id": "",
        "previous": None,
        "replaced": None,
        "engine": "bwrap",
        "engine_requested": "bwrap",
        "profile": asdict(PROFILE),
        "sources": [],
        "endpoints": [],
        "environment": {},
        "key": "00",
        "signature_scheme": "hmac-sha256",
        "socket_dir": str(dirs.runtime / session),
        "dirs": {name: str(getattr(dirs, name)) for name in ("data", "state", "runtime")},
        "started_at": time.monotonic(),
        "run_dir": None,
    }


def test_what_an_abandoned_launch_could_not_remove_is_told_and_swept(tmp_path: Path) -> None:
    """Spec I2: an undoing that failed keeps the identity of what is left."""
    own = state_dirs()
    dirs = StateDirs(own.data, tmp_path, own.runtime)
    session = secrets.token_hex(8)
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISOR],
        input=json.dumps(_request(dirs, session)),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    group, *others = map(Path, json.loads(done.stdout))
    try:
        receipt = json.loads((dirs.receipts / f"{session}.json").read_text())
        assert receipt["leftovers"] == [f"cgroup {group} could not be removed"]
        assert (group / "cgroup.procs").read_text() == ""
        assert not any(path.exists() for path in others)
        assert f"session {session}: cgroup {group} could not be removed" in sweep(dirs).left
    finally:
        (group / "in-the-way").rmdir()
    assert sweep(dirs) == Swept([f"session {session}: removed what its supervisor left"])
    assert not group.exists()
    assert list(dirs.sessions.iterdir()) == []


def test_a_claim_that_finds_no_descriptor_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    live = LiveGuest("bwrap")
    try:
        before = children()
        launched = live.engine.launch(live.spec)

        def none_left(fd: int) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(os, "dup", none_left)
            with pytest.raises(OSError, match="Too many open files"):
                live.loop.run_until_complete(launched.claim())
        assert children() <= before, "the launcher or the keeper"
        assert not [path for path in launched.leftovers.cgroups if path.exists()]
    finally:
        live.close()
