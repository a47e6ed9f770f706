"""Assigned endpoints (spec F1): the guest's own loopback leads to them, and to nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from live_guest import PACE, LiveGuest, Starter

from kernel_provisioner.engines.base import EndpointListener, GuestEndpoint
from kernel_provisioner.errors import StartFailed
from kernel_provisioner.session.bridge import Bridge

pytestmark = pytest.mark.sandbox

_NAMES = ("literal", "local", "named", "web")
_LONGEST_S = 120 * PACE


@dataclass
class Served:
    """What the stores of a guest's endpoints received, and what the bridge said and counted."""

    received: dict[str, bytes] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    connections: int = 0


async def _reversed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Answer in reverse, once the sender has ended its part."""
    received = bytearray()
    while data := await reader.read(65536):
        received += data
    writer.write(received[::-1])
    await writer.drain()
    return bytes(received)


async def _slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Read so slowly that all buffers on the way are full, and answer nothing."""
    received = bytearray()
    while data := await reader.read(65536):
        received += data
        await asyncio.sleep(0.002)
    return bytes(received)


Store = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, bytes]]


@contextlib.contextmanager
def stores(guest: LiveGuest, store: Store) -> Iterator[Served]:
    """Serve every endpoint of the guest by the real bridge, in a thread with a loop of its own."""
    served = Served()
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        servers, targets = [], []

        def serving(name: str) -> Any:
            async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                served.received[name] = await store(reader, writer)
                writer.close()

            return one

        for name in guest.listeners:
            server = await asyncio.start_server(serving(name), "127.0.0.1", 0)
            servers.append(server)
            port = server.sockets[0].getsockname()[1]
            targets.append(GuestEndpoint(name, "127.0.0.1", "127.0.0.1", port))
        bridge = Bridge(targets, served.told.append)
        # The bridge closes what it was given; the guest's listeners serve the next test too.
        await bridge.start(
            {
                name: EndpointListener(listener.sock.dup(), listener.framed)
                for name, listener in guest.listeners.items()
            }
        )
        ready.set()
        await asyncio.to_thread(over.wait)
        await bridge.close()
        for server in servers:
            server.close()
        served.connections = sum(use["connections"] for use in bridge.uses().values())

    thread = threading.Thread(target=asyncio.run, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(_LONGEST_S)
    try:
        yield served
    finally:
        over.set()
        thread.join(_LONGEST_S)
    assert not thread.is_alive()


def test_each_is_reached_by_its_own_name_and_port(guest: LiveGuest) -> None:
    assert sorted(guest.listeners) == list(_NAMES)
    with stores(guest, _reversed) as served:
        text = guest.check(
            """
            import socket
            places = {'literal': ('10.9.8.7', 5432), 'local': ('localhost', 5432),
                      'named': ('store.example', 5432), 'web': ('store.example', 80)}
            for name, place in places.items():
                with socket.create_connection(place, timeout=1200) as sock:
                    peer = sock.getpeername()
                    sock.sendall(name.encode())
                    sock.shutdown(socket.SHUT_WR)
                    answer = b''
                    while data := sock.recv(4096):
                        answer += data
                    print(name, answer.decode(), peer)
            """
        )
    assert served.received == {name: name.encode() for name in _NAMES}
    assert served.told == []
    assert text.splitlines() == [
        "literal laretil ('10.9.8.7', 5432)",
        "local lacol ('127.0.0.1', 5432)",
        "named deman ('127.0.1.1', 5432)",
        "web bew ('127.0.1.1', 80)",
    ]


def test_much_passes_whole_both_ways(guest: LiveGuest) -> None:
    with stores(guest, _reversed) as served:
        text = guest.check(
            """
            import random, socket
            random.seed(7)
            sent = random.randbytes(3_000_001)
            for place in (('localhost', 5432), ('10.9.8.7', 5432), ('store.example', 5432),
                          ('store.example', 80)):
                with socket.create_connection(place, timeout=1200) as sock:
                    sock.sendall(sent)
                    sock.shutdown(socket.SHUT_WR)
                    answer = bytearray()
                    while data := sock.recv(1 << 20):
                        answer += data
                    print(len(answer), bytes(answer) == sent[::-1])
            """,
            120,
        )
    assert text.splitlines() == ["3000001 True"] * 4
    assert {len(data) for data in served.received.values()} == {3_000_001}
    assert served.told == []


def test_what_is_sent_and_ended_arrives_whole_at_a_store_that_reads_slowly(
    guest: LiveGuest,
) -> None:
    """A microVM's sockets lose what is on its way when a connection ends."""
    with stores(guest, _slowly) as served:
        text = guest.check(
            """
            import hashlib, random, socket
            random.seed(8)
            sent = random.randbytes(12_000_001)
            with socket.create_connection(('localhost', 5432), timeout=1200) as sock:
                sock.sendall(sent)
                sock.shutdown(socket.SHUT_WR)
                print(sock.recv(1))
            """,
            120,
        )
    assert text == "b''"
    assert len(served.received["local"]) == 12_000_001
    assert served.connections == 1


def test_nothing_else_is_reached(guest: LiveGuest) -> None:
    """There is neither a route nor a name beside those that the owner gave."""
    text = guest.check(
        """
        import errno, socket
        for place in (('10.9.8.7', 5433), ('127.0.1.1', 5433), ('127.0.1.2', 5432),
                      ('10.9.8.6', 5432), ('10.0.0.1', 5432), ('192.0.2.1', 80)):
            sock = socket.socket()
            sock.settimeout(30)
            try:
                sock.connect(place)
                print('REACHED', place)
            except OSError as error:
                print(place[0], place[1], errno.errorcode[error.errno])
            finally:
                sock.close()
        for name in ('other.example', 'example'):
            try:
                print('RESOLVED', socket.getaddrinfo(name, 5432))
            except socket.gaierror:
                pass
        print([line.split()[0] for line in open('/proc/net/route').readlines()[1:]])
        print(sorted(line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]))
        """
    )
    assert text.splitlines() == [
        "10.9.8.7 5433 ECONNREFUSED",
        "127.0.1.1 5433 ECONNREFUSED",
        "127.0.1.2 5432 ECONNREFUSED",
        "10.9.8.6 5432 ENETUNREACH",
        "10.0.0.1 5432 ENETUNREACH",
        "192.0.2.1 80 ENETUNREACH",
        "[]",
        "['lo']",
    ]


def test_the_guest_cannot_take_an_endpoints_place(guest: LiveGuest) -> None:
    text = guest.check(
        """
        import errno, os, socket
        for place in (('127.0.1.1', 5432), ('10.9.8.7', 5432), ('0.0.0.0', 5432)):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                sock.bind(place)
                sock.listen()
                print('TAKEN', place)
            except OSError as error:
                print(errno.errorcode[error.errno])
            finally:
                sock.close()
        print({place[4][0] for place in socket.getaddrinfo('localhost', 5432)})
        for path in ('/run/backintel', '/run/backintel/e-0', '/run/backintel/agent'):
            print(os.path.exists(path))
        try:
            open('/etc/hosts', 'a')
            print('WRITTEN')
        except OSError as error:
            print(error.errno in (errno.EROFS, errno.EACCES))
        """
    )
    assert text.splitlines() == ["EADDRINUSE"] * 3 + ["{'127.0.0.1'}"] + ["False"] * 3 + ["True"]


def test_a_place_that_cannot_be_opened_stops_the_start(start: Starter) -> None:
    """Nothing runs beside an endpoint that is not there."""
    twice = (
        GuestEndpoint("one", "a.example", "127.0.1.1", 5432),
        GuestEndpoint("two", "b.example", "127.0.1.1", 5432),
    )
    with pytest.raises(StartFailed, match="in use"):
        start(release=False, endpoints=twice)
