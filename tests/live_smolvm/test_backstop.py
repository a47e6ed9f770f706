"""The real SmolVM's own limit of time: the last one, after the watchdog's and the keeper's (G3)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from live_guest import EMULATED, PACE
from product import Session, gone, kill, swept

from kernel_provisioner.engines.base import ProcessIdentity
from kernel_provisioner.processes import children, identify, is_running
from kernel_provisioner.session.opening import BACKSTOP_SLACK_S

RUN_S = 120 if EMULATED else 15
"""Longer than a boot takes."""
OWN_SLACK_S = 5.0
"""By how much the program's limit comes after the keeper's (engines/smolvm/command.py)."""


def program_of(keeper: ProcessIdentity) -> ProcessIdentity:
    """Return ``smol-vmm machine run``, the keeper's only child."""
    (pid,) = children(keeper.pid)
    found = identify(pid)
    assert found is not None
    return found


async def ended_with(process: ProcessIdentity) -> int:
    """Return the status of a process that ended, and that its stopped parent has not waited for."""
    async with asyncio.timeout(RUN_S + BACKSTOP_SLACK_S + OWN_SLACK_S + 10 * PACE):
        while True:
            stat = Path(f"/proc/{process.pid}/stat").read_text()
            state, *fields = stat.rpartition(")")[2].split()
            if state == "Z":
                return os.waitstatus_to_exitcode(int(fields[-1]))
            await asyncio.sleep(0.1)


@contextlib.contextmanager
def stopped(processes: Sequence[ProcessIdentity]) -> Iterator[None]:
    """Stop these processes, as a debugger or a suspended login would; let them go on after it."""
    for process in processes:
        kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        for process in processes:
            kill(process, signal.SIGCONT)


@pytest.mark.full
@pytest.mark.timeout(180 * PACE)
def test_with_all_of_ours_stopped_the_program_ends_the_machine_itself() -> None:
    """Its status is 124 then, and once the supervisor goes on it says that the time was up."""

    async def body() -> None:
        begun = time.monotonic()
        session = await Session(run_deadline=RUN_S, cell_deadline=RUN_S).start()
        try:
            processes = await session.processes()
            program = program_of(processes["keeper"])
            with stopped([processes["supervisor"], processes["keeper"]]):
                assert await ended_with(program) == 124
                assert time.monotonic() - begun > RUN_S + BACKSTOP_SLACK_S
                await gone([processes["monitor"]])
                assert is_running(processes["keeper"])
            async with asyncio.timeout(10 * PACE):
                while await session.manager.provisioner.poll() is None:
                    await asyncio.sleep(0.02)
            assert session.manager.provisioner.ended["reason"] == "RunDeadlineExceeded"
        finally:
            await session.close()
        await gone(processes.values())

    asyncio.run(body())
    assert swept() == []
