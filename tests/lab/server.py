"""A real Jupyter server in a process of its own, and an ordinary client of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from tornado.websocket import WebSocketClientConnection, websocket_connect

API = "backintel/api"
TOKEN = "of-this-test"  # noqa: S105 - it guards nothing
START_S = 60
STOP_S = 60
WAIT_S = 100
"""For one event: a busy machine needs its time for the start of a sandbox."""
SPEC = {
    "argv": ["python3", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
    "display_name": "test",
    "language": "python",
    "interrupt_mode": "signal",
}


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


@dataclass
class Answer:
    """One HTTP answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Server:
    """A running server. ``kernels`` are what this client started in it."""

    port: int
    root: Path
    token: str = TOKEN
    process: subprocess.Popen[bytes] | None = None
    kernels: list[str] = field(default_factory=list)

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        token: bool = True,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Ask, by token unless told otherwise."""
        request = Request(
            f"http://127.0.0.1:{self.port}/base/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                **({"Authorization": f"token {self.token}"} if token else {}),
                **(headers or {}),
            },
        )
        try:
            with build_opener(_NoRedirect).open(request, timeout=90) as found:
                return Answer(found.status, dict(found.headers), found.read())
        except HTTPError as error:
            return Answer(error.code, dict(error.headers), error.read())

    def get(self, path: str, **options: Any) -> Answer:
        return self.request("GET", path, **options)

    def ours(self, kernel: str, path: str = "", **options: Any) -> Answer:
        """GET one of our routes of a kernel."""
        return self.get(f"{API}/kernels/{kernel}{path}", **options)

    def export(self, kernel: str, directory: object, **options: Any) -> Answer:
        return self.request(
            "POST", f"{API}/kernels/{kernel}/export", {"directory": directory}, **options
        )

    def start(self, name: str = "backintel-sandbox") -> str:
        """Start a kernel through Jupyter's own API; return its id."""
        answer = self.request("POST", "api/kernels", {"name": name})
        assert answer.status == 201, answer.body
        self.kernels.append(answer.json["id"])
        return self.kernels[-1]

    def stop(self, kernel: str) -> None:
        """Shut a kernel down; one that ended for good may be forgotten meanwhile.

        jupyter_client (8.10) cannot while it restarts a kernel by itself, which goes on for some
        milliseconds after the kernel is ready: InvalidStateError, status 500. A restart has the
        time of a start.
        """
        if kernel not in self.kernels:
            return
        self.kernels.remove(kernel)
        deadline = time.monotonic() + START_S
        answer = self.request("DELETE", f"api/kernels/{kernel}")
        while answer.status == 500 and time.monotonic() < deadline:
            time.sleep(0.1)  # the restart needs the processor too
            answer = self.request("DELETE", f"api/kernels/{kernel}")
        assert answer.status in (204, 404), answer.body

    async def socket(self, path: str) -> WebSocketClientConnection:
        return await websocket_connect(
            f"ws://127.0.0.1:{self.port}/base/{path}?token={self.token}",
            ping_interval=None,
        )

    @contextlib.asynccontextmanager
    async def channels(self, kernel: str) -> AsyncIterator[Channels]:
        """A kernel's channels, as Lab has them."""
        connection = await self.socket(f"api/kernels/{kernel}/channels")
        try:
            yield Channels(connection)
        finally:
            await closed(connection)

    @contextlib.asynccontextmanager
    async def events(self) -> AsyncIterator[Events]:
        """What the server's event bus says of sandboxes."""
        connection = await self.socket("api/events/subscribe")
        try:
            yield Events(connection)
        finally:
            await closed(connection)


async def closed(connection: WebSocketClientConnection) -> None:
    """Close a websocket and wait until it is."""
    connection.close()
    async with asyncio.timeout(WAIT_S):
        while await connection.read_message() is not None:
            pass


@dataclass
class Channels:
    """A kernel's websocket."""

    connection: WebSocketClientConnection

    def send(self, code: str) -> str:
        """Send a cell; return its message id."""
        msg_id = uuid.uuid4().hex
        message = {
            "channel": "shell",
            "header": {
                "msg_id": msg_id,
                "username": "",
                "session": "test",
                "msg_type": "execute_request",
                "version": "5.3",
                "date": "2026-01-01T00:00:00Z",
            },
            "parent_header": {},
            "metadata": {},
            "buffers": [],
            "content": {
                "code": code,
                "silent": False,
                "store_history": True,
                "user_expressions": {},
                "allow_stdin": False,
                "stop_on_error": False,
            },
        }
        self.connection.write_message(json.dumps(message))
        return msg_id

    async def until(self, msg_id: str, msg_type: str | None) -> list[dict[str, Any]]:
        """Return the messages of a cell up to the one of this type, or the next of any type."""
        found = []
        async with asyncio.timeout(WAIT_S):
            while True:
                raw = await self.connection.read_message()
                assert raw is not None, "the kernel's websocket was closed"
                message = json.loads(raw)
                if message["parent_header"].get("msg_id") == msg_id:
                    found.append(message)
                    if msg_type is None or message["msg_type"] == msg_type:
                        return found

    async def run(self, code: str) -> str:
        """Run a cell; return its stream text. It must not fail.

        A server keeps no order between channels: the reply may come before the output.
        """
        msg_id = self.send(code)
        text = ""
        waited_for = {"reply", "idle"}
        async with asyncio.timeout(WAIT_S):
            while waited_for:
                (message,) = await self.until(msg_id, None)
                content = message["content"]
                match message["msg_type"]:
                    case "execute_reply":
                        assert content["status"] == "ok", content
                        waited_for.discard("reply")
                    case "status" if content["execution_state"] == "idle":
                        waited_for.discard("idle")
                    case "stream":
                        text += content["text"]
        return text


@dataclass
class Events:
    """The event bus's websocket; events of other schemas are left out."""

    connection: WebSocketClientConnection

    async def until(self, event: str, kernel: str | None = None) -> list[dict[str, Any]]:
        """Return the events of ours, or of this kernel, up to the first of this kind."""
        found = []
        async with asyncio.timeout(WAIT_S):
            while True:
                raw = await self.connection.read_message()
                assert raw is not None, "the event bus was closed"
                message = json.loads(raw)
                ours = message["schema_id"].startswith("https://backintel-sandbox.invalid/")
                if ours and kernel in (None, message["kernel_id"]):
                    found.append(message)
                    if message["event"] == event:
                        return found


def kernelspec(directory: Path, name: str, **config: object) -> None:
    """Write a kernelspec of ours with this config."""
    place = directory / "kernels" / name
    place.mkdir(parents=True)
    entry = {"provisioner_name": "backintel-provisioner", "config": config}
    (place / "kernel.json").write_text(
        json.dumps({**SPEC, "metadata": {"kernel_provisioner": entry}})
    )


@contextlib.contextmanager
def jupyter_server(home: Path) -> Iterator[Server]:
    """Run `jupyter server` with the configuration that the installed package brought."""
    root = home / "root"
    root.mkdir(parents=True)
    data = home / "data"
    kernelspec(data, "backintel-sandbox", engine="bwrap", profile="interactive")
    environment = {
        **os.environ,
        "JUPYTER_DATA_DIR": str(data),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "XDG_CONFIG_HOME": str(home / "xdg"),
        "PYTHONPATH": str(Path(__file__).parent),
    }
    log = (home / "server.log").open("wb")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "jupyter_server"),
            *("--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", "--port=0"),
            *(f"--IdentityProvider.token={TOKEN}", "--ServerApp.base_url=/base/"),
            f"--ServerApp.root_dir={root}",
            "--ServerApp.authorizer_class=denying.Denying",
        ],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
    )
    try:
        yield Server(_port(process, home), root, process=process)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            log.close()


def _port(process: subprocess.Popen[bytes], home: Path) -> int:
    """Return where the server listens, once it does: its file is there before that."""
    deadline = time.monotonic() + START_S
    place = home / "runtime" / f"jpserver-{process.pid}.json"
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, ValueError, ConnectionRefusedError):
            port = int(json.loads(place.read_text())["port"])
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                return port
        time.sleep(0.02)
    raise AssertionError((home / "server.log").read_text())
