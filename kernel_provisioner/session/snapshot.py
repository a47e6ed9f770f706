"""Artifacts of a running guest (spec J2): copied while it stands still, judged while it goes on.

The tar stream goes into a file without a name; only that copying happens in the 2 s that a guest
may stand still. Validation, digests and publication work on the copy through the same gate as at
the end of a session. A copy that does not fit into the time is refused: it might be of two moments.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from kernel_provisioner.artifacts.tarstream import (
    CHUNK,
    ExportLimits,
    StreamReader,
    read_members,
    shown,
)
from kernel_provisioner.engines.base import Guest
from kernel_provisioner.errors import ExportRefused, NotFound

_HEADERS_BYTES = 32 * 1024 * 1024
"""Room for headers beside the contents: 4,096 entries, their long names included, take 12 MiB."""


_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A tar stream of one moment, unjudged, and how many seconds the guest stood still for it."""

    stream: BinaryIO
    frozen_s: float

    async def judged(self, job: Callable[[BinaryIO], _T]) -> _T:
        """Return what ``job`` makes of the copy in a thread."""
        own = _duplicate(self.stream)

        def run() -> _T:
            with own:
                return job(own)

        return await asyncio.to_thread(run)


@asynccontextmanager
async def snapshot(guest: Guest, scratch: Path, max_bytes: int) -> AsyncIterator[Snapshot]:
    """Copy /artifacts of a guest that stands still; the copy is gone afterwards.

    ``scratch`` is a directory of ours, ``max_bytes`` what the artifacts may hold. Raises
    FreezeRefused, ExportRefused (too slow, too much, no space), StartFailed.
    """
    with _unnamed(scratch) as copy:
        async with guest.frozen() as hold:
            room = max_bytes + _HEADERS_BYTES
            await asyncio.to_thread(_copy, guest.artifacts(), _duplicate(copy), room, hold.deadline)
        if hold.late:
            raise ExportRefused(
                "the artifacts could not be copied in the 2 s that a sandbox may be frozen; "
                "nothing was published.",
                remedy="try again, or write fewer or smaller artifacts.",
            )
        copy.seek(0)
        yield Snapshot(copy, hold.seconds)


def _unnamed(scratch: Path) -> BinaryIO:
    try:
        # Unbuffered: readers take bytes from the descriptor itself.
        file: BinaryIO = tempfile.TemporaryFile(dir=scratch, buffering=0)  # noqa: SIM115
    except OSError as error:
        raise _no_space(scratch, error) from None
    return file


def _duplicate(file: BinaryIO) -> BinaryIO:
    """Return the same file under a number of its own, for a thread to close.

    A cancelled export closes its files at once, and a thread that goes on must not meet another
    file under their numbers.
    """
    return open(os.dup(file.fileno()), "r+b", buffering=0)


def _no_space(scratch: Path, error: OSError) -> ExportRefused:
    return ExportRefused(
        f"the artifacts cannot be copied into {str(scratch)!r} ({error.strerror}); nothing was "
        "published.",
        remedy="free some space there.",
    )


def _copy(stream: BinaryIO, copy: BinaryIO, max_bytes: int, deadline: float) -> None:
    with stream, copy:
        reader = StreamReader(stream, deadline)
        left = max_bytes
        while chunk := reader.some(CHUNK):
            left -= len(chunk)
            if left < 0:
                raise ExportRefused("the artifact stream is too long; nothing was published.")
            _write_all(copy, chunk)


def _write_all(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as error:
        raise ExportRefused(
            f"the artifacts cannot be copied ({error.strerror}); nothing was published.",
            remedy="free some space for the product's state.",
        ) from None


@dataclass(frozen=True, slots=True)
class One:
    """One artifact's validated bytes in an unnamed file, which the caller closes."""

    file: BinaryIO
    size: int
    sha256: str


def pick(stream: BinaryIO, name: str, scratch: Path, limits: ExportLimits, deadline: float) -> One:
    """Return one artifact of a stream that is valid as a whole.

    ``deadline`` in CLOCK_MONOTONIC seconds. Raises ExportRefused naming the bad entry, NotFound.
    """
    file = _unnamed(scratch)
    digest = hashlib.sha256()
    size: int | None = None
    try:
        for member in read_members(StreamReader(stream, deadline), limits):
            if member.kind == "file" and "/".join(member.path) == name:
                size = member.size
                for chunk in member.data:
                    digest.update(chunk)
                    _write_all(file, chunk)
        if size is None:
            raise NotFound(
                f"there is no artifact {shown(name)} now.", remedy="list the artifacts again."
            )
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return One(file, size, digest.hexdigest())
