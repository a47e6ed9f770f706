"""Deadlines of whole sessions (spec G), on every engine: kept from outside, told in the cell."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from live_guest import EMULATED, PACE, stalled, wait_gone

from kernel_provisioner.errors import HostRefused
from kernel_provisioner.paths import state_dirs
from kernel_provisioner.provisioner import SandboxKernelManager
from kernel_provisioner.records import live_sessions

pytestmark = [pytest.mark.sandbox, pytest.mark.filterwarnings("default")]

RUN_S = 150 if EMULATED else 12
"""Longer than a boot takes on a busy host."""
BOUND = "the cell ran longer than its deadline"
_PROFILE = f"""
[profiles.contract]
ram_mib = 768
cpus = 1
workspace_mib = 48
artifacts_mib = 24
temp_mib = 32
cell_deadline = {600 * PACE}
run_deadline = {600 * PACE}
"""


@dataclass
class Told:
    """What a cell showed: its text, its error and its reply's."""

    text: str
    error: str
    ename: str


@dataclass
class Session:
    """A started session with a client; emulation is too slow for the client's heartbeat."""

    manager: Any
    client: Any

    async def run(self, code: str) -> Told:
        """Execute a cell and collect what it says."""
        texts: list[str] = []
        errors: list[str] = []

        def collect(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                texts.append(content["text"])
            elif message["msg_type"] == "error":
                errors.append(f"{content['ename']}: {content['evalue']}")

        reply = await self.client.execute_interactive(
            code,
            timeout=60 * PACE,
            output_hook=collect,
            allow_stdin=False,
            stop_on_error=False,
        )
        error = errors[-1] if errors else ""
        return Told("".join(texts), error, reply["content"].get("ename", ""))

    async def ended(self) -> dict[str, Any]:
        """Wait for the end; no process of the guest may be there two seconds later."""
        processes = [
            process.pid
            for record in live_sessions(state_dirs())
            if record.session == self.manager.provisioner.session_id
            for process in record.leftovers.processes
        ]
        assert processes
        async with asyncio.timeout(30 * PACE):
            await self.manager.provisioner.wait()
        found: dict[str, Any] = self.manager.provisioner.ended
        await self.manager.shutdown_kernel(now=True)
        assert wait_gone(processes) == []
        return found


@pytest.fixture(autouse=True)
def _profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A profile that fits every machine."""
    directory = tmp_path / "config/backintel"
    directory.mkdir(parents=True)
    (directory / "backintel.toml").write_text(_PROFILE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    before = set(state_dirs().sessions.glob("*.json"))
    yield
    assert set(state_dirs().sessions.glob("*.json")) <= before


@contextlib.asynccontextmanager
async def session(engine: str, **settings: object) -> AsyncIterator[Session]:
    """Start a session; a boot that emulation stalled is tried once more."""
    manager: Any = SandboxKernelManager(
        command_line={"engine": engine, "profile": "contract", **settings},
        default_profile="contract",
    )
    try:
        await manager.start_kernel()
    except HostRefused as error:
        if not stalled(error.message):
            raise
        await manager.start_kernel()
    client = manager.client()
    client.start_channels(hb=False)
    try:
        await client.wait_for_ready(timeout=30 * PACE)
        await client.kernel_info(reply=True, timeout=30 * PACE)
        yield Session(manager, client)
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)


def test_a_late_cell_is_interrupted_told_why_and_keeps_its_variables(engine: str) -> None:
    """nbval#41: the next cell runs after one that was interrupted at its deadline."""

    async def body() -> None:
        settings = {"cell_deadline": 2 * PACE, "on_deadline": "interrupt"}
        async with session(engine, **settings) as box:
            await box.run("x = 41")
            told = await box.run("while True: pass")
            assert told.error.startswith("KeyboardInterrupt")
            assert BOUND in told.text
            assert (await box.run("print(x + 1)")).text == "42\n"

    asyncio.run(body())


def test_a_late_cell_is_cancelled_with_the_reason_in_the_cell(engine: str) -> None:
    async def body() -> None:
        settings = {"cell_deadline": 2 * PACE, "on_deadline": "cancel"}
        async with session(engine, **settings) as box:
            begun = time.monotonic()
            told = await box.run("while True: pass")
            assert time.monotonic() - begun < 7 * PACE
            assert told.error.startswith("CellDeadlineExceeded: The cell ran longer than")
            assert told.ename == "CellDeadlineExceeded"
            ended = await box.ended()
            assert (ended["reason"], ended["exit_status"]) == ("CellDeadlineExceeded", 4)

    asyncio.run(body())


def test_a_call_that_holds_the_gil_is_killed_after_the_grace(engine: str) -> None:
    """smolvm#684: no cooperation of the guest is needed."""

    async def body() -> None:
        settings = {"cell_deadline": 2 * PACE, "on_deadline": "interrupt", "grace": PACE}
        async with session(engine, **settings) as box:
            begun = time.monotonic()
            told = await box.run(
                "import ctypes, signal\n"
                "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))\n"
                f"ctypes.PyDLL(None).sleep({1000 * PACE})"
            )
            assert time.monotonic() - begun < 8 * PACE
            assert told.error.startswith("CellDeadlineExceeded")
            assert (await box.ended())["reason"] == "CellDeadlineExceeded"

    asyncio.run(body())


def test_the_run_deadline_ends_a_busy_session(engine: str) -> None:
    async def body() -> None:
        deadlines = {"run_deadline": RUN_S, "cell_deadline": RUN_S}
        async with session(engine, **deadlines) as box:
            told = await box.run("while True: pass")
            assert "RunDeadlineExceeded" in told.error
            assert (await box.ended())["exit_status"] == 4

    asyncio.run(body())


def test_the_run_deadline_ends_an_idle_session(engine: str) -> None:
    async def body() -> None:
        deadlines = {"run_deadline": RUN_S, "cell_deadline": RUN_S}
        async with session(engine, **deadlines) as box:
            async with asyncio.timeout(30 * PACE):
                await box.manager.provisioner.wait()
            late = await box.run("1")
            assert late.error.startswith("RunDeadlineExceeded"), "answered while it lingers"
            assert (await box.ended())["reason"] == "RunDeadlineExceeded"

    asyncio.run(body())
