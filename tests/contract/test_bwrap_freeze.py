"""Standing still as only bwrap's guest does: by the host's freezer, with a keeper that thaws."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
from live_guest import Starter, as_root, wait_gone

from kernel_provisioner.engines.leftovers import members, remove_leftovers
from kernel_provisioner.errors import FreezeRefused

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.root,
    pytest.mark.skipif(not as_root(), reason="an ordinary user may have no cgroup freezer"),
]


@pytest.fixture(scope="module")
def engine() -> str:
    """The only one whose processes the host's kernel can stop."""
    return "bwrap"


def test_a_frozen_guest_whose_keeper_is_killed_ends(start: Starter) -> None:
    live = start()
    keeper = live.guest.leftovers.processes[2]

    async def hold() -> float:
        async with live.guest.frozen():
            assert live.still()
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
    while not live.still():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    # Who was killed with the supervisor cannot thaw: it is the recorded cgroups that are thawed.
    groups_only = replace(left, processes=())
    assert remove_leftovers(groups_only, live.spec.session, 2.0) == []
    assert wait_gone(inside) == []


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
