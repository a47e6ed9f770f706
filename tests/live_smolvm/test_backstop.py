"""The real SmolVM's own limit of time: the last one, after the watchdog's and the keeper's (G3)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest
from live_guest import EMULATED, LiveGuest, wait_gone
from product import kill

from kernel_provisioner.engines.base import GuestSpec, ProcessIdentity
from kernel_provisioner.engines.smolvm import command
from kernel_provisioner.engines.smolvm.guest import SmolvmGuest
from kernel_provisioner.processes import children, identify, is_running

LIMIT_S = 100 if EMULATED else 10
"""Counted by the program from when its guest runs the agent; a start takes no longer than that."""


async def ended_with(process: ProcessIdentity) -> int:
    """Return the status of a process that ended, and that its stopped parent has not waited for."""
    while True:
        state, *fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        if state == "Z":
            return os.waitstatus_to_exitcode(int(fields[-1]))
        await asyncio.sleep(0.1)


@pytest.mark.full
def test_the_programs_own_limit_ends_the_machine(
    own: LiveGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours come before it, so here it alone has a short one; its status is 124."""
    arguments = command.arguments

    def limited(spec: GuestSpec, view: command.View) -> list[str]:
        words = arguments(spec, view)
        words[words.index("--timeout") + 1] = f"{LIMIT_S}s"
        return words

    monkeypatch.setattr(command, "arguments", limited)
    # Else it is this process that ends the machine, as soon as the agent is gone.
    monkeypatch.setattr(SmolvmGuest, "_lost", lambda *_: None)
    own.start().release()
    keeper, machine = own.guest.leftovers.processes
    (pid,) = children(keeper.pid)
    program = identify(pid)
    assert program is not None
    # So that nobody takes the program's status away.
    kill(keeper, signal.SIGSTOP)
    try:
        assert own.do(ended_with(program), LIMIT_S + 20) == 124
        assert wait_gone([machine.pid]) == []
        assert is_running(keeper)
    finally:
        with contextlib.suppress(AssertionError):
            kill(keeper, signal.SIGCONT)
    assert own.wait().status is None
