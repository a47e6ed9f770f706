"""A real guest for the contract tests: started by an engine, talked to over its own sockets."""

from __future__ import annotations

import asyncio
import os
import queue
import secrets
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from jupyter_client import BlockingKernelClient

from kernel_provisioner.engines.base import (
    CHANNELS,
    EndpointListener,
    Guest,
    GuestEndpoint,
    GuestExit,
    GuestSpec,
    Sample,
    SourceMount,
)
from kernel_provisioner.engines.registry import get_engine
from kernel_provisioner.errors import HostRefused
from kernel_provisioner.images.receipt import load_image
from kernel_provisioner.paths import guest_code_dir, state_dirs
from kernel_provisioner.processes import is_running
from kernel_provisioner.profiles import Profile

EMULATED = "backintel_slow" in sys.modules
"""Whether this is the live lane's machine (tests/live_smolvm/slow), where all takes its time."""
PACE = sys.modules["backintel_slow"].FACTOR if EMULATED else 1
"""How much longer than on real hardware anything may take here."""
if EMULATED:
    ENGINES: tuple[str, ...] = ("smolvm",)
elif os.environ.get("BACKINTEL_SMOLVM_TESTS") == "1":
    ENGINES = ("bwrap", "smolvm")
else:
    ENGINES = ("bwrap",)
"""The engines that this host can run: a native one as the person who runs the tests says."""
MIB = 1 << 20
PROFILE = Profile(
    name="contract",
    ram_bytes=768 * MIB,
    cpus=1,
    workspace_bytes=48 * MIB,
    artifacts_bytes=24 * MIB,
    temp_bytes=32 * MIB,
    cell_deadline_s=60 * PACE,
    run_deadline_s=600 * PACE,
    cells=None,
    on_cell_deadline="interrupt",
)


_STALLED = "no boot progress"
STALLED: list[str] = []
"""What the program said of each boot that it gave up and that was tried once more."""


def stalled(message: str) -> bool:
    """Whether emulation stalled a boot, which may be tried once more; each time is told.

    A nested guest under software emulation sometimes stands still for 30 s, the program's limit by
    its own clock, which no budget of ours can lengthen. On real hardware this is an end like any
    other.
    """
    if not EMULATED or _STALLED not in message:
        return False
    STALLED.append(message)
    return True


@dataclass(frozen=True)
class Result:
    """What a cell gave: its reply's status, its text and its error."""

    status: str
    text: str
    ename: str = ""
    evalue: str = ""


class LiveGuest:
    """One guest and a client of it. Everything runs on the calling (main) thread."""

    running: ClassVar[list[LiveGuest]] = []

    def __init__(
        self,
        engine: str,
        *,
        profile: Profile = PROFILE,
        sources: tuple[SourceMount, ...] = (),
        endpoints: tuple[GuestEndpoint, ...] = (),
        image_root: Path | None = None,
        environment: Mapping[str, str] | None = None,
        guest_code: Path | None = None,
        backstop_s: float = 600.0 * PACE,
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
            endpoints=endpoints,
            environment=environment or {},
            backstop_s=backstop_s,
        )
        self.plan = self.engine.plan(self.spec)
        self.guest: Guest
        self.facts: Mapping[str, Any] = {}
        self.listeners: Mapping[str, EndpointListener] = {}
        """What takes the guest's connections to each endpoint."""
        self.attest_timeout = 30.0 * PACE
        self._client: BlockingKernelClient | None = None
        self.running.append(self)

    def do(self, job: Any, seconds: float = 60) -> Any:
        """Run a coroutine of the guest's on its loop; ``seconds`` are those of real hardware."""
        return self.loop.run_until_complete(asyncio.wait_for(job, seconds * PACE))

    def start(self) -> LiveGuest:
        """Start the guest and wait until it is attested; no user code runs yet.

        A boot that emulation stalled is tried once more.
        """
        try:
            return self._start()
        except HostRefused as error:
            if not stalled(error.message):
                raise
            assert list(self.do(self.guest.destroy(10 * PACE))) == []
        return self._start()

    def _start(self) -> LiveGuest:
        self.guest = self.do(self.engine.launch(self.spec).claim())
        self.facts = self.do(self.guest.wait_attested(self.attest_timeout))
        self.listeners = self.do(self.guest.open_endpoints(30 * PACE))
        return self

    def release(self) -> LiveGuest:
        """Let it become the kernel."""
        connection = {"key": self.key, "signature_scheme": "hmac-sha256"}
        self.do(self.guest.release(connection, 60 * PACE))
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
            # Emulation is too slow for a client's heartbeat, which asks for an answer in a second.
            client.start_channels(hb=not EMULATED)
            client.wait_for_ready(timeout=60 * PACE)
            # Where the first answer took over a second it asked again, and takes one answer only:
            # what a test receives next must not be the other.
            client.kernel_info(reply=True, timeout=60 * PACE)
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
            timeout=timeout * PACE,
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
        deadline = time.monotonic() + timeout * PACE
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

    def begin(self, code: str) -> None:
        """Start a cell, and wait until it printed ``begun`` as the first."""
        self.send("print('begun', flush=True)\n" + textwrap.dedent(code))
        self.wait_for_text("begun")

    def wait(self, timeout: float = 30) -> GuestExit:
        """Wait for the guest's end."""
        found: GuestExit = self.do(self.guest.wait(), timeout)
        return found

    def sample(self, awaited: Callable[[Sample], bool] = lambda _: True) -> Sample:
        """Return figures for which ``awaited`` holds, or after half a minute the last ones.

        A microVM's agent tells some of them once a second.
        """

        async def look() -> Sample:
            deadline = time.monotonic() + 30 * PACE
            while True:
                await asyncio.sleep(0.02)  # what came meanwhile is taken
                found = self.guest.sample()
                if awaited(found) or time.monotonic() > deadline:
                    return found

        found: Sample = self.do(look())
        return found

    @property
    def seen(self) -> bool:
        """Whether the host sees the processes inside the guest: not those of a microVM."""
        return bool(self.plan.cgroups)

    def still(self) -> bool:
        """Whether the kernel of the host says that all of the guest stand still."""
        for group in self.guest.leftovers.cgroups:
            for name, sign in (("freezer.state", "FROZEN"), ("cgroup.events", "frozen 1")):
                path = group / name
                if path.exists() and sign in path.read_text().splitlines():
                    return True
        return False

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
        self.running.remove(self)
        if self._client is not None:
            self._client.stop_channels()
        for listener in self.listeners.values():
            listener.sock.close()
        if hasattr(self, "guest"):
            assert list(self.do(self.guest.destroy(10 * PACE))) == []
        assert self.processes() == []
        assert [path for path in self.plan.cgroups if path.exists()] == []
        assert [path for path in self.plan.directories if path.exists()] == []
        assert list(self.directory.iterdir()) == []
        shutil.rmtree(self.directory)
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


Starter = Callable[..., LiveGuest]


def make_sources(place: Path) -> tuple[SourceMount, ...]:
    """Make a directory, and a single file beside another that must not be seen.

    Everybody may write to them on the host, so that only the mounts can refuse it.
    """
    data = place / "data"
    data.mkdir()
    (data / "a.csv").write_text("a,b\n1,2\n")
    (data / "out").symlink_to("/etc/shadow")
    (place / "alone.csv").write_text("x\n")
    (place / "sibling.csv").write_text("not given\n")
    place.chmod(0o755)
    data.chmod(0o777)
    for path in (data / "a.csv", place / "alone.csv"):
        path.chmod(0o666)
    return SourceMount("data", data), SourceMount("alone", place / "alone.csv")


def small(**changes: Any) -> Profile:
    """Return the contract's profile with changes."""
    return replace(PROFILE, **changes)


def wait_gone(pids: list[int], timeout: float = 2.0) -> list[int]:
    """Return which processes still run after ``timeout`` seconds, or an empty list before."""
    deadline = time.monotonic() + timeout * PACE
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
