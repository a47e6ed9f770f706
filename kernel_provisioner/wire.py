"""The framing shared by the supervisor's control socket and the guest's attestation channel.

A frame is a u32 big-endian length of at most 64 KiB, then one JSON object in UTF-8. The reader
trusts nobody: lengths are checked before anything is buffered, and anything but an object is
refused. The guest has its own copy of the format (``guest/wire.py``); neither imports the other.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping

from kernel_provisioner.errors import WireError

VERSION = 1
MAX_FRAME = 65536
_HEAD = struct.Struct(">I")


def encode(message: Mapping[str, object]) -> bytes:
    """Return one frame. Raises WireError if the JSON text is over 64 KiB."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME:
        raise WireError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME}.")
    return _HEAD.pack(len(body)) + body


def decode(body: bytes) -> dict[str, object]:
    """Parse one frame's body. Raises WireError for anything but a JSON object."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise WireError(f"a frame is not JSON ({type(error).__name__}).") from None
    if not isinstance(message, dict):
        raise WireError("a frame is not a JSON object.")
    return message


class FrameReader:
    """Incremental parser: feed bytes, take whole messages. Holds at most one partial frame."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, object]]:
        """Return the messages completed by ``data``. Raises WireError on a broken frame."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._buffer)
            if size > MAX_FRAME:
                raise WireError(f"a frame announces {size} bytes; the limit is {MAX_FRAME}.")
            end = _HEAD.size + size
            if len(self._buffer) < end:
                break
            messages.append(decode(bytes(self._buffer[_HEAD.size : end])))
            del self._buffer[:end]
        return messages


def send(sock: socket.socket, message: Mapping[str, object]) -> None:
    """Send one frame on a blocking socket (its timeout applies). Raises OSError."""
    sock.sendall(encode(message))
