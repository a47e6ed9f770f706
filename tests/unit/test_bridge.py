"""The bridge between a guest's listeners and real stores on loopback TCP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from kernel_provisioner.engines.base import EndpointListener, GuestEndpoint
from kernel_provisioner.session import bridge
from kernel_provisioner.session.bridge import MAX_CONNECTIONS, Bridge

WITHIN_S = 30
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]


class Bridged:
    """A bridge from a Unix socket, as a microVM's is, to a port of this host."""

    def __init__(self, path: Path, port: int, *, framed: bool = False) -> None:
        self.path = path
        self._framed = framed
        self.told: list[str] = []
        self._clients: list[asyncio.StreamWriter] = []
        self.bridge = Bridge(
            [GuestEndpoint("store", "localhost", "127.0.0.1", port)], self.told.append
        )

    async def open(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.setblocking(False)
        listener.bind(str(self.path))
        listener.listen(64)
        await self.bridge.start({"store": EndpointListener(listener, self._framed)})

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        self._clients.append(writer)
        return reader, writer

    async def close(self) -> None:
        await self.bridge.close()
        for writer in self._clients:
            _abort(writer)

    @property
    def uses(self) -> dict[str, int]:
        return dict(self.bridge.uses()["store"])


@contextlib.asynccontextmanager
async def bridged(tmp_path: Path, serve: Serve, *, framed: bool = False) -> AsyncIterator[Bridged]:
    stores: list[tuple[asyncio.Task[None], asyncio.StreamWriter]] = []

    def serving(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stores.append((asyncio.ensure_future(serve(reader, writer)), writer))

    store = await asyncio.start_server(serving, "127.0.0.1", 0)
    made = Bridged(tmp_path / "e-0", store.sockets[0].getsockname()[1], framed=framed)
    await made.open()
    try:
        async with asyncio.timeout(WITHIN_S):
            yield made
    finally:
        await made.close()
        store.close()
        for task, writer in stores:
            task.cancel()
            _abort(writer)
        if stores:
            await asyncio.wait({task for task, _ in stores})
        # What was aborted is closed in the loop's next turns.
        await asyncio.sleep(0)
        await asyncio.sleep(0)


def _abort(writer: asyncio.StreamWriter) -> None:
    if writer.get_extra_info("socket").fileno() >= 0:
        writer.transport.abort()


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(await reader.read())
    writer.close()


def test_bytes_and_ends_pass_both_ways_and_are_counted(tmp_path: Path) -> None:
    async def body() -> None:
        async with bridged(tmp_path, _echo) as made:
            reader, writer = await made.connect()
            sent = bytes(range(256)) * 40_000  # more than any buffer on the way
            writer.write(sent)
            writer.write_eof()
            assert await reader.read() == sent
            writer.close()
            await made.bridge.close()
            assert made.uses == {
                "connections": 1,
                "refused": 0,
                "failed": 0,
                "sent_bytes": len(sent),
                "received_bytes": len(sent),
            }
            assert made.told == []

    asyncio.run(body())


def test_the_33rd_connection_is_refused_and_a_later_one_is_not(tmp_path: Path) -> None:
    async def body() -> None:
        ended = asyncio.Event()

        async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"!")
            await reader.read()
            writer.close()
            ended.set()

        async with bridged(tmp_path, hold) as made:
            held = [await made.connect() for _ in range(MAX_CONNECTIONS)]
            for reader, _ in held:
                assert await reader.readexactly(1) == b"!"
            for _ in range(2):
                reader, _ = await made.connect()
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            assert made.uses["refused"] == 2
            assert len(made.told) == 1
            assert "32 connections" in made.told[0]
            reader, writer = held.pop()
            writer.close()
            await ended.wait()
            while len(made.bridge._open) == MAX_CONNECTIONS:
                await asyncio.sleep(0)
            reader, _ = await made.connect()
            assert await reader.readexactly(1) == b"!"

    asyncio.run(body())


def test_a_store_that_is_not_there_closes_the_connection_and_is_told_once(tmp_path: Path) -> None:
    async def body() -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            made = Bridged(tmp_path / "e-0", closed.getsockname()[1])
            await made.open()
            async with asyncio.timeout(WITHIN_S):
                for _ in range(3):
                    reader, _ = await made.connect()
                    with contextlib.suppress(ConnectionResetError):
                        assert await reader.read() == b""
            await made.close()
            assert made.uses["failed"] == 3
            (told,) = made.told
            assert "connection refused" in told
            assert f"store (localhost:{closed.getsockname()[1]})" in told

    asyncio.run(body())


def test_a_store_that_does_not_accept_in_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue is full: the host's kernel answers nothing."""
    monkeypatch.setattr(bridge, "CONNECT_S", 0.05)

    async def body() -> None:
        with socket.socket() as deaf, contextlib.ExitStack() as waiting:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen(0)
            for _ in range(4):
                one = waiting.enter_context(socket.socket())
                one.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    one.connect(deaf.getsockname())
            made = Bridged(tmp_path / "e-0", deaf.getsockname()[1])
            await made.open()
            async with asyncio.timeout(WITHIN_S):
                reader, _ = await made.connect()
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            await made.close()
            assert made.uses["failed"] == 1
            assert "did not answer" in made.told[0]

    asyncio.run(body())


def test_a_store_that_breaks_off_ends_the_guests_connection(tmp_path: Path) -> None:
    async def body() -> None:
        async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(1)
            writer.transport.abort()

        async with bridged(tmp_path, break_off) as made:
            reader, writer = await made.connect()
            writer.write(b"x")
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""

    asyncio.run(body())


def test_a_store_that_does_not_read_holds_up_one_connection_alone(tmp_path: Path) -> None:
    """The guest's side is read up to the bound, then no more: memory of the host is bounded."""

    async def body() -> None:
        stuck = asyncio.Event()
        first = True

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal first
            if first:
                first = False
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await stuck.wait()
                writer.transport.abort()
            else:
                await _echo(reader, writer)

        async with bridged(tmp_path, serve) as made:
            _, deaf = await made.connect()
            deaf.write(bytes(64 << 20))
            reader, writer = await made.connect()
            writer.write(b"still here")
            writer.write_eof()
            assert await reader.read() == b"still here"
            left = deaf.transport.get_write_buffer_size()
            assert left > (64 << 20) - 4 * bridge._AHEAD
            stuck.set()

    asyncio.run(body())


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(4) + data


_ENDED = b"\xff" * 4


def test_in_frames_the_ends_are_told_and_the_guests_side_closes(tmp_path: Path) -> None:
    async def body() -> None:
        async with bridged(tmp_path, _echo, framed=True) as made:
            reader, writer = await made.connect()
            sent = bytes(range(256)) * 256
            writer.write(_frame(sent) + _frame(b"more") + _frame(b""))
            taken = (0x80000000 | 65536).to_bytes(4)
            assert await reader.readexactly(8) == taken + _ENDED
            answer = b""
            while length := int.from_bytes(await reader.readexactly(4)):
                answer += await reader.readexactly(length)
            assert answer == sent + b"more"
            assert made.uses["connections"] == 1
            # Until this side has said so, it may not have all: the connection stays.
            assert len(made.bridge._open) == 1
            writer.write(_ENDED)
            writer.write_eof()
            assert await reader.read() == b""
            assert made.uses["received_bytes"] == made.uses["sent_bytes"] == len(answer)

    asyncio.run(body())


@pytest.mark.parametrize(
    "sent",
    [
        (65537).to_bytes(4) + bytes(65537),
        (0xFFFFFFFE).to_bytes(4),
        _ENDED * 2 + _frame(b"x"),
        _frame(b"x") + b"\0\0",
        _frame(b"x") + (5).to_bytes(4) + b"abc",
        _frame(b"") + _frame(b"late"),
        _frame(b"") + _ENDED * 2,
    ],
    ids=["too long", "no length", "ended twice", "half a length", "half a frame", "after", "again"],
)
def test_what_is_no_frame_ends_the_connection_alone(tmp_path: Path, sent: bytes) -> None:
    async def body() -> None:
        async with bridged(tmp_path, _echo, framed=True) as made:
            reader, writer = await made.connect()
            writer.write(sent)
            writer.write_eof()
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            while made.bridge._open:
                await asyncio.sleep(0)
            reader, writer = await made.connect()
            writer.write(_frame(b"still here") + _frame(b""))
            assert await reader.readexactly(4 + 14) == _ENDED + _frame(b"still here")

    asyncio.run(body())


def test_tiny_frames_do_not_hold_up_the_loop(tmp_path: Path) -> None:
    """What has come is read without a wait: a cell's deadline must not wait for it."""

    async def body() -> None:
        async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while await reader.read(65536):
                continue
            writer.close()

        async with bridged(tmp_path, swallow, framed=True) as made:
            _, writer = await made.connect()
            turns = 0
            writer.write(_frame(b"x") * 20_000 + _frame(b""))
            while made.uses["sent_bytes"] < 20_000:
                await asyncio.sleep(0)
                turns += 1
            assert turns >= 20_000 / 2

    asyncio.run(body())


def test_clients_that_close_before_the_answer_keep_no_place(tmp_path: Path) -> None:
    async def body() -> None:
        async with bridged(tmp_path, _echo) as made:
            for _ in range(2 * MAX_CONNECTIONS):
                _, writer = await made.connect()
                writer.write(b"last words")
                writer.close()
            while made.bridge._open:
                await asyncio.sleep(0)
            reader, writer = await made.connect()
            writer.write(b"x")
            writer.write_eof()
            assert await reader.read() == b"x"

    asyncio.run(body())


@pytest.mark.parametrize("framed", [False, True])
def test_clients_that_gave_up_on_a_store_that_hangs_make_room(tmp_path: Path, framed: bool) -> None:
    async def body() -> None:
        over = asyncio.Event()
        asked = 0

        async def hang(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal asked
            asked += 1
            if asked <= 40:
                await over.wait()
            else:
                writer.write(b"!")
            writer.close()

        async with bridged(tmp_path, hang, framed=framed) as made:
            for number in range(40):
                _, writer = await made.connect()
                writer.write(_frame(b"?") + _frame(b"") if framed else b"?")
                writer.write_eof()
                while made.uses["sent_bytes"] <= number or asked <= number:
                    await asyncio.sleep(0)
            assert made.uses["refused"] == 0
            assert made.told and all("had ended its part" in text for text in made.told)
            reader, _ = await made.connect()
            assert await reader.readexactly(5 if framed else 1) in (b"!", _frame(b"!"))
            over.set()

    asyncio.run(body())


def test_nothing_stays_in_the_kernel_for_a_store_that_does_not_read(tmp_path: Path) -> None:
    """What waits is dropped at the end: else it stayed for as long as the store lives."""

    async def body() -> None:
        with socket.create_server(("127.0.0.1", 0)) as store:
            store.setblocking(False)
            port = store.getsockname()[1]
            made = Bridged(tmp_path / "e-0", port)
            await made.open()
            async with asyncio.timeout(WITHIN_S):
                _, writer = await made.connect()
                writer.write(bytes(8 << 20))
                accepted, _ = await asyncio.get_running_loop().sock_accept(store)
                with accepted:
                    before = -1
                    while made.uses["sent_bytes"] != before:
                        before = made.uses["sent_bytes"]
                        await asyncio.sleep(0.1)
                    assert before < 8 << 20
                    await made.close()
                    sockets = Path("/proc/net/tcp").read_text().splitlines()[1:]
                    ours = [line.split()[3] for line in sockets if f":{port:04X} " in line]
                    # The listener (0A), and perhaps the reset one of the store (07): no sender.
                    assert set(ours) <= {"0A", "07"}

    asyncio.run(body())


def test_a_name_server_that_does_not_answer_holds_up_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        answer = threading.Event()

        def asked(*_: object, **__: object) -> list[object]:
            answer.wait(WITHIN_S)
            return []

        made = Bridged(tmp_path / "e-0", 80)
        await made.open()
        monkeypatch.setattr(socket, "getaddrinfo", asked)
        try:
            async with asyncio.timeout(WITHIN_S):
                clients = [await made.connect() for _ in range(MAX_CONNECTIONS)]
                while len(made.bridge._open) < len(clients):
                    await asyncio.sleep(0)
                assert await asyncio.to_thread(lambda: 42) == 42
                await made.close()
                assert not made.bridge._open
        finally:
            answer.set()

    asyncio.run(body())


def test_the_first_address_that_answers_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        def two(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
            places = [("127.0.0.9", port), ("127.0.0.1", port)]
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]

        async with bridged(tmp_path, _echo) as made:
            monkeypatch.setattr(socket, "getaddrinfo", two)
            reader, writer = await made.connect()
            writer.write(b"x")
            writer.write_eof()
            assert await reader.read() == b"x"

    asyncio.run(body())


def test_notices_come_to_an_end_that_is_told(tmp_path: Path) -> None:
    made = Bridged(tmp_path / "e-0", 80)
    endpoint = GuestEndpoint("store", "localhost", "127.0.0.1", 80)
    for number in range(20):
        made.bridge._explain(endpoint, f"reason {number // 2}")
        made.bridge._explain(endpoint, f"reason {number // 2}")
    assert len(made.told) == 10
    assert ["not said again" in text for text in made.told] == [False] * 9 + [True]


def test_a_microvms_window_is_read_whatever_the_store_does(tmp_path: Path) -> None:
    """Else the monitor would wait with all channels of its machine."""

    async def body() -> None:
        over = asyncio.Event()

        async def deaf(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            await over.wait()

        async with bridged(tmp_path, deaf, framed=True) as made:
            for _ in range(4):
                # First what fills every buffer to the store, as far as it is told to be taken.
                reader, writer = await made.connect()
                on_its_way = sent = 0
                while on_its_way + 65536 <= 1 << 20:
                    writer.write(_frame(bytes(65536)))
                    await writer.drain()
                    on_its_way += 65536
                    sent += 65536
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            told = int.from_bytes(await reader.readexactly(4))
                            assert told & 0x80000000
                            on_its_way -= told & 0x7FFFFFFF
                assert sent > 1 << 20
                while writer.transport.get_write_buffer_size():
                    await asyncio.sleep(0.01)

    asyncio.run(body())


def test_the_end_closes_every_forward_and_the_listener(tmp_path: Path) -> None:
    async def body() -> None:
        gone = asyncio.Event()

        async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"!")
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
            writer.close()
            gone.set()

        async with bridged(tmp_path, hold) as made:
            reader, _ = await made.connect()
            assert await reader.readexactly(1) == b"!"
            await made.bridge.close()
            await gone.wait()
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            with pytest.raises(ConnectionRefusedError):
                await made.connect()

    asyncio.run(body())


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254",
        "::ffff:169.254.169.254",
        "64:ff9b::169.254.169.254",
        "2002:a9fe:a9fe::1",
        "::169.254.169.254",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "fe80::1",
        "fd00:ec2::254",
        "fd20:ce::254",
        "0.0.0.0",
        "ff02::1",
    ],
)
def test_a_name_that_leads_to_a_refused_address_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """Whoever serves the name chooses where it leads: not to what answers with credentials."""

    async def body() -> None:
        def leads_there(*_: object, **__: object) -> list[tuple[object, ...]]:
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 80))]

        made = Bridged(tmp_path / "e-0", 80)
        await made.open()
        monkeypatch.setattr(socket, "getaddrinfo", leads_there)
        async with asyncio.timeout(WITHIN_S):
            reader, _ = await made.connect()
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        await made.close()
        assert made.uses["failed"] == 1
        assert "leads to an address that is refused" in made.told[0]

    asyncio.run(body())
