"""What the relay remembers of requests: which wait for an answer, and which were answered lately.

Responsible for matching guest messages to the requests that clients sent. Ids come from clients; a
guest message changes something only if it names one of them. All of it is bounded by what clients
asked, and no I/O happens here.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from kernel_provisioner.session.relay.inspect import Envelope, Request, reply_type

RECENT = 1024
"""Requests that are remembered, for output and idle states that arrive after replies."""


@dataclass(slots=True)
class Pending:
    """A request that was forwarded. ``identity``: of the client's socket, as READY gave it."""

    request: Request
    header_raw: bytes
    identity: bytes
    allow_stdin: bool
    started: bool = False
    replied: bool = False
    execution_count: int = 0
    inputs: int = 0
    open_inputs: int = 0  # not answered yet
    told: set[str] = field(default_factory=set)  # notices that its cell has already


class Ledger:
    """Requests of one session by msg_id."""

    def __init__(self) -> None:
        self.pending: dict[str, Pending] = {}
        self.recent: OrderedDict[str, Pending] = OrderedDict()
        self.last_count = 0

    def add(self, pending: Pending) -> None:
        """Remember a request that is being forwarded."""
        msg_id = pending.request.msg_id
        self.pending[msg_id] = pending
        self.recent[msg_id] = pending
        while len(self.recent) > RECENT:
            self.recent.popitem(last=False)

    def find(self, msg_id: str) -> Pending | None:
        """Return a request that waits or did so lately."""
        return self.pending.get(msg_id) or self.recent.get(msg_id)

    def resolve(self, entry: Pending) -> bool:
        """Forget that the request waits, and return whether it did. It stays a recent one."""
        msg_id = entry.request.msg_id
        if self.pending.get(msg_id) is not entry:
            return False
        del self.pending[msg_id]
        return True

    def waits(self, connection: int) -> bool:
        """Return whether a request of this connection waits for its answer."""
        return any(entry.request.connection == connection for entry in self.pending.values())

    def counted(self, msg_id: str, count: object) -> None:
        """Take the execution count that the guest gave a running request."""
        entry = self.pending.get(msg_id)
        if entry is not None and isinstance(count, int) and 0 <= count < 2**31:
            entry.execution_count = self.last_count = count


def answers(
    entry: Pending, msg_type: str, *, channel: str, connection: int, identity: bytes
) -> bool:
    """Return whether a guest's message is the request's one reply, where its client gets it.

    That is the connection on which the request came, or one of the same channel and identity: the
    kernel's ROUTER hands a client that reconnects what its old connection had asked for.
    """
    request = entry.request
    return (
        not entry.replied
        and msg_type == reply_type(request.msg_type)
        and channel == request.channel
        and (connection == request.connection or (identity != b"" and identity == entry.identity))
    )


def make_request(
    envelope: Envelope, content: dict[str, Any], *, channel: str, connection: int
) -> Request:
    """Return what the owner is asked about."""
    subshell = envelope.header.get("subshell_id")
    return Request(
        channel=channel,
        msg_id=envelope.msg_id,
        msg_type=envelope.msg_type,
        subshell_id=subshell if isinstance(subshell, str) and subshell else None,
        silent=envelope.msg_type == "execute_request" and content.get("silent") is True,
        connection=connection,
    )
