"""The frame parser: valid traffic, every refusal, any chunking, and garbage (spec H3)."""

from __future__ import annotations

import contextlib
import itertools
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_provisioner.session.relay.zmtp import (
    GREETING,
    Command,
    Data,
    End,
    Event,
    FrameParser,
    GreetingPart,
    Head,
    ParserBounds,
    ZmtpError,
    encode_command,
    encode_message,
    encode_ready,
    parse_properties,
)

SMALL = ParserBounds(
    message_bytes=4096, frames=12, hold_bytes=300, hold_frames=6, command_bytes=128
)
OPENING = GREETING + encode_ready(b"DEALER")


def run(chunks: list[bytes], bounds: ParserBounds = SMALL) -> tuple[list[Event], str]:
    """Feed chunks; return the events with neighbours of a kind merged, and the error if any."""
    parser = FrameParser(bounds)
    events: list[Event] = []
    error = ""
    for chunk in chunks:
        try:
            for event in parser.feed(chunk):
                if isinstance(event, Data):
                    event = Data(bytes(event.data))
                last = events[-1] if events else None
                if isinstance(event, GreetingPart) and isinstance(last, GreetingPart):
                    events[-1] = GreetingPart(last.data + event.data)
                elif isinstance(event, Data) and isinstance(last, Data):
                    events[-1] = Data(bytes(last.data) + bytes(event.data))
                else:
                    events.append(event)
        except ZmtpError as caught:
            error = str(caught)
            break
        assert parser.buffered <= bounds.hold_bytes + bounds.command_bytes + 18
    return events, error


def forwarded(events: list[Event]) -> bytes:
    parts = []
    for event in events:
        if isinstance(event, GreetingPart | Data):
            parts.append(bytes(event.data))
        elif isinstance(event, Head | Command):
            parts.append(event.raw)
    return b"".join(parts)


def test_opening() -> None:
    events, error = run([OPENING])
    assert not error
    greeting, ready = events
    assert greeting == GreetingPart(GREETING)
    assert isinstance(ready, Command)
    assert ready.name == b"READY"
    assert parse_properties(ready.body) == {b"socket-type": b"DEALER", b"identity": b""}


def test_greeting_is_passed_on_byte_by_byte() -> None:
    parser = FrameParser(SMALL)
    for byte in GREETING:
        assert list(parser.feed(bytes([byte]))) == [GreetingPart(bytes([byte]))]


def test_small_message_is_one_head() -> None:
    frames = (b"a", b"", b"b" * 200)
    events, error = run([OPENING, encode_message(frames)])
    assert not error
    assert events[2:] == [Head(encode_message(frames), frames, True)]


def test_large_frame_is_streamed_after_its_head() -> None:
    wire = encode_message([b"a", b"b", b"c" * 1000, b"d"])
    events, error = run([OPENING, wire])
    assert not error
    assert events[2:] == [
        Head(wire[:6], (b"a", b"b"), False),
        Data(wire[6:]),
        End(len(wire)),
    ]


def test_many_frames_are_streamed_after_the_held_ones() -> None:
    wire = encode_message([b"x"] * 8)
    events, _ = run([OPENING, wire])
    head = events[2]
    assert isinstance(head, Head)
    assert (len(head.frames), head.complete) == (6, False)
    assert forwarded(events) == OPENING + wire


def test_command_between_frames_of_a_message() -> None:
    ping = encode_command(b"PING", b"\0\0")
    first, rest = encode_message([b"a", b"b"])[:3], encode_message([b"a", b"b"])[3:]
    events, error = run([OPENING, first + ping + rest])
    assert not error
    assert events[2:] == [
        Command(ping, b"PING", b"\0\0"),
        Head(first + rest, (b"a", b"b"), True),
    ]


def test_boundary_and_partial() -> None:
    parser = FrameParser(SMALL)
    assert (parser.at_boundary, parser.partial) == (False, True)
    list(parser.feed(OPENING))
    assert (parser.at_boundary, parser.partial) == (True, False)
    wire = encode_message([b"a" * 1000])
    list(parser.feed(wire[:5]))
    assert (parser.at_boundary, parser.partial) == (True, True)  # nothing was emitted of it
    list(parser.feed(wire[5:500]))
    assert (parser.at_boundary, parser.partial, parser.streaming) == (False, True, True)
    list(parser.feed(wire[500:]))
    assert (parser.at_boundary, parser.partial, parser.messages) == (True, False, 1)


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        (b"\xfe", "greeting"),
        (b"\xff" + bytes(8) + b"\x7e", "greeting"),
        (GREETING[:10] + b"\x01", "greeting"),
        (GREETING[:12] + b"CURVE" + bytes(15), "greeting"),
        (GREETING + encode_message([b"a"]), "before READY"),
        (GREETING + encode_command(b"PING", b""), "out of order"),
        (OPENING + encode_ready(b"DEALER"), "out of order"),
        (OPENING + b"\x08\x00", "invalid flags"),
        (OPENING + b"\x80\x00", "invalid flags"),
        (OPENING + b"\x05\x00", "invalid flags"),
        (OPENING + b"\x04\x00", "no name"),
        (OPENING + b"\x04\x01\x00", "no name"),
        (OPENING + b"\x04\x02\x05A", "no name"),
        (OPENING + b"\x06" + struct.pack(">Q", 129), "command announces"),
        (OPENING + b"\x02" + struct.pack(">Q", 4096), "message announces"),
        (OPENING + b"\x02" + b"\xff" * 8, "message announces"),
        (OPENING + b"\x01\x00" * 13, "more than 12 frames"),
        (OPENING + (b"\x03" + struct.pack(">Q", 2000) + bytes(2000)) * 3, "message announces"),
    ],
)
def test_refused(wire: bytes, text: str) -> None:
    events, error = run([wire])
    assert text in error
    again = run([bytes([byte]) for byte in wire])
    assert again == (events, error)


def test_error_is_permanent() -> None:
    parser = FrameParser(SMALL)
    for chunk in (b"\x00", GREETING):
        with pytest.raises(ZmtpError, match="greeting"):
            list(parser.feed(chunk))
    assert parser.buffered == 0


def test_giant_frame_is_refused_before_a_byte_of_it_is_kept() -> None:
    parser = FrameParser(ParserBounds())
    with pytest.raises(ZmtpError, match="limit 268435456"):
        list(parser.feed(OPENING + b"\x02" + struct.pack(">Q", 2**62)))
    assert parser.buffered == 0


@pytest.mark.parametrize("body", [b"\x05ab", b"\x01a\x00\x00", b"\x01a\x00\x00\x00\x05bc"])
def test_cut_properties_are_refused(body: bytes) -> None:
    with pytest.raises(ZmtpError, match="cut short"):
        parse_properties(body)


def test_encode_message_needs_a_frame() -> None:
    with pytest.raises(ValueError, match="frames"):
        encode_message([])


frames_lists = st.lists(st.binary(max_size=400), min_size=1, max_size=10)
items = st.one_of(
    frames_lists.map(encode_message),
    st.binary(max_size=60).map(lambda body: encode_command(b"PING", body)),
)


def cut(data: bytes, points: list[int]) -> list[bytes]:
    places = sorted({min(point, len(data)) for point in points} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(places)]


@given(st.lists(items, max_size=5), st.lists(st.integers(0, 5000), max_size=30))
def test_chunking_makes_no_difference(parts: list[bytes], points: list[int]) -> None:
    wire = OPENING + b"".join(parts)
    whole = run([wire])
    assert run(cut(wire, points)) == whole
    if not whole[1]:
        assert forwarded(whole[0]) == wire


@given(frames_lists)
def test_what_is_encoded_is_parsed(frames: list[bytes]) -> None:
    events, error = run([OPENING, encode_message(frames)], ParserBounds())
    assert not error
    assert events[2:] == [Head(encode_message(frames), tuple(frames), True)]


@settings(max_examples=300)
@given(
    st.sampled_from([b"", GREETING[:12], GREETING, OPENING]),
    st.binary(max_size=3000),
    st.lists(st.integers(0, 3000), max_size=20),
)
def test_garbage_raises_only_the_typed_error_within_the_bound(
    start: bytes, garbage: bytes, points: list[int]
) -> None:
    wire = start + garbage
    events, error = run(cut(wire, points))  # run() asserts the bound after each chunk
    assert run([wire]) == (events, error)
    assert wire.startswith(forwarded(events)) or any(isinstance(e, Command) for e in events[2:])


@given(st.binary(max_size=200))
def test_properties_of_garbage(body: bytes) -> None:
    with contextlib.suppress(ZmtpError):
        parse_properties(body)
