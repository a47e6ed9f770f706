"""The real SmolVM's monitor: what of the host it sees and what Landlock keeps from it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_guest import LiveGuest
from product import ask_for_socket_outside, needs_root

pytestmark = needs_root


@pytest.fixture
def outside() -> Iterator[Path]:
    """A directory that every user may write to, and that is not below any allowed path."""
    made = Path(tempfile.mkdtemp(prefix="backintel-outside-", dir="/var/tmp"))
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize(
    "enforced", [True, pytest.param(False, marks=pytest.mark.full)], ids=["enforced", "without"]
)
def test_socket_outside_the_allowed_paths_never_appears(
    own: LiveGuest, outside: Path, monkeypatch: pytest.MonkeyPatch, enforced: bool
) -> None:
    """Only Landlock forbids it, as the run without it shows: users and modes allow it."""
    ask_for_socket_outside(monkeypatch, outside, enforced=enforced)
    own.start()
    machine = own.guest.leftovers.processes[1]
    assert (own.plan.directories[1] / "agent").is_socket()
    assert (outside / "socket").exists() is not enforced
    _monitor_sees_its_stage_alone(machine.pid)
    assert _may_write(int(str(own.guest.limits["monitor_uid"])), outside)


def _monitor_sees_its_stage_alone(pid: int) -> None:
    root = Path(f"/proc/{pid}/root")
    assert (root / "tmp/k/agent").is_socket()
    assert sorted(path.name for path in (root / "tmp").iterdir()) == [
        *("d", "dev", "e", "g", "i", "k", "s0", "s1"),
    ]


def _may_write(user: int, place: Path) -> bool:
    """Whether users and modes let this user make a file there."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            (place / "made").touch()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0
