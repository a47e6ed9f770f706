"""The real SmolVM: two sessions started at the same moment boot side by side."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from live_guest import PACE, stalled
from product import Session, gone, swept

from kernel_provisioner.engines.base import ProcessIdentity
from kernel_provisioner.engines.smolvm import monitor
from kernel_provisioner.errors import HostRefused
from kernel_provisioner.paths import state_dirs
from kernel_provisioner.records import live_sessions


async def _both_boot() -> list[ProcessIdentity]:
    """Return the monitors of two sessions as soon as both run, before either guest answered."""
    async with asyncio.timeout(30 * PACE):
        while True:
            records = live_sessions(state_dirs())
            # A keeper alone: the monitor is recorded once its guest's agent answered.
            booting = [r.leftovers.processes[0] for r in records if len(r.leftovers.processes) == 1]
            machines = [monitor.find(keeper) for keeper in booting]
            found = [machine for machine in machines if machine is not None]
            if len(found) == 2:
                return found
            await asyncio.sleep(0.005)


async def _export(session: Session, place: Path) -> bytes:
    artifacts = await session.manager.provisioner.export(place)
    assert [artifact["name"] for artifact in artifacts] == ["mine.csv"]
    return (place / "mine.csv").read_bytes()


async def _use(session: Session, mark: str) -> None:
    await session.begin(
        "import os\nassert os.listdir('/artifacts') == []\n"
        f"open('/artifacts/mine.csv', 'w').write('{mark}')\nprint('begun', flush=True)"
    )


@pytest.mark.full
def test_two_sessions_started_at_once_come_up_and_leave_nothing(tmp_path: Path) -> None:
    """Side by side each guest has half of a slow processor, and the program gives up at 30 s.

    Those that emulation stalled so are tried again one after the other.
    """

    async def body() -> None:
        sessions = [Session(), Session()]
        starting = [asyncio.create_task(session.attempt()) for session in sessions]
        assert len(set(await _both_boot())) == 2
        results = await asyncio.gather(*starting, return_exceptions=True)
        for session, failure in zip(sessions, results, strict=True):
            if isinstance(failure, HostRefused) and stalled(failure.message):
                await session.attempt()
            elif failure is not None:
                raise failure
        first, second = sessions
        records = live_sessions(state_dirs())
        processes = [p for r in records for p in (r.supervisor, *r.leftovers.processes)]
        assert len(records) == 2 and len(processes) == 6
        await asyncio.gather(_use(first, "first"), _use(second, "second"))
        exported = await asyncio.gather(
            _export(first, tmp_path / "first"), _export(second, tmp_path / "second")
        )
        assert exported == [b"first", b"second"]
        await asyncio.gather(first.close(), second.close())
        await gone(processes)

    asyncio.run(body())
    assert swept() == []
