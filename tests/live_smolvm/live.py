"""A real microVM for the live lane: started by the engine, talked to over its exposed sockets."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import proven
from jupyter_client import AsyncKernelClient

from kernel_provisioner.engines.base import CHANNELS, GuestExit, GuestSpec, SourceMount
from kernel_provisioner.engines.smolvm import SmolvmEngine, monitor
from kernel_provisioner.engines.smolvm.guest import SmolvmGuest
from kernel_provisioner.errors import BackIntelError, HostRefused
from kernel_provisioner.images.receipt import load_image
from kernel_provisioner.paths import guest_code_dir, state_dirs
from kernel_provisioner.profiles import Profile

SLOW = 20
"""How much longer than on real hardware anything may take here (slow/backintel_slow.py)."""
MIB = 1 << 20
PROFILE = Profile(
    name="live",
    ram_bytes=768 * MIB,
    cpus=1,
    workspace_bytes=48 * MIB,
    artifacts_bytes=24 * MIB,
    temp_bytes=32 * MIB,
    cell_deadline_s=60 * SLOW,
    run_deadline_s=120 * SLOW,
    cells=None,
    on_cell_deadline="interrupt",
)


class LiveMachine:
    """One microVM and a client of its kernel, on a loop of its own."""

    def __init__(self, sources: tuple[SourceMount, ...] = (), profile: Profile = PROFILE) -> None:
        self.loop = asyncio.new_event_loop()
        self.directory = Path(tempfile.mkdtemp(prefix="backintel-live-"))
        self.key = secrets.token_hex(16)
        self.spec = GuestSpec(
            session=secrets.token_hex(8),
            profile=profile,
            image_root=load_image(state_dirs()).root,
            guest_code=guest_code_dir(),
            socket_dir=self.directory,
            sources=sources,
            backstop_s=profile.run_deadline_s,
        )
        self.engine = SmolvmEngine()
        self.plan = self.engine.plan(self.spec)
        self.guest: SmolvmGuest
        self.facts: Mapping[str, Any] = {}
        self.client = AsyncKernelClient()

    def do(self, job: Any, seconds: float = 60) -> Any:
        """Run a coroutine with a deadline, in seconds of real hardware."""
        return self.loop.run_until_complete(asyncio.wait_for(job, seconds * SLOW))

    def start(self) -> LiveMachine:
        """Boot until the guest is attested; no user code runs yet.

        A boot that emulation stalled is tried once more.
        """
        try:
            return self._start()
        except HostRefused as error:
            if not proven.stalled(error.message):
                raise
            assert self.do(self.guest.destroy(10 * SLOW)) == []
        return self._start()

    def _start(self) -> LiveMachine:
        self.guest = self.do(self.engine.launch(self.spec).claim())
        try:
            self.facts = self.do(self.guest.wait_attested(30 * SLOW))
        except BackIntelError:
            print(f"smol-vmm printed:\n{self.guest._held.output.text()}")
            print(f"the guest's console:\n{monitor.remains(self.plan.directories[0]).console}")
            raise
        return self

    def release(self) -> LiveMachine:
        """Let it become the kernel and connect the client."""
        go = {"key": self.key, "signature_scheme": "hmac-sha256"}
        self.do(self.guest.release(go, 30 * SLOW))
        place = str(self.guest.channels["shell"]).removesuffix("-1")
        ports = {f"{name}_port": port for port, name in enumerate(CHANNELS, start=1)}
        self.client.load_connection_info({"transport": "ipc", "ip": place, **go, **ports})
        # Emulation is too slow for the heartbeat, which asks for an answer in a second.
        self.client.start_channels(hb=False)
        self.do(self.client.wait_for_ready(timeout=30 * SLOW))
        return self

    def run(self, code: str, seconds: float = 60) -> str:
        """Execute a cell and return what it printed, or its error's name and value."""
        texts: list[str] = []

        def collect(message: Mapping[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                texts.append(content["text"])
            elif message["msg_type"] == "error":
                texts.append(f"{content['ename']}: {content['evalue']}")

        job = self.client.execute_interactive(
            textwrap.dedent(code),
            timeout=seconds * SLOW,
            output_hook=collect,
            allow_stdin=False,
        )
        self.do(job, seconds)
        return "".join(texts).strip()

    def begin(self, code: str) -> None:
        """Start a cell that prints ``begun`` first, and wait for that."""
        self.client.execute("print('begun', flush=True)\n" + textwrap.dedent(code))

        async def begun() -> None:
            while True:
                message = await self.client.get_iopub_msg(timeout=60 * SLOW)
                if "begun" in str(message["content"].get("text", "")):
                    return

        self.do(begun())

    def wait(self, seconds: float = 10) -> GuestExit:
        """Wait until all user code is gone."""
        found: GuestExit = self.do(self.guest.wait(), seconds)
        return found

    def close(self) -> None:
        """End the machine and assert that nothing of it is left."""
        self.client.stop_channels()
        if hasattr(self, "guest"):
            assert self.do(self.guest.destroy(10 * SLOW)) == []
        assert [path for path in self.plan.directories if path.exists()] == []
        assert list(self.directory.iterdir()) == []
        shutil.rmtree(self.directory)
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
