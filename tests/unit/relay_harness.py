"""What the relay's tests share: a real ipykernel behind a real relay, and a hostile guest.

The relay runs on a loop in its own thread, as it runs in its own process in the product, so that
blocking Jupyter clients can be used as people use them.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient

from kernel_provisioner.session.relay import (
    CHANNELS,
    Forward,
    Refuse,
    Relay,
    RelayBounds,
    Request,
)
from kernel_provisioner.session.relay.inspect import DELIMITER, Signer
from kernel_provisioner.session.relay.zmtp import (
    GREETING,
    encode_command,
    encode_message,
    encode_ready,
)

KEY = b"0b5a4c7e-test-key"
SCHEME = "hmac-sha256"

SERVER = GREETING + encode_ready(b"XPUB")
CLIENT = GREETING + encode_ready(b"SUB")

PATIENCE_S = 60.0
"""For what comes at once: a busy machine may keep any thread waiting for seconds."""

LAUNCHER = """
import zmq
from ipykernel.kernelapp import IPKernelApp
class App(IPKernelApp):
    def init_iopub(self, context):
        context.setsockopt(zmq.SNDHWM, 0)
        super().init_iopub(context)
App.launch_instance()
"""


class RecordingMonitor:
    """A real monitor that keeps what it was told and refuses what ``refuse`` says."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.requests: list[Request] = []
        self.refuse: Callable[[Request], Refuse | None] = lambda request: None
        self.changed = threading.Condition()

    def _note(self, *call: str) -> None:
        with self.changed:
            self.calls.append(call)
            self.changed.notify_all()

    def admit(self, request: Request) -> Forward | Refuse:
        self.requests.append(request)
        self._note("admit", request.msg_id, request.msg_type)
        return self.refuse(request) or Forward()

    def started(self, msg_id: str) -> None:
        self._note("started", msg_id)

    def replied(self, msg_id: str, status: str) -> None:
        self._note("replied", msg_id, status)

    def input_requested(self, msg_id: str) -> None:
        self._note("input_requested", msg_id)

    def input_replied(self, msg_id: str) -> None:
        self._note("input_replied", msg_id)

    def output_exceeded(self, msg_id: str, detail: str) -> None:
        self._note("output_exceeded", msg_id, detail)

    def oversized(self, detail: str) -> None:
        self._note("oversized", detail)

    def violation(self, detail: str) -> None:
        self._note("violation", detail)

    def wait_for(self, *call: str, timeout: float = PATIENCE_S) -> tuple[str, ...]:
        """Return the first call that begins with ``call``; fail after ``timeout`` seconds."""
        with self.changed:
            found: list[tuple[str, ...]] = []

            def seen() -> bool:
                found[:] = [entry for entry in self.calls if entry[: len(call)] == call]
                return bool(found)

            assert self.changed.wait_for(seen, timeout), f"{call} not in {self.calls}"
            return found[0]

    def kinds(self, kind: str) -> list[tuple[str, ...]]:
        with self.changed:
            return [entry for entry in self.calls if entry[0] == kind]


class RelayThread:
    """A relay on its own loop in its own thread."""

    def __init__(
        self, directory: Path, *, bounds: RelayBounds | None = None, name: str = ""
    ) -> None:
        self.monitor = RecordingMonitor()
        self.client_paths = {c: directory / f"h{name}-{i}" for i, c in enumerate(CHANNELS, 1)}
        self.guest_paths = {c: directory / f"g{name}-{i}" for i, c in enumerate(CHANNELS, 1)}
        self.client_ip = str(directory / f"h{name}")
        self.guest_ip = str(directory / f"g{name}")
        self.relay = Relay(
            client_paths=self.client_paths,
            guest_paths=self.guest_paths,
            key=KEY,
            signature_scheme=SCHEME,
            monitor=self.monitor,
            bounds=bounds or RelayBounds(),
        )
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.run(self.relay.start())

    def run(self, work: Coroutine[Any, Any, Any], timeout: float = PATIENCE_S) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def call(self, function: Callable[[], Any]) -> Any:
        async def wrapped() -> Any:
            return function()

        return self.run(wrapped())

    def open(self) -> None:
        self.call(self.relay.open)

    def stop(self) -> None:
        self.run(self.relay.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()

    def connection_info(self, ip: str) -> dict[str, Any]:
        ports = {f"{channel}_port": i for i, channel in enumerate(CHANNELS, 1)}
        return {
            "transport": "ipc",
            "ip": ip,
            "key": KEY.decode(),
            "signature_scheme": SCHEME,
            **ports,
        }

    def client(self, *, ip: str | None = None) -> BlockingKernelClient:
        client = BlockingKernelClient()
        client.load_connection_info(self.connection_info(ip or self.client_ip))
        client.start_channels()
        return client


class Kernel:
    """A real ipykernel that listens on the guest's paths of a relay."""

    def __init__(self, directory: Path, info: dict[str, Any], sockets: list[Path]) -> None:
        launcher = directory / "launcher.py"
        launcher.write_text(LAUNCHER)
        connection = directory / f"guest-{time.monotonic_ns()}.json"
        connection.write_text(json.dumps(info))
        environment = {
            **os.environ,
            "IPYTHONDIR": str(directory / "ipython"),
            "JPY_PARENT_PID": "1",
            "HOME": str(directory),
        }
        with (directory / "kernel.err").open("wb") as errors:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    str(launcher),
                    "-f",
                    str(connection),
                    "--HistoryManager.hist_file=:memory:",
                ],
                cwd=directory,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
        deadline = time.monotonic() + PATIENCE_S
        while not all(path.exists() for path in sockets):
            assert self.process.poll() is None, (directory / "kernel.err").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)


@contextmanager
def short_directory() -> Iterator[Path]:
    """A private directory with a short path: a socket's path has at most 107 bytes."""
    directory = Path(tempfile.mkdtemp(prefix="rl-", dir="/tmp"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def kernel_behind_relay(bounds: RelayBounds | None = None) -> Iterator[tuple[RelayThread, Kernel]]:
    with short_directory() as directory:
        relay = RelayThread(directory, bounds=bounds)
        kernel = Kernel(
            directory, relay.connection_info(relay.guest_ip), list(relay.guest_paths.values())
        )
        try:
            relay.open()
            yield relay, kernel
        finally:
            kernel.kill()
            relay.stop()


class HostileGuest:
    """Listens where a kernel would and lets a test send any bytes on any channel."""

    def __init__(self, relay: RelayThread) -> None:
        self._listeners: dict[str, socket.socket] = {}
        for channel, path in relay.guest_paths.items():
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(str(path))
            listener.listen(8)
            listener.settimeout(PATIENCE_S)
            self._listeners[channel] = listener
        self.accepted: list[socket.socket] = []

    def accept(self, channel: str) -> socket.socket:
        sock, _ = self._listeners[channel].accept()
        sock.settimeout(PATIENCE_S)
        self.accepted.append(sock)
        return sock

    def die(self) -> None:
        for sock in [*self.accepted, *self._listeners.values()]:
            sock.close()


def connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(PATIENCE_S)
    sock.connect(str(path))
    return sock


def receive(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        assert piece, f"end of file after {len(data)} of {count} bytes"
        data += piece
    return data


def in_step(sender: socket.socket, receiver: socket.socket, wire: bytes) -> bytes:
    """Send and receive by turns: what the sockets between them hold is the kernel's affair."""
    got = b""
    for start in range(0, len(wire), 50_000):
        piece = wire[start : start + 50_000]
        sender.sendall(piece)
        got += receive(receiver, len(piece))
    return got


def until(sock: Any, marker: bytes) -> bytes:
    got = b""
    while marker not in got:
        piece = sock.recv(1 << 16)
        assert piece, f"end of file before {marker!r}"
        got += piece
    return got


def resident() -> int:
    """Return this process's memory in bytes; the relay's is part of it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def signed(parts: list[bytes], key: bytes = KEY) -> list[bytes]:
    return [DELIMITER, Signer(key, SCHEME).sign(parts), *parts]


def message(
    kind: str,
    content: Any,
    *,
    parent: dict[str, Any] | None = None,
    metadata: Any = None,
    key: bytes = KEY,
    topic: list[bytes] | None = None,
) -> bytes:
    """Return a guest's message as wire bytes. ``content`` and ``metadata`` may be raw bytes."""
    header = {"msg_id": f"id-{time.monotonic_ns()}", "msg_type": kind, "session": "g"}
    parts = [
        part if isinstance(part, bytes) else json.dumps(part).encode()
        for part in (header, parent or {}, {} if metadata is None else metadata, content)
    ]
    return encode_message([*(topic or []), *signed(parts, key)])


def greeting(kind: bytes, identity: bytes = b"") -> bytes:
    """Return what one end says first: as encode_ready, but with an identity."""
    body = b"".join(
        bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
        for name, value in ((b"Socket-Type", kind), (b"Identity", identity))
    )
    return GREETING + encode_command(b"READY", body)


class Shell:
    """A client's shell and iopub as raw sockets that are bridged to a hostile guest.

    ``join`` adds connections: pairs of the client's end and the guest's.
    """

    def __init__(self, relay: RelayThread, guest: Any, identity: bytes = b"") -> None:
        self._relay = relay
        self._guest = guest
        self._identity = identity
        self._joined: list[socket.socket] = []
        self.iopub, self.guest_iopub = self.join("iopub")
        self.shell, self.guest_shell = self.join("shell")

    def join(
        self, channel: str, identity: bytes | None = None
    ) -> tuple[socket.socket, socket.socket]:
        kinds = {"iopub": (b"SUB", b"XPUB"), "hb": (b"REQ", b"ROUTER")}
        mine, other = kinds.get(channel, (b"DEALER", b"ROUTER"))
        client = connect(self._relay.client_paths[channel])
        sent = greeting(mine, self._identity if identity is None else identity)
        client.sendall(sent)
        guest: socket.socket = self._guest.accept(channel)
        receive(guest, len(sent))
        guest.sendall(GREETING + encode_ready(other))
        receive(client, len(GREETING + encode_ready(other)))
        self._joined.append(client)
        return client, guest

    def request(
        self, sock: socket.socket | None = None, *, content: Any = None, **more: Any
    ) -> dict[str, Any]:
        """Send an execute_request, or what ``more`` says of its header; return the header."""
        header = {"msg_id": f"req-{time.monotonic_ns()}", "msg_type": "execute_request", **more}
        parts = [json.dumps(p).encode() for p in (header, {}, {}, content or {"code": "1"})]
        (sock or self.shell).sendall(encode_message(signed(parts)))
        self._relay.monitor.wait_for("admit", header["msg_id"])
        return header

    def close(self) -> None:
        for sock in self._joined:
            sock.close()
