"""The whole product in the emulated machine: command line, sessions, and what they leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from live_guest import EMULATED, PACE, as_root, stalled

from kernel_provisioner.engines.base import GuestSpec, ProcessIdentity
from kernel_provisioner.engines.smolvm import command, monitor
from kernel_provisioner.errors import HostRefused
from kernel_provisioner.paths import StateDirs, state_dirs
from kernel_provisioner.processes import is_running
from kernel_provisioner.provisioner import SandboxKernelManager
from kernel_provisioner.records import live_sessions, sweep

GONE_S = 2.0 * PACE
"""Two seconds of real hardware, in which no process of a killed session may be left (spec I1)."""
PROFILE = "live" if EMULATED else "interactive"
FLIGHTS_PROFILE = "flights" if EMULATED else "analysis"
"""Profiles of runs: the emulated machine has its own, with longer deadlines (tools/live/run.sh)."""
needs_root = pytest.mark.skipif(
    not as_root(), reason="needs root: a user's monitor has no user id and namespaces of its own"
)
needs_emulation = pytest.mark.skipif(
    not EMULATED,
    reason="only where boots are slow and users and devices may change: `make test-live-smolvm`",
)
_CLI = (sys.executable, "-m", "kernel_provisioner.cli.main")


@dataclass(frozen=True)
class Done:
    """How a command ended: its exit status and the JSON object that it printed."""

    status: int
    report: dict[str, Any]
    said: str


def backintel(*words: str | Path, **options: Any) -> Done:
    """Run a command with ``--json``, bounded in time."""
    done = subprocess.run(
        [*_CLI, *map(str, words), "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300 * PACE,
        check=False,
        **options,
    )
    report = json.loads(done.stdout) if done.stdout else {}
    return Done(done.returncode, report, done.stderr)


def run_notebook(notebook: Path, out: Path, *words: str | Path, **options: Any) -> Done:
    """``backintel run`` on a microVM; a boot that emulation stalled is tried once more."""
    words_of_run = ("run", notebook, "--engine", "smolvm", "--out", out, *words)
    done = backintel(*words_of_run, **options)
    if done.status == 3 and stalled(str(done.report.get("error"))):
        shutil.rmtree(out)
        done = backintel(*words_of_run, **options)
    return done


def write_notebook(path: Path, cells: Sequence[str]) -> Path:
    """Write a notebook of these code cells."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in cells]
    )
    nbformat.write(notebook, path)
    return path


ASKING = """
import socket
with socket.create_connection(('localhost', {port}), timeout=300) as store:
    store.sendall(b'who answers?')
    store.shutdown(socket.SHUT_WR)
    print(store.makefile().read())
"""
"""A cell that asks the service of ``answering``."""


@contextlib.contextmanager
def answering() -> Iterator[int]:
    """Answer one connection to a port of the host's loopback, which is given."""

    def answer() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(300 * PACE)
            asked = sock.makefile().read()
            sock.sendall(f"the host, to {asked!r}".encode())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(300 * PACE)
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listener.getsockname()[1]


def host_address() -> str:
    """Return an address of this host that is not its loopback's; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        # One of the emulated machine's own network (tools/live/run.sh), elsewhere one far away.
        sock.connect(("192.0.2.2", 9))
        return str(sock.getsockname()[0])


def machines() -> list[int]:
    """Return every process that runs the monitor's program, whoever started it."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")[0].endswith(b"smol-vmm"):
                    found.append(int(name))
    return found


def left_behind(dirs: StateDirs | None = None) -> list[str]:
    """Return what sessions have left on this machine; empty is what every end must leave."""
    dirs = dirs or state_dirs()
    places = (dirs.sessions, dirs.machines, dirs.runtime)
    files = [str(path) for place in places if place.exists() for path in place.iterdir()]
    return files + [f"process {pid}" for pid in machines()]


class Session:
    """A session of the product as a Jupyter server starts it, and its processes by identity."""

    def __init__(self, **words: object) -> None:
        log = logging.getLogger("backintel.live")
        log.addHandler(logging.NullHandler())
        log.propagate = False
        self.manager: Any = SandboxKernelManager(
            command_line={
                "engine": "smolvm",
                "profile": "benchmark",
                "run_deadline": 1800,
                **words,
            },
            default_profile="benchmark",
            log=log,
        )
        self.client: Any = None

    async def start(self) -> Session:
        """Start it and connect; a boot that emulation stalled is tried once more."""
        try:
            await self.attempt()
        except HostRefused as error:
            if not stalled(error.message):
                raise
            await self.attempt()
        return self

    async def attempt(self) -> None:
        """Start it and connect; emulation is too slow for the heartbeat."""
        await self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels(hb=False)
        await self.client.wait_for_ready(timeout=30 * PACE)

    async def begin(self, code: str) -> None:
        """Start a cell, and wait until it printed ``begun``."""
        self.client.execute(code)
        while True:
            message = await self.client.get_iopub_msg(timeout=60 * PACE)
            if "begun" in str(message["content"].get("text", "")):
                return

    async def processes(self) -> dict[str, ProcessIdentity]:
        """Return supervisor, keeper and monitor as soon as the monitor runs."""
        async with asyncio.timeout(30 * PACE):
            while True:
                for record in live_sessions(state_dirs()):
                    if record.leftovers.processes:
                        keeper = record.leftovers.processes[0]
                        machine = monitor.find(keeper)
                        if machine is not None:
                            return {
                                "supervisor": record.supervisor,
                                "keeper": keeper,
                                "monitor": machine,
                            }
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Free the client's and the manager's side; after a kill that is all there is."""
        if self.client is not None:
            self.client.stop_channels()
        with contextlib.suppress(RuntimeError):
            await self.manager.shutdown_kernel(now=True)
        if self.manager.provisioner is not None:
            await self.manager.provisioner.cleanup()
        await self.manager.cleanup_resources()


def ask_for_socket_outside(
    monkeypatch: pytest.MonkeyPatch, outside: Path, *, enforced: bool
) -> None:
    """Have the next machine expose a socket in ``outside`` as well, with Landlock or without."""
    arguments, environ = command.arguments, command.environ

    def with_another(spec: GuestSpec, view: command.View) -> list[str]:
        words = arguments(spec, view)
        end = words.index("--")
        return [*words[:end], "--expose-socket", f"/run/other:{outside}/socket", *words[end:]]

    def confined(view: command.View, start_s: float) -> dict[str, str]:
        words = environ(view, start_s)
        return words if enforced else {**words, "SMOLVM_LANDLOCK": "off"}

    monkeypatch.setattr(command, "arguments", with_another)
    monkeypatch.setattr(command, "environ", confined)


def kill(process: ProcessIdentity, number: int = signal.SIGKILL) -> None:
    """Send a signal to this very process."""
    fd = os.pidfd_open(process.pid)
    try:
        assert is_running(process)
        signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)


async def gone(processes: Iterable[ProcessIdentity]) -> float:
    """Return after how many seconds the last of them was gone; fails after GONE_S."""
    began = time.monotonic()
    while left := [process for process in processes if is_running(process)]:
        assert time.monotonic() - began < GONE_S, f"still there: {left}"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


def swept() -> list[str]:
    """Sweep once and return what is left all the same, after what the sweep said."""
    said = sweep(state_dirs())
    left = left_behind()
    return [*said.left, *left] if left else []
