"""ZMTP 3.1 on the wire: an incremental parser without I/O, and the few encoders a relay needs.

The parser is responsible for one direction of one connection. It trusts nobody: every announced
length is checked before a byte of it is kept, and what it keeps at any time is at most the held
start of one message (``hold_bytes``), one command, or a greeting. Larger messages pass through as
slices of the caller's buffer. Format: https://rfc.zeromq.org/spec/37/ (ZMTP 3.1, NULL mechanism).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

GREETING_SIZE = 64
MORE = 0x01
LONG = 0x02
COMMAND = 0x04

_LONG_SIZE = struct.Struct(">Q")
_PROPERTY_SIZE = struct.Struct(">I")
_MECHANISM = b"NULL".ljust(20, b"\0")
_MECHANISM_AT = 12
GREETING = (
    b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + _MECHANISM + b"\0" + bytes(31)
)  # signature, version 3.1, mechanism, as-server, filler


class ZmtpError(Exception):
    """The peer broke ZMTP or one of the bounds; the connection cannot go on."""


class MessageTooLong(ZmtpError):
    """A message announces more than ``message_bytes``: too much output, not a broken peer."""


@dataclass(frozen=True, slots=True)
class ParserBounds:
    """What one direction may send. Sizes in bytes.

    ``hold_bytes`` and ``hold_frames`` limit the start of a message that is kept for inspection;
    ``message_bytes`` and ``frames`` limit the whole message.
    """

    message_bytes: int = 256 * 1024 * 1024
    frames: int = 16384
    hold_bytes: int = 256 * 1024
    hold_frames: int = 64
    command_bytes: int = 16 * 1024


@dataclass(frozen=True, slots=True)
class GreetingPart:
    """Valid greeting bytes, to be forwarded at once: both peers wait for each other's in stages."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Command:
    """A whole command; ``raw`` is the frame as it came."""

    raw: bytes
    name: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class Head:
    """The start of a message: its leading frames that fit the hold bounds, ``raw`` as they came.

    ``complete`` says that this is the whole message; otherwise Data and one End follow.
    """

    raw: bytes
    frames: tuple[bytes, ...]
    complete: bool


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes of a message behind its Head. A slice of the buffer given to ``feed``: use it now."""

    data: memoryview | bytes


@dataclass(frozen=True, slots=True)
class End:
    """A message that did not fit its Head is complete. ``size`` counts all of its wire bytes."""

    size: int


Event = GreetingPart | Command | Head | Data | End

_IN_GREETING, _IN_HEADER, _IN_HELD, _IN_STREAM, _IN_COMMAND, _BROKEN = range(6)


class FrameParser:
    """Turns the bytes of one direction into events; how they were chunked makes no difference."""

    def __init__(self, bounds: ParserBounds) -> None:
        self._bounds = bounds
        self._state = _IN_GREETING
        self._error = ""
        self._taken = 0  # greeting bytes so far
        self._header = bytearray()  # of the current frame, while incomplete
        self._kept = bytearray()  # the held start of the message, wire bytes
        self._command = bytearray()
        self._frames: list[bytes] = []  # bodies of the held frames
        self._count = 0  # frames of this message
        self._size = 0  # wire bytes of this message
        self._left = 0  # body bytes of the current frame still to come
        self._body_size = 0
        self._more = False
        self._streaming = False
        self.ready = False
        self.messages = 0

    @property
    def buffered(self) -> int:
        """Bytes kept now; at most hold_bytes + command_bytes + 18."""
        return len(self._kept) + len(self._command) + len(self._header)

    @property
    def streaming(self) -> bool:
        """True between an incomplete Head and its End: nothing else may be put in between."""
        return self._streaming

    @property
    def untouched(self) -> bool:
        """True if not a byte came: nothing was emitted."""
        return self._state == _IN_GREETING and self._taken == 0

    @property
    def at_boundary(self) -> bool:
        """True if a whole message may be inserted here into what was emitted."""
        return self.ready and not self._streaming

    @property
    def partial(self) -> bool:
        """True if the peer owes bytes: greeting, READY, or the rest of a message or command."""
        return not self.ready or self._count > 0 or self._state != _IN_HEADER or bool(self._header)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Event]:
        """Yield the events that ``data`` completes; exhaust it before the next call.

        Raises ZmtpError after the events that precede the fault, and again on every later call.
        """
        view = memoryview(data)
        position, end = 0, len(view)
        while position < end:
            if self._state == _IN_HEADER:
                position = self._take_header(view, position)
                if self._left < 0:
                    break
                yield from self._begin_body()
                if self._left == 0:
                    yield from self._end_body()
            elif self._state == _IN_STREAM:
                piece = view[position : position + self._left]
                position += len(piece)
                self._left -= len(piece)
                yield Data(piece)
                if self._left == 0:
                    yield from self._end_body()
            elif self._state in (_IN_HELD, _IN_COMMAND):
                piece = view[position : position + self._left]
                position += len(piece)
                self._left -= len(piece)
                store = self._kept if self._state == _IN_HELD else self._command
                store += piece
                if self._left == 0:
                    yield from self._end_body()
            elif self._state == _IN_GREETING:
                piece = view[position : position + GREETING_SIZE - self._taken]
                position += len(piece)
                valid = self._valid_greeting(piece)
                if valid:
                    yield GreetingPart(bytes(piece[:valid]))
                    self._taken += valid
                if valid < len(piece):
                    self._fail("the greeting is not ZMTP 3 with the NULL mechanism")
                if self._taken == GREETING_SIZE:
                    self._state = _IN_HEADER
            else:
                raise ZmtpError(self._error)

    def _fail(self, text: str, kind: type[ZmtpError] = ZmtpError) -> None:
        self._state = _BROKEN
        self._error = text
        self._kept.clear()
        self._command.clear()
        self._frames.clear()
        self._header.clear()
        raise kind(text)

    def _valid_greeting(self, piece: memoryview) -> int:
        """Return how many bytes of ``piece`` agree with a ZMTP 3 NULL greeting."""
        for index, byte in enumerate(piece):
            at = self._taken + index
            good = (
                byte == 0xFF
                if at == 0
                else byte & 1 == 1
                if at == 9
                else byte >= 3
                if at == 10
                else byte == _MECHANISM[at - _MECHANISM_AT]
                if _MECHANISM_AT <= at < _MECHANISM_AT + len(_MECHANISM)
                else True
            )
            if not good:
                return index
        return len(piece)

    def _take_header(self, view: memoryview, position: int) -> int:
        """Read the flags and size of a frame; ``_left`` is -1 while they are incomplete."""
        header = self._header
        if not header:
            header.append(view[position])
            position += 1
            flags = header[0]
            if flags & ~(MORE | LONG | COMMAND) or (flags & COMMAND and flags & MORE):
                self._fail(f"a frame has the invalid flags 0x{flags:02x}")
            if not self.ready and not flags & COMMAND:
                self._fail("a message came before READY")
        need = (9 if header[0] & LONG else 2) - len(header)
        piece = view[position : position + need]
        header += piece
        if len(piece) < need:
            self._left = -1
        else:
            size = _LONG_SIZE.unpack_from(header, 1)[0] if header[0] & LONG else header[1]
            self._left = self._body_size = size
        return position + len(piece)

    def _begin_body(self) -> Iterator[Event]:
        """Check the announced frame against the bounds and choose what becomes of its body."""
        bounds, header, size = self._bounds, bytes(self._header), self._left
        self._header.clear()
        if header[0] & COMMAND:
            if size > bounds.command_bytes:
                self._fail(f"a command announces {size} bytes (limit {bounds.command_bytes})")
            self._command += header
            self._state = _IN_COMMAND
            return
        self._more = bool(header[0] & MORE)
        self._count += 1
        self._size += len(header) + size
        if self._size > bounds.message_bytes:
            self._fail(
                f"a message announces {self._size} bytes (limit {bounds.message_bytes})",
                MessageTooLong,
            )
        if self._count > bounds.frames:
            self._fail(f"a message has more than {bounds.frames} frames")
        if not self._streaming:
            if self._size <= bounds.hold_bytes and self._count <= bounds.hold_frames:
                self._kept += header
                self._state = _IN_HELD
                return
            self._streaming = True
            yield self._take_head(complete=False)
        self._state = _IN_STREAM
        yield Data(header)

    def _end_body(self) -> Iterator[Event]:
        """A frame's body is complete: emit what that completes."""
        state, self._state = self._state, _IN_HEADER
        if state == _IN_COMMAND:
            yield self._take_command()
            return
        if state == _IN_HELD:
            start = len(self._kept) - self._body_size
            self._frames.append(bytes(self._kept[start:]))
        if self._more:
            return
        size, self._size, self._count = self._size, 0, 0
        self.messages += 1
        if self._streaming:
            self._streaming = False
            yield End(size)
        else:
            yield self._take_head(complete=True)

    def _take_head(self, *, complete: bool) -> Head:
        head = Head(bytes(self._kept), tuple(self._frames), complete)
        self._kept.clear()
        self._frames.clear()
        return head

    def _take_command(self) -> Command:
        raw = bytes(self._command)
        self._command.clear()
        payload = raw[len(raw) - self._body_size :]
        if not payload or len(payload) < 1 + payload[0] or payload[0] == 0:
            self._fail("a command has no name")
        name = payload[1 : 1 + payload[0]]
        if self.ready == (name == b"READY") and name != b"ERROR":
            self._fail(f"the command {name[:32]!r} came out of order")
        if name == b"READY":
            self.ready = True
        return Command(raw, name, payload[1 + len(name) :])


def parse_properties(body: bytes) -> dict[bytes, bytes]:
    """Return the metadata of a READY command; names in lower case. Raises ZmtpError."""
    found: dict[bytes, bytes] = {}
    position = 0
    while position < len(body):
        name_end = position + 1 + body[position]
        value_at = name_end + _PROPERTY_SIZE.size
        if value_at > len(body):
            raise ZmtpError("READY metadata is cut short")
        (size,) = _PROPERTY_SIZE.unpack_from(body, name_end)
        if value_at + size > len(body):
            raise ZmtpError("READY metadata is cut short")
        found[body[position + 1 : name_end].lower()] = body[value_at : value_at + size]
        position = value_at + size
    return found


def encode_message(frames: Sequence[bytes]) -> bytes:
    """Return the wire bytes of one message. Raises ValueError without a frame."""
    if not frames:
        raise ValueError("frames: a message has at least one, got none")
    parts: list[bytes] = []
    for index, frame in enumerate(frames):
        parts.append(_frame_header(MORE if index < len(frames) - 1 else 0, len(frame)))
        parts.append(frame)
    return b"".join(parts)


def encode_command(name: bytes, body: bytes) -> bytes:
    """Return the wire bytes of one command."""
    payload = bytes([len(name)]) + name + body
    return _frame_header(COMMAND, len(payload)) + payload


def encode_ready(socket_type: bytes) -> bytes:
    """Return a READY command that names our socket type and an empty identity."""
    body = b"".join(
        bytes([len(name)]) + name + _PROPERTY_SIZE.pack(len(value)) + value
        for name, value in ((b"Socket-Type", socket_type), (b"Identity", b""))
    )
    return encode_command(b"READY", body)


def _frame_header(flags: int, size: int) -> bytes:
    if size > 255:
        return bytes([flags | LONG]) + _LONG_SIZE.pack(size)
    return bytes([flags, size])
