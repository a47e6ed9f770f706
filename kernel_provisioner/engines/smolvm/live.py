"""Looks at the artifacts of a microVM that runs: holds it still by its agent, and lists.

After user code ran nothing of the guest is believed. That it stands still is its own assurance: a
subverted guest kernel could as well make up the files. But every wait here is bounded, a listing is
bounded in bytes and time before it is parsed, and what it holds is judged by the callers.
"""

from __future__ import annotations

import asyncio
import math
import struct
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kernel_provisioner.engines.base import Hold, Listed
from kernel_provisioner.engines.bwrap import waiting
from kernel_provisioner.engines.bwrap.export import MAX_ENTRIES
from kernel_provisioner.engines.bwrap.freezer import HOLD_S
from kernel_provisioner.engines.smolvm import connection
from kernel_provisioner.errors import ExportRefused, FreezeRefused

_ANSWER_S = 5.0
"""How long beyond the hold the agent's answers may take: it is scheduled late on a busy host."""
_LISTING_S = 5.0
_MAX_NAME = 2048
_RECORD = struct.Struct(">cQdH")
_MAX_LISTING = (MAX_ENTRIES + 1) * (_RECORD.size + _MAX_NAME)
_REASON_CHARS = 200


class Standstill:
    """Has the agent stop the enclosure. ``gone`` is done when the machine is."""

    def __init__(
        self, send: Callable[[Mapping[str, object]], None], gone: asyncio.Future[None]
    ) -> None:
        self._send = send
        self._gone = gone
        self._number = 0
        self._awaited: tuple[str, asyncio.Future[Mapping[str, Any]]] | None = None

    def take(self, message: Mapping[str, Any]) -> None:
        """Take a frame of the agent; what nobody waits for, or of an earlier hold, is dropped."""
        if self._awaited is not None and message.get("hold") == self._number:
            name, answer = self._awaited
            if name in message and not answer.done():
                answer.set_result(message)

    @asynccontextmanager
    async def frozen(self) -> AsyncIterator[Hold]:
        """See engines.base.Guest. One at a time; the caller sees to that."""
        self._number += 1
        number = self._number
        began = time.monotonic()
        hold = Hold(deadline=began + HOLD_S)
        deadline = began + HOLD_S + _ANSWER_S
        self._send({"op": "freeze", "hold": number, "seconds": HOLD_S})
        try:
            said = await self._heard("frozen", deadline)
            if said is not None and said["frozen"] is not True:
                raise _refused(str(said.get("why")))
        except BaseException:
            # A hold that was refused may have nobody who would answer.
            self._send({"op": "thaw"})
            raise
        try:
            yield hold
        finally:
            self._send({"op": "thaw"})
            ended = await self._heard("thawed", deadline)
            hold.seconds = time.monotonic() - began
            # A machine that is gone may have gone while it was read.
            hold.late = ended is None or ended.get("late") is not False
            stood = None if ended is None else ended.get("seconds")
            if isinstance(stood, float) and 0 <= stood < hold.seconds:
                hold.seconds = stood  # without the way of the answers

    async def _heard(self, name: str, deadline: float) -> Mapping[str, Any] | None:
        """Return the agent's answer; None if the machine is gone. Says ``False`` for silence."""
        answer: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._awaited = name, answer
        try:
            waiting_for: set[asyncio.Future[Any]] = {answer, self._gone}
            done, _ = await asyncio.wait(
                waiting_for,
                timeout=waiting.left(deadline),
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            self._awaited = None
        if answer in done:
            return answer.result()
        return None if done else {name: False, "why": "its agent does not answer in time"}


@asynccontextmanager
async def stands_anyway() -> AsyncIterator[Hold]:
    """Hold a guest whose processes are all dead."""
    began = time.monotonic()
    hold = Hold(deadline=began + HOLD_S)
    try:
        yield hold
    finally:
        hold.seconds = time.monotonic() - began


def _refused(why: str) -> FreezeRefused:
    reason = "".join(c if c.isprintable() else "?" for c in why[:_REASON_CHARS])
    return FreezeRefused(
        f"the guest cannot be frozen ({reason}); nothing was published.",
        remedy="fetch what is small by a cell's output; `backintel run` exports at its end.",
    )


def listing(agent: Path) -> list[Listed]:
    """Ask the agent at ``agent`` what is in /artifacts; blocks, for seconds at most.

    Raises StartFailed if the guest is gone, NoAnswer if it takes no question, ExportRefused if its
    answer is too slow, too long or not one.
    """
    # Imported when it is asked for: a start does not wait for what most sessions never use.
    from kernel_provisioner.artifacts.tarstream import CHUNK, StreamReader

    data = bytearray()
    with connection.open_listing(agent) as stream:
        reader = StreamReader(stream, waiting.deadline_in(_LISTING_S))
        while chunk := reader.some(CHUNK):
            data += chunk
            if len(data) > _MAX_LISTING:
                raise _unlistable("it is too long")
    return parse(bytes(data))


def parse(data: bytes) -> list[Listed]:
    """Return the entries of a listing. Raises ExportRefused unless it is one, whole and bounded."""
    found: list[Listed] = []
    at = 0
    while True:
        if len(data) < at + _RECORD.size:
            raise _unlistable("it ended in the middle")
        kind, size, mtime, length = _RECORD.unpack_from(data, at)
        at += _RECORD.size
        if length == 0:
            break
        name = data[at : at + length]
        at += length
        if len(name) < length:
            raise _unlistable("it ended in the middle")
        if length > _MAX_NAME or not math.isfinite(mtime) or len(found) == MAX_ENTRIES:
            raise _unlistable("it breaks a bound")
        found.append(Listed(name, kind, size, mtime))
    if at < len(data):
        raise _unlistable("something follows its end")
    return found


def _unlistable(why: str) -> ExportRefused:
    return ExportRefused(
        f"the microVM's list of artifacts cannot be read: {why}.", remedy="list them again."
    )
