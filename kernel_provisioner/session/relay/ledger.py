"""What the relay remembers of requests: which wait for an answer, and how much output each made.

Responsible for matching guest messages to the requests that clients sent. Ids come from clients; a
guest message changes something only if it names one of them. All of it is bounded by what clients
asked, and no I/O happens here.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from kernel_provisioner.session.relay.inspect import Envelope, RelayBounds, Request

_RECENT = 1024
"""Answered requests that are remembered, for output and idle states that arrive after replies."""


@dataclass(slots=True)
class Pending:
    """A request that was forwarded and not answered."""

    request: Request
    header_raw: bytes
    identity: bytes
    allow_stdin: bool
    started: bool = False
    execution_count: int = 0


class Ledger:
    """Requests of one session by msg_id."""

    def __init__(self) -> None:
        self.pending: dict[str, Pending] = {}
        self.recent: OrderedDict[str, bytes] = OrderedDict()
        self.last_count = 0

    def add(self, pending: Pending) -> None:
        """Remember a request that is being forwarded or refused."""
        msg_id = pending.request.msg_id
        self.pending[msg_id] = pending
        self.recent[msg_id] = pending.header_raw
        while len(self.recent) > _RECENT:
            self.recent.popitem(last=False)

    def resolve(self, msg_id: str) -> Pending | None:
        """Forget that the request waits. It stays among the recent ones."""
        return self.pending.pop(msg_id, None)

    def waits(self, connection: int) -> bool:
        """Return whether a request of this connection waits for its answer."""
        return any(entry.request.connection == connection for entry in self.pending.values())

    def counted(self, msg_id: str, count: object) -> None:
        """Take the execution count that the guest gave a running request."""
        entry = self.pending.get(msg_id)
        if entry is not None and isinstance(count, int) and 0 <= count < 2**31:
            entry.execution_count = self.last_count = count


@dataclass(slots=True)
class _Usage:
    size: int = 0
    text: int = 0
    messages: int = 0
    exceeded: bool = False


@dataclass(slots=True)
class OutputMeter:
    """Counts one iopub connection's traffic for each request (spec H3).

    What belongs to no known request is counted together, since the last request.
    """

    bounds: RelayBounds
    _usage: dict[str, _Usage] = field(default_factory=dict)

    def exceeded(self, msg_id: str) -> bool:
        """Return whether the request's output already passed a bound."""
        usage = self._usage.get(msg_id)
        return usage is not None and usage.exceeded

    def charge(self, msg_id: str, *, size: int, text: int, messages: int) -> str:
        """Add traffic; return what was passed by it, or an empty text. Sizes in bytes."""
        usage = self._usage.setdefault(msg_id, _Usage())
        usage.size += size
        usage.text += text
        usage.messages += messages
        if usage.exceeded:
            return ""
        bounds = self.bounds
        if usage.size > bounds.cell_bytes:
            found = f"more than {bounds.cell_bytes / 2**20:g} MiB of output"
        elif usage.text > bounds.cell_text_bytes:
            found = f"more than {bounds.cell_text_bytes / 2**20:g} MiB of stream text"
        elif usage.messages > bounds.cell_messages:
            found = f"more than {bounds.cell_messages} output messages"
        else:
            return ""
        usage.exceeded = True
        return found

    def new_request(self, known: OrderedDict[str, bytes]) -> None:
        """A request begins: output of no request is counted anew; forgotten ones are dropped."""
        self._usage.pop("", None)
        if len(self._usage) > 2 * _RECENT:
            self._usage = {key: value for key, value in self._usage.items() if key in known}


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
