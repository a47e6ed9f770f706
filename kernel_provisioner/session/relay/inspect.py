"""What the relay reads in Jupyter messages, and what it tells its owner.

Responsible for decoding the small leading frames of a message within bounds. Guest messages are
hostile: the guest knows the session key, so a valid signature proves nothing about honesty. It is
verified all the same (a few microseconds on small frames), because clients refuse a message with a
wrong signature, and the relay must not believe what no client will see. What is held must be JSON
objects as Jupyter's own kernels send them: clients fail on anything else. Nothing here does I/O.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

from kernel_provisioner.session.relay.zmtp import ParserBounds
from kernel_provisioner.session.watchdog import Refuse

DELIMITER = b"<IDS|MSG>"
COMM_TYPES = frozenset({"comm_open", "comm_msg", "comm_close"})
"""Shell messages without a reply: they run code and end with an iopub ``idle``."""

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A JSON string, or one that does not end. It matches at every quote: linear on hostile text."""
_NOT_BRACKETS = bytes(set(range(256)) - set(b"{}[]"))
_STEPS = bytes.maketrans(b"{}[]", b"\x01\xff\x01\xff")  # down and up, as signed bytes


class MalformedMessage(Exception):
    """A message is not Jupyter's, or breaks a bound of the inspected part."""


class TooDeep(MalformedMessage):
    """JSON nests deeper than its bound: the one fault that an honest library can produce."""


@dataclass(frozen=True, slots=True)
class RelayBounds:
    """Bounds of one session's traffic. Sizes in bytes, times in seconds (spec H3).

    ``stall_s``: a guest that owes the rest of a greeting or of a held message for that long, or
    lets a long message rest for that long, is in violation. ``orphan_s``: how long a client
    connection whose guest side closed stays open for ``fail_pending`` to answer on it.
    ``open_inputs``: more than one, since an interrupted ``input()`` is never answered.
    ``unread_bytes``: what all clients together may leave unread before the guest is held back. A
    microVM's channels share one device, which waits with all of them for the one that is not read
    (libkrun 1.x, measured), interrupts and the agent's connection included.
    """

    parser: ParserBounds = field(default_factory=ParserBounds)
    heartbeat: ParserBounds = field(
        default_factory=lambda: ParserBounds(message_bytes=65536, frames=64, hold_bytes=65536)
    )
    header_bytes: int = 16 * 1024
    json_depth: int = 32
    content_depth: int = 128
    cell_bytes: int = 1024**3
    cell_text_bytes: int = 64 * 1024**2
    cell_messages: int = 100_000
    cell_inputs: int = 10_000
    open_inputs: int = 16
    connections: int = 256
    unread_bytes: int = 32 * 1024**2
    dial_s: float = 10.0
    stall_s: float = 30.0
    orphan_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Request:
    """A shell or control request of a client, before it is forwarded."""

    channel: str
    msg_id: str
    msg_type: str
    subshell_id: str | None
    silent: bool
    """Only of an execute_request; False if its content is too long to be read."""
    connection: int

    @property
    def is_cell(self) -> bool:
        """True for what spec G2 counts as a cell."""
        return self.msg_type == "execute_request" and not self.silent


@dataclass(frozen=True, slots=True)
class Forward:
    """The request may go to the guest."""


Verdict = Forward | Refuse


class RelayMonitor(Protocol):
    """The relay's owner. All calls come on the loop's thread and must not block or raise."""

    def admit(self, request: Request) -> Verdict:
        """Decide on a shell or control request before it is forwarded."""

    def started(self, msg_id: str) -> None:
        """The guest says (iopub ``busy``) that it works on this request."""

    def replied(self, msg_id: str, status: str) -> None:
        """The guest answered. ``status``: of the reply; ``idle`` for comm messages."""

    def input_requested(self, msg_id: str) -> None:
        """The guest waits for ``input()``, the client allows stdin and is connected."""

    def input_replied(self, msg_id: str) -> None:
        """The person answered, or the stdin connection went away."""

    def output_exceeded(self, msg_id: str, detail: str) -> None:
        """A request's output passed a bound of spec H3; once for each. Empty id: of no request."""

    def oversized(self, detail: str) -> None:
        """A guest's message was over its bound; that connection to the guest is already closed."""

    def violation(self, detail: str) -> None:
        """Hostile or malformed guest traffic; that connection to the guest is already closed."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The inspected part of a message. ``content`` is None if it did not fit the hold bounds."""

    signature: bytes
    header: dict[str, Any]
    header_raw: bytes
    parent_raw: bytes
    parent_id: str
    metadata_raw: bytes
    content: bytes | None

    @property
    def msg_id(self) -> str:
        """The message's own id."""
        return str(self.header["msg_id"])

    @property
    def msg_type(self) -> str:
        """The message's type."""
        return str(self.header["msg_type"])


def nesting_within(text: bytes, limit: int) -> bool:
    """Return whether JSON ``text`` nests at most ``limit`` deep, without parsing it.

    Text whose brackets do not pair is not JSON; for it either answer may come.
    """
    if text.count(b"{") + text.count(b"[") <= limit:
        return True  # the common case
    steps = array("b", _STRING.sub(b"", text).translate(_STEPS, _NOT_BRACKETS))
    return max(accumulate(steps), default=0) <= limit  # linear, and no Python code for a byte


def load_object(text: bytes, depth: int) -> dict[str, Any]:
    """Parse a JSON object nested at most ``depth`` deep as a client will parse it.

    Raises MalformedMessage, TooDeep. Python's json refuses integers of more than 4,300 digits.
    """
    if text == b"{}":
        return {}
    if not nesting_within(text, depth):
        raise TooDeep(f"JSON nests deeper than {depth}")
    try:
        # Clients replace bad UTF-8, and ipykernel sends it: print("\udcff") becomes the byte 0xff.
        value = json.loads(str(text, "utf-8", "replace"))
    except (ValueError, RecursionError):
        raise MalformedMessage("a part is not JSON that clients can read") from None
    if not isinstance(value, dict):
        raise MalformedMessage("a part is not a JSON object")
    return value


def parse_envelope(frames: Sequence[bytes], bounds: RelayBounds) -> Envelope:
    """Decode the leading frames of a message. Raises MalformedMessage.

    Header, parent header and metadata must be among ``frames``; the content may be missing.
    """
    try:
        at = frames.index(DELIMITER)
    except ValueError:
        raise MalformedMessage("a message has no delimiter") from None
    parts = frames[at + 1 :]
    if len(parts) < 4:
        raise MalformedMessage("a message lacks its header within the inspected part")
    signature, header_raw, parent_raw, metadata_raw = parts[:4]
    if len(header_raw) > bounds.header_bytes or len(parent_raw) > bounds.header_bytes:
        raise MalformedMessage(f"a header is over {bounds.header_bytes} bytes")
    header = load_object(header_raw, bounds.json_depth)
    for name in ("msg_id", "msg_type"):
        value = header.get(name)
        if not isinstance(value, str) or not 0 < len(value) <= 256:
            raise MalformedMessage(f"a header's {name} is not a text of 1 to 256 characters")
    parent_id = ""
    if len(parent_raw) > 2:  # not "" or "{}"
        parent_id = load_object(parent_raw, bounds.json_depth).get("msg_id") or ""
        if not isinstance(parent_id, str) or len(parent_id) > 256:
            raise MalformedMessage("a parent header's msg_id is not a text of 256 characters")
    content = parts[4] if len(parts) > 4 else None
    return Envelope(signature, header, header_raw, parent_raw, parent_id, metadata_raw, content)


def content_object(envelope: Envelope, bounds: RelayBounds) -> dict[str, Any]:
    """Return a client's content, or an empty dict if it is absent or not a modest JSON object."""
    if envelope.content is None:
        return {}
    try:
        return load_object(envelope.content, bounds.content_depth)
    except MalformedMessage:
        return {}


def guest_content(envelope: Envelope, bounds: RelayBounds, *, complete: bool) -> dict[str, Any]:
    """Check a guest's metadata and return its content; an empty dict if it is too long to be held.

    ``complete``: the message has no more frames than were inspected. Raises MalformedMessage;
    TooDeep if nothing is wrong but the depth of the content.
    """
    try:
        load_object(envelope.metadata_raw, bounds.json_depth)
    except TooDeep as error:
        raise MalformedMessage(f"metadata: {error}") from None
    if envelope.content is None:
        if complete:
            raise MalformedMessage("a message has no content")
        return {}
    return load_object(envelope.content, bounds.content_depth)


def reply_type(msg_type: str) -> str:
    """Return the type of the reply that belongs to a shell or control message's type.

    As ipykernel forms it, also for a comm message to a subshell that is not there: ``comm_reply``.
    """
    return msg_type.rsplit("_", 1)[0] + "_reply"


class Signer:
    """Jupyter's message signatures. An empty key means that messages are unsigned."""

    def __init__(self, key: bytes, scheme: str) -> None:
        """Raises ValueError for a scheme other than ``hmac-<hash of hashlib>``."""
        prefix, _, name = scheme.partition("-")
        if prefix != "hmac" or name not in hashlib.algorithms_available:
            raise ValueError(f"signature_scheme: expected hmac-<hash>, got {scheme!r}")
        self._mac = hmac.new(key, digestmod=name) if key else None

    def sign(self, parts: Sequence[bytes]) -> bytes:
        """Return the signature of header, parent header, metadata and content."""
        if self._mac is None:
            return b""
        mac = self._mac.copy()
        for part in parts:
            mac.update(part)
        return mac.hexdigest().encode()

    def believable(self, envelope: Envelope) -> bool:
        """Return whether clients would accept this: signed well, or too long to be checked."""
        if envelope.content is None or self._mac is None:
            return True
        parts = (
            envelope.header_raw,
            envelope.parent_raw,
            envelope.metadata_raw,
            envelope.content,
        )
        return hmac.compare_digest(self.sign(parts), envelope.signature)
