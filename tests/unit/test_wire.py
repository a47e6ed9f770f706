"""The frame format: round trip under any chunking, and refusal of what is not a frame."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_provisioner.errors import WireError
from kernel_provisioner.wire import MAX_FRAME, FrameReader, encode

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=10,
)
messages = st.lists(st.dictionaries(st.text(max_size=8), values, max_size=4), max_size=5)


@given(messages, st.integers(1, 50))
def test_any_chunking_gives_the_same_messages(sent: list[dict[str, object]], size: int) -> None:
    stream = b"".join(encode(message) for message in sent)
    reader = FrameReader()
    received = []
    for start in range(0, len(stream), size):
        received += reader.feed(stream[start : start + size])
    assert received == sent


@given(st.binary(max_size=300))
def test_garbage_raises_only_the_typed_error(data: bytes) -> None:
    reader = FrameReader()
    try:
        reader.feed(data)
    except WireError:
        return
    assert len(data) < 4 or struct.unpack(">I", data[:4])[0] <= MAX_FRAME


def test_a_length_over_the_limit_is_refused_before_its_body_arrives() -> None:
    with pytest.raises(WireError, match="announces 65537 bytes"):
        FrameReader().feed(struct.pack(">I", MAX_FRAME + 1))


@pytest.mark.parametrize("body", [b"[]", b"1", b"{", b"[" * 60000, b"\xff"])
def test_anything_but_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(WireError):
        FrameReader().feed(struct.pack(">I", len(body)) + body)


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(WireError, match="over the limit"):
        encode({"text": "x" * MAX_FRAME})
