"""The client that is killed, or whose sandbox is: a process that drives one kernel and says so.

It plays the part of a Jupyter server: it starts a kernel through the provisioner, does what its
part says, and reports each step through a pipe. It reads nothing from that pipe, so it never waits
for the test. When its sandbox dies it must notice by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Coroutine
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kernel_provisioner.errors import BackIntelError
from kernel_provisioner.provisioner import SandboxKernelManager, SandboxProvisioner

_READY_S = 60.0
_NEWS_S = 3.0
_IGNORES_INTERRUPTS = (
    "import signal, time\n"
    "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    "print('deaf', flush=True)\n"
    "while True: time.sleep(1)"
)
_MAKES_ARTIFACTS = (
    "for number in range(24):\n"
    "    with open(f'/artifacts/{number}.txt', 'wb') as file: file.write(bytes(1 << 20))"
)


@dataclass(frozen=True)
class Part:
    """What the client does, with which settings and environment."""

    does: str
    settings: dict[str, Any]
    environment: dict[str, str]
    destination: str


def perform(reports: Connection, part: Part) -> None:
    """Entry point of the process."""
    os.environ.update(part.environment)
    asyncio.run(_Actor(reports, part).session())


class _Actor:
    def __init__(self, reports: Connection, part: Part) -> None:
        self._reports = reports
        self._part = part
        self._prefix = "phase"
        self._restarting = False
        self._manager = SandboxKernelManager(
            command_line={"engine": "bwrap", **part.settings},
            default_profile="interactive",
            on_phase=lambda name, _: self._report(f"{self._prefix} {name}", **self._where()),
        )

    def _report(self, event: str, **facts: object) -> None:
        self._reports.send((event, facts))

    def _where(self) -> dict[str, object]:
        provisioner = self._provisioner
        return {"session": provisioner.session_id, "socket_dir": str(provisioner._socket_dir)}

    @property
    def _provisioner(self) -> SandboxProvisioner:
        found = self._manager.provisioner
        assert isinstance(found, SandboxProvisioner)
        return found

    async def session(self) -> None:
        """Start, act, end, and report how it ended: ``failed`` or ``done``."""
        try:
            await self._manager.start_kernel()
        except BackIntelError as error:
            self._report("failed", code=error.code, message=str(error))
            return
        client = self._manager.client()
        client.start_channels()
        try:
            await self._while_alive(client.wait_for_ready(timeout=_READY_S))
            # It may have asked twice; a part must not take the other answer for one of its own.
            await self._while_alive(client.kernel_info(reply=True, timeout=_READY_S))
            await self._while_alive(getattr(self, f"_{self._part.does}")(client))
        except BackIntelError as error:
            # Of a restart or an export; the end of the session is reported below.
            self._report("refused", code=error.code, message=str(error))
        finally:
            client.stop_channels()
            self._report("closing")
            await self._manager.shutdown_kernel(now=True)
            # Idempotent: where the kernel was dead already, nobody shut it down.
            await self._provisioner.cleanup()
        ended = self._provisioner.ended or {}
        self._report("done", reason=ended.get("reason"), message=ended.get("message"))

    async def _while_alive(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do something until it is done or the sandbox is dead, as nbclient does."""
        doing = asyncio.ensure_future(work)
        death = asyncio.ensure_future(self._death())
        await asyncio.wait({doing, death}, return_when=asyncio.FIRST_COMPLETED)
        for task in (death, doing):
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        error = None if doing.cancelled() else doing.exception()
        # A client whose kernel died under it says so in words of its own; what the cell was told
        # arrives before the provisioner's news.
        if error and (isinstance(error, BackIntelError) or not await self._news_of_death()):
            raise error

    async def _is_dead(self) -> bool:
        return await self._provisioner.poll() is not None

    async def _news_of_death(self) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_NEWS_S):
                await self._death()
        return await self._is_dead()

    async def _death(self) -> None:
        while self._restarting or not await self._is_dead():
            await asyncio.sleep(0.02)

    # -- parts ---------------------------------------------------------------------------------

    async def _plain(self, client: Any) -> None:
        reply = await client.execute_interactive("1", timeout=_READY_S, output_hook=_ignore)
        assert reply["content"]["status"] == "ok"

    _staged = _plain

    async def _run(self, client: Any, code: str, kind: str, event: str) -> None:
        """Run an endless cell; report once a message of this kind came."""
        msg_id = client.execute(code)
        told = False
        while True:
            message = await client.get_iopub_msg(timeout=_READY_S)
            ours = message["parent_header"].get("msg_id") == msg_id
            if ours and message["msg_type"] == kind and not told:
                told = True
                self._report(event)

    async def _sleep(self, client: Any) -> None:
        await self._run(client, "import time; time.sleep(1000)", "status", "busy")

    async def _print(self, client: Any) -> None:
        code = "import time\nwhile True: print('x' * 200, flush=True); time.sleep(.001)"
        await self._run(client, code, "stream", "printing")

    async def _ask(self, client: Any) -> None:
        client.allow_stdin = True
        client.execute("input('name? ')", allow_stdin=True)
        await client.get_stdin_msg(timeout=_READY_S)
        self._report("asking")
        await client.get_shell_msg(timeout=1000)

    async def _interrupt(self, client: Any) -> None:
        client.execute(_IGNORES_INTERRUPTS)
        while (await client.get_iopub_msg(timeout=_READY_S))["msg_type"] != "stream":
            pass
        await self._manager.interrupt_kernel()
        self._report("interrupted")
        await client.get_shell_msg(timeout=1000)

    async def _restart(self, client: Any) -> None:
        self._prefix = "again"
        self._report("restarting")
        self._restarting = True
        await self._manager.restart_kernel(now=True)
        self._restarting = False
        await client.wait_for_ready(timeout=_READY_S)
        await self._plain(client)

    async def _stay(self, client: Any) -> None:
        await self._restart(client)
        await self._sleep(client)

    async def _crash(self, client: Any) -> None:
        client.execute("import os; os._exit(3)")
        while not await self._is_dead():
            await asyncio.sleep(0.002)
        self._report("ended")

    async def _export(self, client: Any) -> None:
        reply = await client.execute_interactive(
            _MAKES_ARTIFACTS, timeout=_READY_S, output_hook=_ignore
        )
        assert reply["content"]["status"] == "ok"
        self._report("exporting")
        artifacts = await self._provisioner.export(Path(self._part.destination))
        assert len(artifacts) == 24


def _ignore(message: dict[str, Any]) -> None:
    """Drop an output."""
