"""A guest stands still for its export, never for more than 2 s, and can be killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest
from live_guest import LiveGuest, Starter, as_root, wait_gone

from kernel_provisioner.engines.base import Guest
from kernel_provisioner.engines.leftovers import members, remove_leftovers
from kernel_provisioner.errors import ExportRefused, FreezeRefused
from kernel_provisioner.session.snapshot import snapshot

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.root,
    pytest.mark.skipif(not as_root(), reason="an ordinary user may have no cgroup freezer"),
]


@pytest.fixture(scope="module")
def engine() -> str:
    """Only here does the host's kernel say what stands; the microVM's: unit/test_smolvm_live.py."""
    return "bwrap"


# A thread of the kernel notes the longest time in which it did not run.
CLOCK = """
import threading, time
longest = 0.0
def watch():
    global longest
    last = time.monotonic()
    while True:
        time.sleep(0.001)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
threading.Thread(target=watch, daemon=True).start()
"""


def still(live: LiveGuest) -> bool:
    """Whether the kernel of the host says that all of the guest stand still."""
    for group in live.guest.leftovers.cgroups:
        for name, sign in (("freezer.state", "FROZEN"), ("cgroup.events", "frozen 1")):
            path = group / name
            if path.exists() and sign in path.read_text().splitlines():
                return True
    return False


def empty(group: Path) -> None:
    """Wait until it is: a process is a zombie before the last of its threads has ended."""
    deadline = time.monotonic() + 2.0
    while (group / "tasks" if (group / "tasks").exists() else group / "cgroup.threads").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def until_moving(live: LiveGuest, seconds: float) -> float:
    """Wait until the guest moves; return how long it surely stood. Fails after ``seconds``."""
    started = time.monotonic()
    stood = 0.0
    while True:
        begun = time.monotonic() - started
        if not still(live):
            return stood
        stood = begun
        assert stood < seconds
        time.sleep(0.002)


def test_the_guest_stands_still_while_it_is_held_and_no_longer(start: Starter) -> None:
    live = start()
    assert live.run(CLOCK).status == "ok"

    async def hold() -> float:
        async with live.guest.frozen() as held:
            assert still(live)
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                assert still(live)
        assert not held.late
        return held.seconds

    seconds = live.loop.run_until_complete(hold())
    assert not still(live)
    assert 0.3 <= seconds <= 2.0
    # The thread may have had no turn yet.
    live.check("while longest < 0.3: time.sleep(0.001)")


def test_a_hold_that_nobody_ends_is_over_in_two_seconds(start: Starter) -> None:
    live = start()

    async def hold() -> tuple[float, bool, float]:
        async with live.guest.frozen() as held:
            waited = until_moving(live, 4.0)
        return waited, held.late, held.seconds

    waited, late, seconds = live.loop.run_until_complete(hold())
    assert late
    assert 1.0 < seconds <= 2.0
    assert waited <= seconds
    assert live.run("1").status == "ok"


def test_a_guest_can_be_frozen_again(start: Starter) -> None:
    live = start()

    async def hold() -> None:
        for _ in range(5):
            async with live.guest.frozen() as held:
                assert still(live)
            assert not held.late

    live.loop.run_until_complete(hold())
    assert live.run("print(6 * 7)").text == "42\n"


def test_a_frozen_guest_is_killed_at_once(start: Starter) -> None:
    live = start()

    async def hold() -> float:
        async with live.guest.frozen():
            assert still(live)
            live.guest.kill()
            stood = until_moving(live, 4.0)
            async with asyncio.timeout(30):
                await live.guest.wait()
            return stood

    assert live.loop.run_until_complete(hold()) < 0.5, "it waited for the end of its hold"


def test_a_frozen_guest_whose_keeper_is_killed_ends(start: Starter) -> None:
    live = start()
    keeper = live.guest.leftovers.processes[2]

    async def hold() -> float:
        async with live.guest.frozen():
            assert still(live)
            killed = time.monotonic()
            os.kill(keeper.pid, signal.SIGKILL)  # our own child, not yet reaped
            assert (await live.guest.wait()).status is None
            return time.monotonic() - killed

    assert live.loop.run_until_complete(hold()) < 2


def test_a_sweep_ends_what_is_frozen(start: Starter) -> None:
    live = start()
    left = live.guest.leftovers
    inside = [pid for group in left.cgroups for pid in members(group)]
    for group in left.cgroups:
        for name, word in (("freezer.state", "FROZEN"), ("cgroup.freeze", "1")):
            if (group / name).exists():
                (group / name).write_text(word)
    deadline = time.monotonic() + 30.0
    while not still(live):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    # Who was killed with the supervisor cannot thaw: it is the recorded cgroups that are thawed.
    groups_only = replace(left, processes=())
    assert remove_leftovers(groups_only, live.spec.session, 2.0) == []
    assert wait_gone(inside) == []


def test_a_dead_guest_needs_no_freezing(start: Starter) -> None:
    live = start()
    live.guest.kill()
    live.loop.run_until_complete(live.guest.wait())

    async def hold() -> bool:
        async with live.guest.frozen() as held:
            pass
        return held.late

    assert live.loop.run_until_complete(hold()) is False


def test_sigkill_of_the_supervisor_ends_a_frozen_guest(engine: str) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            live = LiveGuest(engine).start().release()

            async def hold() -> None:
                async with live.guest.frozen():
                    assert still(live)
                    places = (*live.guest.leftovers.cgroups, live.directory)
                    os.write(writer, " ".join(map(str, places)).encode() + b"\n")
                    signal.pause()

            live.loop.run_until_complete(hold())
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as told:
        *groups, directory = [Path(text) for text in told.readline().split()]
    inside = [pid for group in groups for pid in members(group)]
    assert inside
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert wait_gone(inside, timeout=2.0) == []
    for group in groups:
        empty(group)
        group.rmdir()
    shutil.rmtree(directory)


class Stalled:
    """A guest whose artifacts never come, as if the disk that takes them hung."""

    def __init__(self, guest: Guest) -> None:
        self.frozen = guest.frozen
        reader, self.writer = os.pipe()
        self.reader = os.fdopen(reader, "rb")

    def artifacts(self) -> BinaryIO:
        return self.reader


def test_a_copy_that_takes_too_long_is_refused_and_the_guest_goes_on(
    start: Starter, tmp_path: Path
) -> None:
    live = start()
    stalled = Stalled(live.guest)

    async def hold() -> None:
        async with snapshot(stalled, tmp_path, 1 << 20):  # type: ignore[arg-type]
            raise AssertionError("there was nothing to copy")

    with pytest.raises(ExportRefused, match="nothing was published"):
        live.loop.run_until_complete(hold())
    os.close(stalled.writer)
    assert not still(live)
    assert live.run("print(1)").text == "1\n"
    assert list(tmp_path.iterdir()) == []


def test_without_a_freezer_nothing_is_read(start: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_provisioner.engines.bwrap import cgroups

    monkeypatch.setattr(cgroups.V1Group, "freezer", None)
    monkeypatch.setattr(cgroups.V2Group, "freezer", None)
    live = start()

    async def hold() -> None:
        async with live.guest.frozen():
            raise AssertionError("it was not frozen")

    with pytest.raises(FreezeRefused, match="cannot be frozen on this host"):
        live.loop.run_until_complete(hold())
    assert live.run("print(1)").text == "1\n"
