"""The desk: answers questions about one running session on a Unix socket (spec J2, K, L).

Beside the control socket, which belongs to the process that started the session, so that the
Jupyter server's pages and `backintel export` of another process ask in one way. It lies in the
session's 0700 directory, which no guest sees, and serves only processes of the owner's uid or
root's. Nothing is done for a session that nobody asks about.

One request a connection, one frame; back come a frame that it was taken and one with the answer,
with a descriptor beside it where the answer has contents. ``events`` keeps the connection and gets
each event as a frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kernel_provisioner import wire
from kernel_provisioner.engines.base import Guest
from kernel_provisioner.errors import (
    BackIntelError,
    ExportRefused,
    NotRunning,
    UsageError,
    WireError,
)
from kernel_provisioner.session.ask import DESK
from kernel_provisioner.session.receipt import Receipt
from kernel_provisioner.session.request import Start

if TYPE_CHECKING:
    from kernel_provisioner.artifacts.tarstream import ExportLimits
    from kernel_provisioner.session.snapshot import One

EXPORT_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 4.0
"""How long the end of a session waits for an export under way."""
_REQUEST_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 32
_MAX_EXPORTS = 64
"""Exports that a receipt names; the last ones."""
_EVENTS = frozenset({"deadline", "memory_warning", "exported", "ended"})
_PEER = struct.Struct("3i")

Answer = tuple[dict[str, Any], BinaryIO | None]


class Desk:
    """Serves one session from ``open`` to ``close``."""

    def __init__(
        self,
        start: Start,
        receipt: Receipt,
        *,
        status: Callable[[], dict[str, Any]],
        guest: Callable[[], Guest | None],
        note_export: Callable[[Path], None],
    ) -> None:
        self._start = start
        self._receipt = receipt
        self._status = status
        self._guest = guest
        self._note_export = note_export
        self._max_bytes = start.profile.artifacts_bytes
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._listeners: set[socket.socket] = set()
        self._one_snapshot = asyncio.Lock()

    def open(self) -> None:
        """Listen. Raises OSError."""
        path = self._start.socket_dir / DESK
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        try:
            listener.bind(str(path))
            listener.listen(_MAX_CONNECTIONS)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener))

    async def close(self) -> list[str]:
        """Stop; wait for an export under way. Return what could not be waited for."""
        if self._listener is None or self._accepting is None:
            return []
        self._accepting.cancel()
        self._listener.close()
        late: set[asyncio.Task[None]] = set()
        if self._serving:
            _, late = await asyncio.wait(self._serving, timeout=CLOSE_TIMEOUT_S)
        for task in late:
            task.cancel()
        for sock in self._listeners:
            sock.close()
        self._listeners.clear()
        return ["an export that was under way"] if late else []

    def tell(self, message: Mapping[str, object]) -> None:
        """Push what the owner hears to whoever listens for events."""
        if message.get("op") not in _EVENTS:
            return
        frame = wire.encode(message)
        for sock in list(self._listeners):
            try:
                # A listener that does not read is dropped; half a frame would mean nothing to it.
                taken = sock.send(frame)
            except OSError:
                taken = 0
            if taken < len(frame):
                self._listeners.discard(sock)
                sock.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(0.1)  # out of descriptors: some will be closed
                continue
            sock.setblocking(False)
            if len(self._serving) + len(self._listeners) >= _MAX_CONNECTIONS or not _is_ours(sock):
                sock.close()
                continue
            task = asyncio.create_task(self._serve(sock))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, sock: socket.socket) -> None:
        keep = False
        try:
            request = await _request(sock)
            if request.get("op") == "events":
                self._listeners.add(sock)
                keep = True
                return
            # So that who asks can tell an export that takes its time from a stopped supervisor.
            await _send(sock, {"taken": True}, None)
            try:
                answer, contents = await self._answer(request)
            except BackIntelError as error:
                answer, contents = {"error": error.as_dict()}, None
            except OSError as error:
                failure = ExportRefused(
                    f"the artifacts cannot be read ({error.strerror}).", remedy="try again."
                )
                answer, contents = {"error": failure.as_dict()}, None
            await _send(sock, answer, contents)
        except (OSError, WireError, TimeoutError):
            pass  # whoever asked is gone, or did not ask properly
        finally:
            if not keep:
                sock.close()

    async def _answer(self, request: Mapping[str, Any]) -> Answer:
        """Answer one request. Raises BackIntelError, OSError."""
        match request.get("op"):
            case "status":
                return {}, _json_file(self._status())
            case "receipt":
                return {}, _json_file(self._receipt.data)
            case "listing":
                from kernel_provisioner.artifacts.listing import judge

                entries = await asyncio.to_thread(self._living().listing)
                found = {
                    "session": self._start.session,
                    **judge(entries, self._limits()).as_dict(),
                    "limit_bytes": self._max_bytes,
                }
                return {}, _json_file(found)
            case "artifact":
                one = await self._one(str(request.get("name")))
                return {"size": one.size, "sha256": one.sha256}, one.file
            case "export":
                return {}, _json_file(await self._export(Path(str(request.get("destination")))))
        raise UsageError("the desk does not know this request.")

    def _limits(self) -> ExportLimits:
        from kernel_provisioner.artifacts.tarstream import ExportLimits

        return ExportLimits(max_bytes=self._max_bytes)

    def _living(self) -> Guest:
        guest = self._guest()
        if guest is None:
            raise NotRunning("the sandbox is not running.", remedy="start the kernel.")
        return guest

    async def _one(self, name: str) -> One:
        # Imported when it is asked for: a start does not wait for what most sessions never use.
        from kernel_provisioner.session.snapshot import pick, snapshot

        scratch = self._start.dirs.state
        async with (
            self._one_snapshot,
            snapshot(self._living(), scratch, self._max_bytes) as taken,
        ):
            return await taken.judged(
                lambda stream: pick(stream, name, scratch, self._limits(), _export_deadline())
            )

    async def _export(self, destination: Path) -> dict[str, Any]:
        from kernel_provisioner.artifacts.publish import publish
        from kernel_provisioner.session.snapshot import snapshot

        async with self._one_snapshot:
            guest = self._living()
            # A publication that is killed leaves its staging beside the destination.
            self._note_export(destination.parent)
            async with snapshot(guest, self._start.dirs.state, self._max_bytes) as taken:
                artifacts = await taken.judged(
                    lambda stream: publish(
                        stream, destination, self._limits(), deadline=_export_deadline()
                    )
                )
        listed = [artifact.as_dict() for artifact in artifacts]
        size = sum(artifact.size for artifact in artifacts)
        frozen_s = round(taken.frozen_s, 3)
        made = {"at": time.time(), "files": len(listed), "bytes": size, "frozen_s": frozen_s}
        earlier = self._receipt.data["exports"]
        self._receipt.update(artifacts=listed, exports=[*earlier, made][-_MAX_EXPORTS:])
        self.tell({"op": "exported", "count": len(listed), "bytes": size})
        return {"session": self._start.session, "artifacts": listed, "frozen_s": frozen_s}


def _export_deadline() -> float:
    return time.monotonic() + EXPORT_TIMEOUT_S


def _is_ours(sock: socket.socket) -> bool:
    """Whether the peer, as the kernel states it, is the owner of this session or root."""
    _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return uid in (0, os.geteuid())


async def _request(sock: socket.socket) -> dict[str, Any]:
    """Return the one request. Raises WireError, OSError, TimeoutError."""
    reader = wire.FrameReader()
    async with asyncio.timeout(_REQUEST_TIMEOUT_S):
        while True:
            data = await asyncio.get_running_loop().sock_recv(sock, 65536)
            if not data:
                raise WireError("the request ended in the middle.")
            if messages := reader.feed(data):
                return messages[0]


async def _send(sock: socket.socket, answer: Mapping[str, Any], contents: BinaryIO | None) -> None:
    """Send the answer; a descriptor goes with its first bytes. Raises OSError, TimeoutError."""
    with contents or contextlib.nullcontext():
        frame = wire.encode(answer)
        if contents is not None:
            # The socket is fresh and its buffer empty: this does not block.
            sent = socket.send_fds(sock, [frame], [contents.fileno()])
            frame = frame[sent:]
        async with asyncio.timeout(_REQUEST_TIMEOUT_S):
            await asyncio.get_running_loop().sock_sendall(sock, frame)


def _json_file(data: object) -> BinaryIO:
    """Return an unnamed file in memory: receipts and lists can be longer than a frame."""
    fd = os.memfd_create("backintel-answer", os.MFD_CLOEXEC)
    file = open(fd, "w+b", buffering=0)  # noqa: SIM115 - the caller closes it
    file.write(json.dumps(data).encode())
    file.seek(0)
    return file
