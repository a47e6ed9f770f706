"""Helpers of the kernel tests: start real sandboxes, run code in them, look for what they leave."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient

from kernel_provisioner.paths import state_dirs
from kernel_provisioner.provisioner import SandboxKernelManager, SandboxProvisioner


@dataclass
class Result:
    """What one execute_request brought: its reply and the iopub messages up to idle."""

    reply: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All stream text."""
        return "".join(m["content"]["text"] for m in self.messages if m["msg_type"] == "stream")

    @property
    def error(self) -> str:
        """``ename: evalue`` of the error output, or an empty text."""
        for message in self.messages:
            if message["msg_type"] == "error":
                return f"{message['content']['ename']}: {message['content']['evalue']}"
        return ""


@dataclass
class Sandbox:
    """A started kernel with a client."""

    manager: SandboxKernelManager
    client: AsyncKernelClient

    @property
    def provisioner(self) -> SandboxProvisioner:
        """Our provisioner."""
        found = self.manager.provisioner
        assert isinstance(found, SandboxProvisioner)
        return found

    @property
    def supervisor_pid(self) -> int:
        """The supervisor's pid."""
        process = self.provisioner._process
        assert process is not None
        return process.pid

    async def run(
        self,
        code: str,
        *,
        timeout: float = 60,
        on_message: Callable[[dict[str, Any]], None] | None = None,
        **options: Any,
    ) -> Result:
        """Execute code; return the reply and all output."""
        # A failing cell must not abort the next one, which may reach the kernel just then.
        options.setdefault("stop_on_error", False)
        result = Result({})

        def hook(message: dict[str, Any]) -> None:
            result.messages.append(message)
            if on_message is not None:
                on_message(message)

        result.reply = await self.client.execute_interactive(
            code, timeout=timeout, output_hook=hook, allow_stdin=False, **options
        )
        return result


@contextlib.asynccontextmanager
async def sandbox(
    *, start: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Sandbox]:
    """Start a sandbox with these command-line settings; shut it down afterwards."""
    manager = SandboxKernelManager(
        command_line={"engine": "bwrap", **settings}, default_profile="interactive"
    )
    await manager.start_kernel(**(start or {}))
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=60)
        # Where the first answer took over a second it asked again, and takes one answer only: what
        # a test receives next must not be the other.
        await client.kernel_info(reply=True, timeout=60)
        yield Sandbox(manager, client)
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)


def remains() -> set[str]:
    """Return what of our sessions is on this host: processes, cgroups, sockets, records."""
    dirs = state_dirs()
    found = {f"record {path}" for path in dirs.sessions.glob("*.json")}
    with contextlib.suppress(FileNotFoundError):
        found |= {f"socket directory {path}" for path in dirs.runtime.iterdir()}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        for root in (Path("/sys/fs/cgroup") / controllers, Path("/sys/fs/cgroup")):
            directory = root / own.lstrip("/")
            found |= {f"cgroup {path}" for path in directory.glob("backintel-*")}
    found |= {f"process {pid}: {name}" for pid, name in guest_processes().items()}
    return found


@contextlib.contextmanager
def leaving_nothing() -> Iterator[None]:
    """Compare what is on the host before and two seconds after."""
    before = remains()
    yield
    deadline = time.monotonic() + 2.0
    while True:
        begun = time.monotonic()
        left = remains() - before
        if not left:
            return
        # What counts is a look that begins after the two seconds: one can take long here.
        assert begun < deadline, left
        time.sleep(0.05)


def guest_processes() -> dict[int, str]:
    """Return the processes that run in a cgroup of a session, or are a supervisor of ours."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            cgroup = (entry / "cgroup").read_text()
            owner = entry.stat().st_uid
            if "/backintel-" in cgroup or (
                " -m kernel_provisioner.session " in command and owner == os.geteuid()
            ):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    found[int(entry.name)] = command[:80]
    return found


async def gone_within(seconds: float, look: Callable[[], object]) -> None:
    """Wait until ``look`` finds nothing. Fails if a look after ``seconds`` finds something."""
    started = time.monotonic()
    while True:
        begun = time.monotonic() - started
        found = look()
        if not found:
            return
        assert begun < seconds, f"still there after {seconds} s: {found}"
        await asyncio.sleep(0.02)
