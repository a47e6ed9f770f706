"""The guest's side of the wire format: u32 big-endian length of at most 64 KiB, one JSON object.

A copy of the host's format on purpose: neither side imports the other. The peer is the host's
supervisor, which is trusted; only the size is checked.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping

VERSION = 1
MAX_FRAME = 65536
_HEAD = struct.Struct(">I")


class WireError(Exception):
    """The peer closed the connection or broke the framing."""


def send(sock: socket.socket, message: Mapping[str, object]) -> None:
    """Send one frame. Raises WireError if it is over 64 KiB, OSError if the peer is gone."""
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME:
        raise WireError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME}.")
    sock.sendall(_HEAD.pack(len(body)) + body)


def receive(sock: socket.socket) -> dict[str, object]:
    """Wait for one frame. Raises WireError at end of file or for anything but a JSON object."""
    (size,) = _HEAD.unpack(_exactly(sock, _HEAD.size))
    if size > MAX_FRAME:
        raise WireError(f"a frame announces {size} bytes; the limit is {MAX_FRAME}.")
    message = json.loads(_exactly(sock, size))
    if not isinstance(message, dict):
        raise WireError("a frame is not a JSON object.")
    return message


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise WireError("the host closed the control connection.")
        data += chunk
    return bytes(data)
