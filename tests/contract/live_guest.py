"""A real guest for the contract tests: started by an engine, talked to over its own sockets."""

from __future__ import annotations

import asyncio
import os
import queue
import secrets
import shutil
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jupyter_client import BlockingKernelClient

from kernel_provisioner.engines.base import CHANNELS, Guest, GuestExit, GuestSpec, SourceMount
from kernel_provisioner.engines.registry import get_engine
from kernel_provisioner.images.receipt import load_image
from kernel_provisioner.paths import guest_code_dir, state_dirs
from kernel_provisioner.processes import is_running
from kernel_provisioner.profiles import Profile

NATIVE_ENGINES = (
    ("bwrap", "smolvm") if os.environ.get("BACKINTEL_SMOLVM_TESTS") == "1" else ("bwrap",)
)
"""The engines that this host can run, as the person who runs the tests says."""
MIB = 1 << 20
PROFILE = Profile(
    name="contract",
    ram_bytes=768 * MIB,
    cpus=1,
    workspace_bytes=48 * MIB,
    artifacts_bytes=24 * MIB,
    temp_bytes=32 * MIB,
    cell_deadline_s=60,
    run_deadline_s=600,
    cells=None,
    on_cell_deadline="interrupt",
)


@dataclass(frozen=True)
class Result:
    """What a cell gave: its reply's status, its text and its error."""

    status: str
    text: str
    ename: str = ""
    evalue: str = ""


class LiveGuest:
    """One guest and a client of it. Everything runs on the calling (main) thread."""

    def __init__(
        self,
        engine: str,
        *,
        profile: Profile = PROFILE,
        sources: tuple[SourceMount, ...] = (),
        image_root: Path | None = None,
        environment: Mapping[str, str] | None = None,
        guest_code: Path | None = None,
        backstop_s: float = 600.0,
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self.engine = get_engine(engine)
        # The directory's parent must not be readable for others, as in the product.
        self.directory = Path(tempfile.mkdtemp(prefix="backintel-contract-"))
        self.key = secrets.token_hex(32)
        self.spec = GuestSpec(
            session=f"contract-{secrets.token_hex(6)}",
            profile=profile,
            image_root=image_root or load_image(state_dirs()).root,
            guest_code=guest_code or guest_code_dir(),
            socket_dir=self.directory,
            sources=sources,
            environment=environment or {},
            backstop_s=backstop_s,
        )
        self.plan = self.engine.plan(self.spec)
        self.guest: Guest
        self.facts: Mapping[str, Any] = {}
        self.attest_timeout = 30.0
        self._client: BlockingKernelClient | None = None

    def start(self) -> LiveGuest:
        """Start the guest and wait until it is attested; no user code runs yet."""
        self.guest = self.loop.run_until_complete(self.engine.launch(self.spec).claim())
        attested = self.guest.wait_attested(self.attest_timeout)
        self.facts = self.loop.run_until_complete(attested)
        return self

    def release(self) -> LiveGuest:
        """Let it become the kernel."""
        connection = {"key": self.key, "signature_scheme": "hmac-sha256"}
        self.loop.run_until_complete(self.guest.release(connection, 60))
        return self

    @property
    def client(self) -> BlockingKernelClient:
        """A client of the guest's own sockets, made on first use."""
        if self._client is None:
            client = BlockingKernelClient()
            ports = {f"{name}_port": number for number, name in enumerate(CHANNELS, start=1)}
            client.load_connection_info(
                {
                    "transport": "ipc",
                    "ip": str(self.guest.channels["shell"]).removesuffix("-1"),
                    "key": self.key,
                    "signature_scheme": "hmac-sha256",
                    **ports,
                }
            )
            client.start_channels()
            client.wait_for_ready(timeout=60)
            # Where the first answer took over a second it asked again, and takes one answer only:
            # what a test receives next must not be the other.
            client.kernel_info(reply=True, timeout=60)
            self._client = client
        return self._client

    def run(self, code: str, timeout: float = 60) -> Result:
        """Execute a cell and collect what it says."""
        texts: list[str] = []
        errors: list[tuple[str, str]] = []

        def collect(message: Mapping[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                texts.append(content["text"])
            elif message["msg_type"] == "error":
                errors.append((content["ename"], content["evalue"]))

        reply = self.client.execute_interactive(
            textwrap.dedent(code),
            timeout=timeout,
            output_hook=collect,
            allow_stdin=False,
            # A failing cell must not abort the next one, which may reach the kernel just then.
            stop_on_error=False,
        )
        ename, evalue = errors[-1] if errors else ("", "")
        return Result(reply["content"]["status"], "".join(texts), ename, evalue)

    def check(self, code: str, timeout: float = 60) -> str:
        """Execute a cell that must succeed and return its text."""
        result = self.run(code, timeout)
        assert result.status == "ok", f"{result.ename}: {result.evalue}\n{result.text}"
        return result.text.strip()

    def send(self, code: str) -> str:
        """Send a cell without waiting; return its message id."""
        return self.client.execute(textwrap.dedent(code), allow_stdin=False, stop_on_error=False)

    def wait_for_text(self, wanted: str, timeout: float = 30) -> None:
        """Wait until the guest printed ``wanted``."""
        deadline = time.monotonic() + timeout
        text = ""
        while wanted not in text:
            left = deadline - time.monotonic()
            assert left > 0, f"{wanted!r} did not come; the guest printed {text!r}"
            try:
                message = self.client.get_iopub_msg(timeout=left)
            except queue.Empty:
                continue
            if message["msg_type"] == "stream":
                text += message["content"]["text"]

    def wait(self, timeout: float = 30) -> GuestExit:
        """Wait for the guest's end."""
        return self.loop.run_until_complete(asyncio.wait_for(self.guest.wait(), timeout))

    @property
    def seen(self) -> bool:
        """Whether the host sees the processes inside the guest: not those of a microVM."""
        return bool(self.plan.cgroups)

    def processes(self) -> list[int]:
        """Return the host's pids of the guest: all in its cgroups, or a machine's own two."""
        found: set[int] = set()
        if not self.seen and hasattr(self, "guest"):
            recorded = self.guest.leftovers.processes
            found = {process.pid for process in recorded if is_running(process)}
        for path in self.plan.cgroups:
            try:
                found |= {int(pid) for pid in (path / "cgroup.procs").read_text().split()}
            except FileNotFoundError:
                continue
        return sorted(found)

    def close(self) -> None:
        """End it and assert that nothing of it is left."""
        if self._client is not None:
            self._client.stop_channels()
        if hasattr(self, "guest"):
            left = self.loop.run_until_complete(self.guest.destroy(10))
            assert list(left) == []
        assert self.processes() == []
        assert [path for path in self.plan.cgroups if path.exists()] == []
        assert list(self.directory.iterdir()) == []
        shutil.rmtree(self.directory)
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


Starter = Callable[..., LiveGuest]


def small(**changes: Any) -> Profile:
    """Return the contract's profile with changes."""
    return replace(PROFILE, **changes)


def wait_gone(pids: list[int], timeout: float = 2.0) -> list[int]:
    """Return which processes still run after ``timeout`` seconds, or an empty list before."""
    deadline = time.monotonic() + timeout
    left = list(pids)
    while True:
        # What counts is a look that begins after the deadline.
        begun = time.monotonic()
        left = [pid for pid in left if _runs(pid)]
        if not left or begun >= deadline:
            return left
        time.sleep(0.005)


def _runs(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text[text.rindex(b")") + 2 : text.rindex(b")") + 3] not in (b"Z", b"X")


def as_root() -> bool:
    """Whether the tests run as root."""
    return os.geteuid() == 0
