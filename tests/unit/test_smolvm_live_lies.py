"""What the host makes of a microVM's agent that is not to be believed any more."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_provisioner import wire
from kernel_provisioner.engines.smolvm import connection, live
from kernel_provisioner.errors import ExportRefused, FreezeRefused, NoAnswer, StartFailed

_RECORD = struct.Struct(">cQdH")
_END = _RECORD.pack(b"\0", 0, 0.0, 0)


def record(name: bytes = b"a.csv", mtime: float = 1.0) -> bytes:
    return _RECORD.pack(b"0", 3, mtime, len(name)) + name


def test_a_listing_is_whole_or_refused() -> None:
    data = record() + record(b"\xff" * 2048) + _END
    assert [entry.name for entry in live.parse(data)] == [b"a.csv", b"\xff" * 2048]
    for size in range(len(data)):
        with pytest.raises(ExportRefused, match="ended in the middle"):
            live.parse(data[:size])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (record(mtime=float("nan")) + _END, "bound"),
        (record(mtime=float("inf")) + _END, "bound"),
        (record(b"a" * 2049) + _END, "bound"),
        (record() * 4097 + _END, "bound"),
        (record() + _END + b"x", "follows"),
    ],
)
def test_a_listing_beyond_its_bounds_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ExportRefused, match=why):
        live.parse(data)


@contextlib.contextmanager
def agent(place: Path, chunks: Iterator[bytes], *, closes: bool = True) -> Iterator[None]:
    """Answer one connection with ``chunks``; then close it, or keep it until the end."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen()
        over = threading.Event()

        def serve() -> None:
            peer, _ = listener.accept()
            with peer, contextlib.suppress(OSError):
                for chunk in chunks:
                    peer.sendall(chunk)
                if not closes:
                    over.wait()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(20)
            assert not thread.is_alive()


def test_an_endless_listing_is_cut_off(tmp_path: Path) -> None:
    with (
        agent(tmp_path / "agent", itertools.repeat(record() * 1000)),
        pytest.raises(ExportRefused, match="too long"),
    ):
        live.listing(tmp_path / "agent")


def test_a_listing_that_never_ends_costs_its_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_LISTING_S", 0.2)
    with (
        agent(tmp_path / "agent", iter([record()]), closes=False),
        pytest.raises(ExportRefused),
    ):
        live.listing(tmp_path / "agent")


def test_a_machine_that_is_gone_lists_nothing(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="lost with the VM"):
        live.listing(tmp_path / "agent")


def test_a_machine_that_takes_no_connection_is_not_taken_for_a_lost_one(tmp_path: Path) -> None:
    """Nor for one whose artifacts broke a rule: it may answer the next time (spec G4)."""
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as waiting:
        listener.bind(str(tmp_path / "agent"))
        listener.listen(0)
        while True:
            peer = waiting.enter_context(socket.socket(socket.AF_UNIX))
            peer.setblocking(False)
            try:
                peer.connect(str(tmp_path / "agent"))
            except BlockingIOError:
                break
        with pytest.raises(NoAnswer, match="takes no connection"):
            live.listing(tmp_path / "agent")
        with pytest.raises(NoAnswer):
            connection.open_artifacts(tmp_path / "agent")


class Peer:
    """An agent that answers what a test says; the frames go through the real encoding."""

    def __init__(self, *answers: dict[str, object]) -> None:
        self.answers = list(answers)
        self.asked: list[object] = []
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.still = live.Standstill(self.send, self.gone)

    def send(self, frame: object) -> None:
        assert isinstance(frame, dict)
        self.asked.append(frame["op"])
        (message,) = wire.FrameReader().feed(wire.encode(frame))
        hold = message.get("hold", 1)
        for answer in self.answers:
            if ("frozen" in answer) == (frame["op"] == "freeze"):
                said = {"hold": hold, **answer}
                asyncio.get_running_loop().call_soon(self.still.take, said)


def test_an_agent_that_is_silent_is_refused_and_told_to_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "HOLD_S", 0.1)
    monkeypatch.setattr(live, "_ANSWER_S", 0.1)

    async def scenario() -> None:
        # What it says of another hold is none.
        peer = Peer({"frozen": True, "hold": 0}, {"thawed": True, "late": False, "hold": 2})
        with pytest.raises(FreezeRefused, match="does not answer in time"):
            async with peer.still.frozen():
                raise AssertionError("nobody said that it stands")
        assert peer.asked == ["freeze", "thaw"]

    asyncio.run(scenario())


@pytest.mark.parametrize("frozen", [False, None, 1, "yes", []])
def test_what_is_no_yes_is_a_refusal(frozen: object) -> None:
    async def scenario() -> None:
        peer = Peer({"frozen": frozen, "why": "a\nb\x1b[2J" + "x" * 9999}, {"thawed": True})
        with pytest.raises(FreezeRefused) as refused:
            async with peer.still.frozen():
                raise AssertionError("it does not stand still")
        assert "a?b?[2J" in refused.value.message and len(refused.value.message) < 400
        assert peer.asked == ["freeze", "thaw"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "ended",
    [
        {"thawed": True, "late": True, "seconds": 1.0},
        {"thawed": True, "late": None, "seconds": float("nan")},
        {"thawed": True, "late": "no", "seconds": -1e308},
        {"thawed": True, "seconds": "long"},
        {"thawed": True, "late": [], "seconds": float("inf")},
    ],
)
def test_an_end_that_is_not_said_to_be_in_time_is_late(ended: dict[str, object]) -> None:
    async def scenario() -> None:
        peer = Peer({"frozen": True}, ended)
        async with peer.still.frozen() as hold:
            pass
        assert hold.late
        assert 0 <= hold.seconds < 60

    asyncio.run(scenario())


def test_a_machine_that_goes_while_it_is_held_makes_the_copy_late() -> None:
    async def scenario() -> None:
        peer = Peer({"frozen": True})
        async with peer.still.frozen() as hold:
            peer.gone.set_result(None)
        assert hold.late
        # From then on there is nothing to hold, and nobody to be asked in vain.
        async with asyncio.timeout(60), peer.still.frozen():
            pass

    asyncio.run(scenario())


def test_the_dead_stand_anyway() -> None:
    async def scenario() -> None:
        async with live.stands_anyway() as hold:
            assert hold.deadline > time.monotonic()
        assert not hold.late and hold.seconds >= 0

    asyncio.run(scenario())
