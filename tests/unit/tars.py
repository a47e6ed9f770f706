"""Tar streams for tests: well-formed ones by the standard library, hostile ones byte by byte."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping

END = b"\0" * 1024


def header(
    name: bytes, *, size: int = 0, kind: bytes = b"0", magic: bytes = b"ustar\x0000"
) -> bytes:
    """Return one header block with a right checksum, whatever its fields say."""
    block = bytearray(512)
    block[: min(len(name), 100)] = name[:100]
    block[100:108] = b"0000644\0"
    block[124:136] = b"%011o\0" % size
    block[136:148] = b"00000000000\0"
    block[156:157] = kind
    block[257:265] = magic
    return sealed(block)


def sealed(block: bytes | bytearray) -> bytes:
    """Return the block with its checksum made right."""
    block = bytearray(block)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(data: bytes) -> bytes:
    """Return data filled up to whole blocks."""
    return data + b"\0" * (-len(data) % 512)


def file(name: bytes, data: bytes = b"") -> bytes:
    """Return one regular file as an entry."""
    return header(name, size=len(data)) + padded(data)


def record(key: bytes, value: bytes) -> bytes:
    """Return one pax record."""
    body = b" " + key + b"=" + value + b"\n"
    length = len(body)
    while length != len(body) + len(str(length)):
        length = len(body) + len(str(length))
    return str(length).encode() + body


def pax(*records: tuple[bytes, bytes]) -> bytes:
    """Return a pax extension header."""
    body = b"".join(record(key, value) for key, value in records)
    return header(b"pax", size=len(body), kind=b"x") + padded(body)


def gnu_name(name: bytes) -> bytes:
    """Return a GNU long-name header."""
    body = name + b"\0"
    return header(b"././@LongLink", size=len(body), kind=b"L", magic=b"ustar  \0") + padded(body)


def tree(files: Mapping[str, bytes], *, form: int = tarfile.PAX_FORMAT) -> bytes:
    """Return a stream as the standard library writes it."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return stream.getvalue()
