"""The real SmolVM: SIGKILL of the supervisor and of the monitor at each phase (spec I1).

After each no process of the session is left within two seconds of real hardware, and nothing else
after one sweep. One kill for each phase belongs to every run, its counterpart to the full one.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from live_guest import PACE
from product import Session, gone, kill, swept

from kernel_provisioner.artifacts.publish import STAGING_PREFIX
from kernel_provisioner.errors import BackIntelError

full = pytest.mark.full
_VICTIMS = {
    "boot": ("supervisor", pytest.param("monitor", marks=full)),
    "idle": (pytest.param("supervisor", marks=full), "monitor"),
    "busy": ("supervisor", pytest.param("monitor", marks=full)),
    "export": (pytest.param("supervisor", marks=full), "monitor"),
}


@pytest.mark.parametrize("victim", _VICTIMS["boot"])
def test_kill_while_booting(victim: str) -> None:
    async def body() -> None:
        session = Session()
        starting = asyncio.create_task(session.start())
        processes = await session.processes()
        kill(processes[victim])
        with pytest.raises(BackIntelError):
            await starting
        print(f"\ngone after {await gone(processes.values()):.2f} s")
        await session.close()

    asyncio.run(body())
    assert swept() == []


@pytest.mark.parametrize("victim", _VICTIMS["idle"])
def test_kill_while_idle(victim: str) -> None:
    async def body() -> None:
        session = await Session().start()
        processes = await session.processes()
        kill(processes[victim])
        # A supervisor that lost its machine stays until its owner has heard of it.
        machine = [processes[name] for name in ("keeper", "monitor")]
        print(f"\ngone after {await gone(machine):.2f} s")
        await _told(session, "GuestLost")
        await session.close()
        await gone(processes.values())

    asyncio.run(body())
    assert swept() == []


@pytest.mark.parametrize("victim", _VICTIMS["busy"])
def test_kill_while_busy(victim: str) -> None:
    async def body() -> None:
        session = await Session().start()
        await session.begin("print('begun', flush=True)\nwhile True: pass")
        processes = await session.processes()
        kill(processes[victim])
        # A supervisor that lost its machine stays until its owner has heard of it.
        machine = [processes[name] for name in ("keeper", "monitor")]
        print(f"\ngone after {await gone(machine):.2f} s")
        await _told(session, "GuestLost")
        await session.close()
        await gone(processes.values())

    asyncio.run(body())
    assert swept() == []


@pytest.mark.parametrize("victim", _VICTIMS["export"])
def test_kill_while_exporting(victim: str, tmp_path: Path) -> None:
    async def body() -> None:
        session = await Session().start()
        await session.begin(
            "open('/artifacts/big.csv', 'wb').write(bytes(60 << 20))\nprint('begun', flush=True)"
        )
        processes = await session.processes()
        export = asyncio.create_task(session.manager.provisioner.export(tmp_path / "artifacts"))
        async with asyncio.timeout(30 * PACE):
            while not list(tmp_path.glob(f"{STAGING_PREFIX}*/*")):
                assert not export.done()
                await asyncio.sleep(0.005)
        kill(processes[victim])
        machine = [processes[name] for name in ("keeper", "monitor")]
        print(f"\ngone after {await gone(machine):.2f} s")
        with pytest.raises(BackIntelError):
            await export
        await session.close()
        await gone(processes.values())

    asyncio.run(body())
    assert swept() == []
    assert list(tmp_path.iterdir()) == []


async def _told(session: Session, reason: str) -> None:
    """Wait until the provisioner says why; a receipt says the same later, whoever writes it."""
    provisioner = session.manager.provisioner
    async with asyncio.timeout(10 * PACE):
        while await provisioner.poll() is None:
            await asyncio.sleep(0.02)
    assert provisioner.ended["reason"] == reason
