"""What a server's automatic restart does after each kind of end (spec A1, G; cases 9, 22)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.ioloop import AsyncIOLoopKernelManager
from jupyter_client.kernelspec import KernelSpec
from sandboxes import Result
from traitlets.config import Config

from kernel_provisioner.kernelspec import build
from kernel_provisioner.provisioner import SandboxProvisioner

pytestmark = [pytest.mark.sandbox, pytest.mark.filterwarnings("default")]

CRASH = "import os; os._exit(7)"
LOOP = "while True: pass"
FRESH = "this is a fresh sandbox, for the one before ended"


@dataclass
class Served:
    """A kernel as a server holds it: with jupyter_client's own restarter, and what that fired."""

    manager: AsyncIOLoopKernelManager
    client: AsyncKernelClient
    events: list[str] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def provisioner(self) -> SandboxProvisioner:
        """Our provisioner."""
        found = self.manager.provisioner
        assert isinstance(found, SandboxProvisioner)
        return found

    def listen(self) -> None:
        """Note each ``restart`` and ``dead``."""
        for event in ("restart", "dead"):
            self.manager.add_restart_callback(self._noter(event), event)

    def _noter(self, event: str) -> Callable[[], None]:
        def note() -> None:
            self.events.append(event)
            self.changed.set()

        return note

    async def until(self, *events: str) -> None:
        """Wait until exactly these were fired, in this order."""
        async with asyncio.timeout(60):
            while len(self.events) < len(events):
                self.changed.clear()
                await self.changed.wait()
        assert self.events == list(events)

    async def run(self, code: str) -> Result:
        """Execute code in the kernel that there is."""
        result = Result({})
        result.reply = await self.client.execute_interactive(
            code, timeout=60, output_hook=result.messages.append, allow_stdin=False
        )
        return result

    async def replaced(self, session: str) -> None:
        """Wait until another session than this one is ready."""
        async with asyncio.timeout(60):
            while self.provisioner.session_id == session or not await self.manager.is_alive():
                await asyncio.sleep(0.05)
        await self.client.wait_for_ready(timeout=60)

    def gave_up(self) -> bool:
        """Whether nobody looks after the kernel any more."""
        return self.manager._restarter._pcallback is None


@contextlib.asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[Served]:
    """Start a kernel that is restarted automatically; shut it down afterwards."""
    spec = build(engine="bwrap", profile="interactive", sources={})
    spec["metadata"]["kernel_provisioner"]["config"] |= settings
    config = Config()
    config.KernelRestarter.time_to_dead = 0.3
    manager = AsyncIOLoopKernelManager(config=config)
    manager._kernel_spec = KernelSpec(**spec)
    await manager.start_kernel()
    client = manager.client()
    client.start_channels()
    box = Served(manager, client)
    box.listen()
    try:
        await client.wait_for_ready(timeout=60)
        yield box
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)


def test_after_a_deadline_a_fresh_guest_says_that_everything_is_gone() -> None:
    """nbval#41: by policy a fresh guest takes the place of one past its deadline."""

    async def body() -> None:
        async with served(cell_deadline=2, on_deadline="cancel") as box:
            session = str(box.provisioner.session_id)
            await box.run("x = 1")
            ended = await box.run(LOOP)
            assert ended.error.startswith("CellDeadlineExceeded")
            assert ended.error.endswith("variables are gone.")
            await box.replaced(session)
            assert box.events == ["restart"]
            first = await box.run("print('x' in globals())")
            assert f"{FRESH} (CellDeadlineExceeded); its variables and files are" in first.text
            assert "False" in first.text
            assert (await box.run("print(2)")).text == "2\n", "said once"

    asyncio.run(body())


@pytest.mark.parametrize(
    ("code", "deadline", "reason"),
    [
        (LOOP, 2, "CellDeadlineExceeded"),
        ("x = bytearray(3 << 30)", 100, "OutOfMemory"),
        (CRASH, 100, "KernelCrashed"),
    ],
)
def test_a_guest_that_is_to_stay_dead_is_dead_until_a_person_restarts_it(
    code: str, deadline: int, reason: str
) -> None:
    async def body() -> None:
        settings = {"after_end": "stay", "cell_deadline": deadline, "on_deadline": "cancel"}
        async with served(**settings) as box:
            session = box.provisioner.session_id
            ended = await box.run(code)
            assert ended.error.startswith(reason)
            assert ended.error.endswith("variables are gone.")
            await box.until("dead")
            assert box.gave_up()
            assert box.provisioner.session_id == session
            await box.manager.restart_kernel(now=True)
            await box.client.wait_for_ready(timeout=60)
            assert (await box.run("print(3)")).text == "3\n", "asked for, so no notice"
            assert not box.gave_up()
            assert box.events == ["dead"]

    asyncio.run(body())


def test_a_run_deadline_is_not_followed_by_a_restart_but_by_a_persons() -> None:
    """A fresh guest would have the same clock, on which nothing is left; a person's has its own.

    The tries that were taken from the restarter for it come back.
    """

    async def body() -> None:
        async with served(run_deadline=20, cell_deadline=20) as box:
            session = box.provisioner.session_id
            await box.until("dead")
            assert box.gave_up()
            assert box.provisioner.session_id == session
            await box.manager.restart_kernel(now=True)
            await box.client.wait_for_ready(timeout=60)
            session = box.provisioner.session_id
            await box.run(CRASH)
            await box.until("dead", "restart")
            await box.replaced(str(session))

    asyncio.run(body())


def _no_image(box: Served, directory: Path, patch: pytest.MonkeyPatch) -> None:
    box.provisioner._dirs = replace(box.provisioner._dirs, data=directory / "empty")


def _no_engine(box: Served, directory: Path, patch: pytest.MonkeyPatch) -> None:
    box.manager.kernel_spec.metadata["kernel_provisioner"]["config"].pop("engine", None)
    box.provisioner.engine = None
    patch.setenv("BACKINTEL_SANDBOX", "smolvm")
    # The image is found, the engine is not: where KVM boots a guest it could start otherwise.
    (directory / "home").mkdir()
    (directory / "home/image").symlink_to(box.provisioner._dirs.image)
    box.provisioner._dirs = replace(box.provisioner._dirs, data=directory / "home")


def _bad_configuration(box: Served, directory: Path, patch: pytest.MonkeyPatch) -> None:
    file = directory / "backintel/backintel.toml"
    file.parent.mkdir()
    file.write_text("profil = 'large'\n")
    file.chmod(0o600)
    patch.setenv("XDG_CONFIG_HOME", str(directory))


def _no_source(box: Served, directory: Path, patch: pytest.MonkeyPatch) -> None:
    (directory / "data").rmdir()


def _too_large_a_profile(box: Served, directory: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("kernel_provisioner.profiles.RAM_SHARE", 1e-6)


def _no_records(box: Served, directory: Path, patch: pytest.MonkeyPatch) -> None:
    (directory / "state").write_text("a file in the place of the directory")
    box.provisioner._dirs = replace(box.provisioner._dirs, state=directory / "state")


def _no_time(box: Served, directory: Path, patch: pytest.MonkeyPatch) -> None:
    box.provisioner._clock_started = time.monotonic() - 28800


def _foreign_argv(box: Served, directory: Path, patch: pytest.MonkeyPatch) -> None:
    box.manager.kernel_spec.argv = ["R", "--slave"]


Breaking = Callable[[Served, Path, pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    "break_it",
    [
        _no_image,
        _no_engine,
        _bad_configuration,
        _no_source,
        _too_large_a_profile,
        _no_records,
        _no_time,
        _foreign_argv,
    ],
)
def test_a_permanent_error_is_tried_once_and_told_as_dead(
    break_it: Breaking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vscode-jupyter#9587: a doomed kernel is not started again and again."""
    (tmp_path / "data").mkdir()

    async def body() -> None:
        async with served(sources={"data": str(tmp_path / "data")}) as box:
            before = box.provisioner._dirs
            break_it(box, tmp_path, monkeypatch)
            await box.run(CRASH)
            await box.until("restart", "dead")
            assert box.gave_up()
            assert not await box.manager.is_alive()
            box.provisioner._dirs = before

    asyncio.run(body())


def test_a_start_that_may_succeed_later_is_tried_again() -> None:
    async def body() -> None:
        async with served() as box:
            session = str(box.provisioner.session_id)
            # No supervisor answers as fast: the start fails, as on a host that hangs for a while.
            patience, box.provisioner.phase_timeout_s = box.provisioner.phase_timeout_s, 0.0
            await box.run(CRASH)
            async with asyncio.timeout(60):
                while len(box.events) < 2:
                    box.changed.clear()
                    await box.changed.wait()
            box.provisioner.phase_timeout_s = patience
            await box.replaced(session)
            assert "dead" not in box.events
            assert f"{FRESH} (KernelCrashed)" in (await box.run("1")).text

    asyncio.run(body())


def test_starts_that_go_on_failing_are_given_up_after_three() -> None:
    async def body() -> None:
        async with served() as box:
            box.provisioner.phase_timeout_s = 0.0
            await box.run(CRASH)
            await box.until("restart", "restart", "restart", "dead")
            assert box.gave_up()

    asyncio.run(body())
