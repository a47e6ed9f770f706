"""Validation of a hostile tar stream on the fly (spec J1): what may leave a sandbox.

Nothing of the stream is trusted: every size is checked before it is read, every wait has a
deadline, and any byte out of place raises ExportRefused. The parser is our own because the standard
library's reads extension headers of any size, skips damaged headers and treats sparse members as
regular files.
"""

from __future__ import annotations

import os
import select
import time
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO, Literal

from kernel_provisioner.errors import ExportRefused

BLOCK = 512
CHUNK = 256 * 1024
MAX_EXTENSION = 16 * 1024
"""Bytes of one pax or GNU long-name header; a path of 1024 bytes fits many times."""
MAX_TRAILER = 1024 * 1024
"""Bytes of zero padding after the end marker (GNU tar pads to 10 KiB records)."""
MAX_COMPONENT_BYTES = 255
MAX_PATH_BYTES = 1024
MAX_DEPTH = 16
MAX_DIRECTORIES = 256
MAX_FILES = 256
SUFFIXES = frozenset(
    {"csv", "tsv", "json", "jsonl", "parquet", "feather", "xlsx", "sqlite", "duckdb"}
    | {"png", "jpg", "svg", "pdf", "html", "md", "txt", "ipynb"}
)
REMEDY = "remove or rename it in /artifacts and run again."

_TYPES = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a FIFO",
    b"7": "a contiguous file",
    b"S": "a sparse file",
    b"K": "a link",
    b"U": "unreadable by its mode",
    b"Y": "a socket",
    b"g": "a global header",
}
_CHARSET = "hdrcharset"
_PAX_KEYS = frozenset(
    {"path", "size", "mtime", "atime", "ctime", "uid", "gid", "uname", "gname", "comment"}
    | {_CHARSET}
)
# Not category Cc, but they reorder or break the line that a name is shown on.
_REORDERING = frozenset(
    "\u2028\u2029\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)


@dataclass(frozen=True, slots=True)
class ExportLimits:
    """Bounds of one export. ``suffixes`` are lower case without a dot; sizes in bytes."""

    max_bytes: int
    files: int = MAX_FILES
    directories: int = MAX_DIRECTORIES
    depth: int = MAX_DEPTH
    suffixes: frozenset[str] = SUFFIXES


@dataclass(frozen=True, slots=True)
class Member:
    """One accepted entry. ``path`` has at least one component.

    ``data`` yields exactly ``size`` bytes; what is left unread is skipped by the next member.
    """

    path: tuple[str, ...]
    kind: Literal["file", "directory"]
    size: int
    data: Iterator[bytes] = field(compare=False)


class StreamReader:
    """Exact reads from a stream, each within one deadline (``time.monotonic()`` seconds).

    A stream with a file descriptor is read from the descriptor itself, so nothing may have been
    buffered from it; one without (``io.BytesIO``) cannot stall and is read directly.
    """

    def __init__(self, stream: BinaryIO, deadline: float | None = None) -> None:
        self._stream = stream
        self._deadline = deadline
        try:
            self._fd: int | None = stream.fileno()
        except (OSError, AttributeError):  # io.UnsupportedOperation is an OSError
            self._fd = None
        self._poll = select.poll()
        if self._fd is not None:
            self._poll.register(self._fd, select.POLLIN)

    def exactly(self, size: int) -> bytes:
        """Return ``size`` bytes. Raises ExportRefused if the stream ends or stalls before."""
        parts = []
        missing = size
        while missing:
            part = self.some(missing)
            if not part:
                raise ExportRefused(
                    "the artifact stream ended in the middle; nothing was published.",
                    remedy="run again; the sandbox may have been killed while it was read.",
                )
            parts.append(part)
            missing -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def some(self, limit: int) -> bytes:
        """Return 1 to ``limit`` bytes, or b"" at the end. Raises ExportRefused on a stall."""
        try:
            if self._fd is None:
                self._remaining()
                return self._stream.read(limit)
            while True:
                left = self._remaining()
                # Rounded up: a wait of 0 ms would spin until the deadline.
                if not self._poll.poll(None if left is None else int(left * 1000) + 1):
                    continue
                try:
                    return os.read(self._fd, limit)
                except BlockingIOError:
                    continue
        except (OSError, ValueError) as error:
            raise ExportRefused(
                f"the artifact stream cannot be read ({error}); nothing was published.",
                remedy="run again.",
            ) from None

    def check_deadline(self) -> None:
        """Raise ExportRefused if the deadline has passed."""
        self._remaining()

    def _remaining(self) -> float | None:
        if self._deadline is None:
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise ExportRefused(
                "the artifact stream did not end before its deadline; nothing was published.",
                remedy="write fewer or smaller artifacts, or allow more time.",
            )
        return left


def shown(name: bytes | str) -> str:
    """Return a hostile name quoted for a terminal: escaped, and cut at 120 characters."""
    text = name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else name
    return ascii(text) if len(text) <= 120 else f"{text[:120]!a}..."


def split_name(raw: bytes, *, depth: int = MAX_DEPTH) -> tuple[str, ...]:
    """Return the components of an entry's name; () is the root itself (``./``).

    A leading ``./`` and one trailing ``/`` are what tar programs write and mean nothing. Raises
    ExportRefused for every other name that is not a plain relative path.
    """
    if raw in (b".", b"./"):
        return ()
    if not raw:
        raise _refused(raw, "has an empty name")
    if len(raw) > MAX_PATH_BYTES:
        raise _refused(raw, f"has a name of {len(raw)} bytes; {MAX_PATH_BYTES} are allowed")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise _refused(raw, "has a name that is not UTF-8") from None
    if text.startswith("/"):
        raise _refused(raw, "has an absolute name")
    if any(unicodedata.category(char) == "Cc" or char in _REORDERING for char in text):
        raise _refused(raw, "has a control character in its name")
    parts = text.removeprefix("./").removesuffix("/").split("/")
    for part in parts:
        if part == "..":
            raise _refused(raw, "has '..' in its path")
        if part in ("", "."):
            raise _refused(raw, "has an empty or '.' component in its path")
        if len(part.encode()) > MAX_COMPONENT_BYTES:
            raise _refused(raw, f"has a component of over {MAX_COMPONENT_BYTES} bytes")
    if len(parts) > depth:
        raise _refused(raw, f"lies {len(parts)} levels deep; {depth} are allowed")
    return tuple(parts)


def check_file_type(kind: bytes, name: bytes) -> None:
    """Raise ExportRefused unless the type of an entry that is no directory is that of a file."""
    if kind not in (b"0", b"\0"):
        raise _refused(name, f"is {_TYPES.get(kind, f'of type {kind!r}')}, not a regular file")


class TreeRules:
    """What was accepted so far, and whether the next entry may join it. No I/O."""

    def __init__(self, limits: ExportLimits) -> None:
        self._limits = limits
        self._spelling: dict[str, tuple[str, ...]] = {}
        self._files: set[tuple[str, ...]] = set()
        self._directories: set[tuple[str, ...]] = set()
        self._explicit: set[tuple[str, ...]] = set()
        self._bytes = 0

    def add_directory(self, path: tuple[str, ...]) -> None:
        """Accept a directory entry or raise ExportRefused; () is the root."""
        name = "/".join(path) or "."
        if path in self._explicit:
            raise _refused(name, "appears twice")
        self._explicit.add(path)
        self._enter(path, name)

    def add_file(self, path: tuple[str, ...], size: int) -> None:
        """Accept a regular file of ``size`` bytes or raise ExportRefused."""
        name = "/".join(path)
        if not path:
            raise _refused(".", "is the root, but not a directory")
        suffix = path[-1].rpartition(".")[2].lower() if "." in path[-1][1:] else ""
        if suffix not in self._limits.suffixes:
            allowed = ", ".join(sorted(self._limits.suffixes))
            raise _refused(name, f"has a suffix that is not allowed ({allowed})")
        if path in self._files:
            raise _refused(name, "appears twice")
        if path in self._directories:
            raise _refused(name, "is a file and a directory")
        if len(self._files) >= self._limits.files:
            raise _refused(name, f"is one file too many; {self._limits.files} are allowed")
        if size > self._limits.max_bytes - self._bytes:
            raise _refused(
                name,
                f"has {size} bytes, with which the export is over its {self._limits.max_bytes} "
                "bytes",
            )
        self._enter(path[:-1], name)
        self._claim(path, name)
        self._files.add(path)
        self._bytes += size

    def _enter(self, path: tuple[str, ...], name: str) -> None:
        """Note a directory and its parents, whether or not they have entries of their own."""
        for depth in range(1, len(path) + 1):
            parent = path[:depth]
            if parent in self._directories:
                continue
            if parent in self._files:
                raise _refused(name, f"lies below {shown('/'.join(parent))}, which is a file")
            if len(self._directories) >= self._limits.directories:
                raise _refused(
                    name, f"needs one directory too many; {self._limits.directories} are allowed"
                )
            self._claim(parent, name)
            self._directories.add(parent)

    def _claim(self, path: tuple[str, ...], name: str) -> None:
        """Refuse a path that a case-insensitive or normalizing file system cannot tell apart."""
        key = "/".join(_caseless(part) for part in path)
        holder = self._spelling.setdefault(key, path)
        if holder != path:
            raise _refused(
                name,
                f"clashes with {shown('/'.join(holder))}: they differ only in case or in Unicode "
                "normalization",
            )


def read_members(reader: StreamReader, limits: ExportLimits) -> Iterator[Member]:
    """Yield the entries of an uncompressed ustar, pax or GNU tar stream, each already accepted.

    The iterator ends only after the end marker and the end of the stream: a caller who publishes
    must exhaust it. Raises ExportRefused naming the entry; reads at most the export's budget plus
    bounded headers.
    """
    rules = TreeRules(limits)
    while True:
        header = reader.exactly(BLOCK)
        if not any(header):
            break
        kind, name, size = _header(header)
        if kind in (b"x", b"L"):
            body = _extension(reader, name, size)
            header = reader.exactly(BLOCK)
            if not any(header):
                raise _refused(name, "is an extension header without an entry")
            inner, name, size = _header(header)
            if kind == b"L":
                name = body.rstrip(b"\0")
            else:
                name, size = _pax(body, name, size)
            if inner in (b"x", b"L"):
                raise _refused(name, "has more than one extension header")
            kind = inner
        if kind == b"5":
            if size:
                raise _refused(name, "is a directory with contents of its own")
            path = split_name(name, depth=limits.depth)
            rules.add_directory(path)
            if path:
                yield Member(path, "directory", 0, iter(()))
            continue
        check_file_type(kind, name)
        if name.endswith(b"/"):
            raise _refused(name, "is a file with the name of a directory")
        path = split_name(name, depth=limits.depth)
        rules.add_file(path, size)
        data = _data(reader, size)
        yield Member(path, "file", size, data)
        for _ in data:  # what the caller left unread
            pass
        padding = reader.exactly(-size % BLOCK)
        if any(padding):
            raise _refused(name, "is followed by bytes that belong to no entry")
    if any(reader.exactly(BLOCK)):
        raise ExportRefused("the artifact stream has a damaged end marker; nothing was published.")
    _trailer(reader)


def _header(block: bytes) -> tuple[bytes, bytes, int]:
    """Return (type, name, size) of one header block, its checksum verified."""
    stored = _octal(block[148:156])
    if stored is None or stored != sum(block) - sum(block[148:156]) + 8 * 32:
        raise ExportRefused("the artifact stream has a damaged header; nothing was published.")
    name = block[:100].partition(b"\0")[0]
    magic = block[257:265]
    if magic == b"ustar\x0000":
        prefix = block[345:500].partition(b"\0")[0]
        name = prefix + b"/" + name if prefix else name
    elif magic != b"ustar  \0":
        raise _refused(name, "is in a tar format that is not accepted (ustar, pax and GNU are)")
    size = _number(block[124:136])
    if size is None:
        raise _refused(name, "has a size that is not a number")
    return block[156:157], name, size


def _octal(raw: bytes) -> int | None:
    digits = raw.strip(b" \0")
    if not digits or digits.strip(b"01234567"):
        return None
    return int(digits, 8)


def _number(raw: bytes) -> int | None:
    """Return a size field: octal, or GNU base-256 (first byte 0x80) for a non-negative number."""
    return int.from_bytes(raw[1:], "big") if raw[0] == 0x80 else _octal(raw)


def _extension(reader: StreamReader, name: bytes, size: int) -> bytes:
    if size > MAX_EXTENSION:
        raise _refused(
            name, f"has an extension header of {size} bytes; {MAX_EXTENSION} are allowed"
        )
    body = reader.exactly(size)
    reader.exactly(-size % BLOCK)
    return body


def _pax(body: bytes, name: bytes, size: int) -> tuple[bytes, int]:
    """Return name and size after the records of a pax header ("LENGTH KEY=VALUE", newline)."""
    seen: set[str] = set()
    while body:
        digits, space, _ = body[:12].partition(b" ")
        length = int(digits) if space and digits.isdigit() else 0
        record = body[len(digits) + 1 : length]
        key_bytes, equals, value = record.partition(b"=")
        if length > len(body) or not equals or not value.endswith(b"\n"):
            raise _refused(name, "has a damaged pax header")
        value = value[:-1]
        key = key_bytes.decode("utf-8", "replace")
        if key.startswith("GNU.sparse"):
            raise _refused(name, "is a sparse file, not a regular file")
        if key == "linkpath":
            raise _refused(name, "is a link, not a regular file")
        if key not in _PAX_KEYS or key in seen:
            raise _refused(name, f"has the pax key {shown(key)}, which is not accepted here")
        seen.add(key)
        if key == "path":
            name = value
        elif key == "size":
            if not value.isdigit() or len(value) > 20:
                raise _refused(name, "has a size that is not a number")
            size = int(value)
        body = body[length:]
    if _CHARSET in seen:
        # What tar programs write for a name that is not UTF-8, which is the reason to tell.
        split_name(name)
        raise _refused(name, f"has the pax key {_CHARSET!r}, which is not accepted here")
    return name, size


def _data(reader: StreamReader, size: int) -> Iterator[bytes]:
    while size:
        chunk = reader.exactly(min(size, CHUNK))
        size -= len(chunk)
        yield chunk


def _trailer(reader: StreamReader) -> None:
    left = MAX_TRAILER
    while chunk := reader.some(BLOCK * 20):
        left -= len(chunk)
        if left < 0 or any(chunk):
            raise ExportRefused(
                "the artifact stream goes on after its end marker; nothing was published."
            )


def _caseless(text: str) -> str:
    """Canonical caseless form (Unicode Standard, D145), as normalizing file systems compare."""
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", text).casefold())


def _refused(name: bytes | str, reason: str) -> ExportRefused:
    return ExportRefused(f"artifact {shown(name)} {reason}; nothing was published.", remedy=REMEDY)
