"""How a microVM's end is told: by smol-vmm's own limit of time (status 124), or of memory."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest
from session_request import PROFILE, SESSION, request

from kernel_provisioner.engines.base import GuestSpec
from kernel_provisioner.engines.bwrap.output import OutputTail
from kernel_provisioner.engines.smolvm.guest import Held, SmolvmGuest
from kernel_provisioner.engines.smolvm.workspace import Places
from kernel_provisioner.errors import Reason
from kernel_provisioner.processes import identify
from kernel_provisioner.session.control import Control
from kernel_provisioner.session.opening import Opening
from kernel_provisioner.session.supervisor import Supervisor
from kernel_provisioner.wire import FrameReader


def ended_with(status: int, home: Path) -> SmolvmGuest:
    """A guest whose program ends with ``status``. Needs a running loop."""
    output, output_end = os.pipe()
    code = f"raise SystemExit({status})"
    pid = os.posix_spawn(sys.executable, [sys.executable, "-ISc", code], {})
    os.close(output_end)
    program = identify(pid)
    assert program is not None  # nobody but the guest waits for it
    spec = GuestSpec(
        session=SESSION, profile=PROFILE, image_root=home, guest_code=home, socket_dir=home
    )
    return SmolvmGuest(
        Held(
            spec=spec,
            places=Places(home / "machines" / SESSION, home / "sockets" / SESSION),
            user=0,
            plan={},
            read_only=frozenset(),
            monitor=program,
            monitor_fd=os.pidfd_open(pid),
            output=OutputTail(output),
            open_files=0,
        )
    )


@pytest.mark.parametrize(
    ("running_s", "reason"),
    [(PROFILE.run_deadline_s + 15, Reason.RUN_DEADLINE), (0, Reason.GUEST_LOST)],
    ids=["time is up", "status alone"],
)
def test_status_124_is_the_run_deadline_if_the_time_is_up(
    tmp_path: Path, running_s: float, reason: Reason
) -> None:
    """Any program may end with 124: it is the host's clock that says whether the limit passed."""

    async def scenario() -> None:
        guest = ended_with(124, tmp_path)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            supervisor = Supervisor(
                Control(ours, FrameReader(), []), Opening(request(tmp_path, "smolvm", running_s))
            )
            supervisor._guest = guest
            try:
                await asyncio.wait_for(supervisor._watch_guest(), 60)
                assert supervisor._ending.result().reason is reason
            finally:
                assert await guest.destroy(10) == []

    asyncio.run(scenario())


def test_a_machine_that_is_lost_is_told_with_what_it_left(tmp_path: Path) -> None:
    """Work must not get lost without a reason shown."""
    place = tmp_path / "machines" / SESSION / "state/.cache/smolvm/vms/vm-1"
    place.mkdir(parents=True)
    (place / "vmm-exit.json").write_text('{"cause": "exited", "exit_code": 0}')
    (place / "agent-console.log").write_text("booting\nKernel panic - not {syncing}\n")

    async def scenario() -> None:
        guest = ended_with(1, tmp_path)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            supervisor = Supervisor(
                Control(ours, FrameReader(), []), Opening(request(tmp_path, "smolvm", 0))
            )
            supervisor._guest = guest
            try:
                await asyncio.wait_for(supervisor._watch_guest(), 60)
                ending = supervisor._ending.result()
                assert ending.reason is Reason.GUEST_LOST
                assert "(the monitor's end: exited, code 0)" in ending.message
                assert "ended with: booting | Kernel panic - not {syncing})" in ending.message
            finally:
                assert await guest.destroy(10) == []

    asyncio.run(scenario())


def test_peak_of_a_guest_killed_for_memory_is_all_of_it(tmp_path: Path) -> None:
    """A gigabyte is filled in less than the second between two samples."""

    async def scenario() -> None:
        guest = ended_with(0, tmp_path)
        try:
            guest._limits["guest_memory_bytes"] = 700
            guest._message({"sample": {"memory_bytes": 100, "tasks": 3, "oom_kills": 0}})
            assert guest.sample().peak_memory_bytes == 100
            guest._message({"exited": -9, "printed": "", "oom_kills": 1})
            found = guest.sample()
            assert (found.oom_kills, found.peak_memory_bytes, found.memory_bytes) == (1, 700, 100)
        finally:
            assert await guest.destroy(10) == []

    asyncio.run(scenario())
