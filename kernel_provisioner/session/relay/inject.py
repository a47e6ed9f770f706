"""Messages that the relay itself sends to clients in the kernel's place, signed with the key.

Responsible for their content alone; whoever sends them sees to message boundaries. Order and form
(spec G4): iopub ``error``, iopub ``status: idle``, then the reply on the request's channel, each
with a fresh msg_id and the request's header as parent. Nothing from a guest goes into them but a
parent header that a client wrote.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime

from kernel_provisioner.session.relay.inspect import (
    COMM_TYPES,
    DELIMITER,
    Signer,
    reply_type,
)
from kernel_provisioner.session.relay.zmtp import encode_message

_PROTOCOL = "5.3"


@dataclass(frozen=True, slots=True)
class Failure:
    """The wire bytes that end one request with an error. ``reply`` is None for comm messages."""

    iopub: bytes
    reply: bytes | None


class Injector:
    """Builds signed kernel messages."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self._session = uuid.uuid4().hex

    def failure(
        self, header_raw: bytes, msg_type: str, ename: str, evalue: str, execution_count: int
    ) -> Failure:
        """Return the messages that end the request with ``ename: evalue``."""
        error: dict[str, object] = {
            "ename": ename,
            "evalue": evalue,
            "traceback": [f"{ename}: {evalue}"],
        }
        iopub = b""
        if msg_type == "execute_request":
            iopub = self._message("error", error, header_raw, topic=b"error")
        iopub += self.idle(header_raw)
        if msg_type in COMM_TYPES:
            return Failure(iopub, None)
        content: dict[str, object] = {"status": "error", **error}
        if msg_type == "execute_request":
            content |= {"execution_count": execution_count, "user_expressions": {}, "payload": []}
        elif msg_type == "kernel_info_request":
            # jupyter_client's wait_for_ready reads it without looking at the status.
            content["protocol_version"] = _PROTOCOL
        return Failure(iopub, self._message(reply_type(msg_type), content, header_raw))

    def idle(self, header_raw: bytes) -> bytes:
        """Return iopub ``status: idle`` for a request."""
        return self._message("status", {"execution_state": "idle"}, header_raw, topic=b"status")

    def notice(self, header_raw: bytes, text: str) -> bytes:
        """Return an iopub ``stream`` on stderr that shows ``text`` in the request's cell."""
        content: dict[str, object] = {"name": "stderr", "text": text}
        return self._message("stream", content, header_raw, topic=b"stream.stderr")

    def _message(
        self, msg_type: str, content: dict[str, object], parent: bytes, topic: bytes | None = None
    ) -> bytes:
        header = {
            "msg_id": uuid.uuid4().hex,
            "session": self._session,
            "username": "sandbox",
            "date": datetime.now(UTC).isoformat(),
            "msg_type": msg_type,
            "version": _PROTOCOL,
        }
        parts = [json.dumps(header).encode(), parent, b"{}", json.dumps(content).encode()]
        idents = [] if topic is None else [topic]
        return encode_message([*idents, DELIMITER, self._signer.sign(parts), *parts])
