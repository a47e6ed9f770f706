"""The forwarder of a microVM's endpoints: it copies, passes ends on, and is bounded."""

from __future__ import annotations

import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernel_provisioner.paths import guest_code_dir

_S = 60.0
"""No wait may last longer, on however busy a machine."""


class Forwarder:
    """The real program with one endpoint: ``address`` leads to ``host``."""

    def __init__(self, place: Path) -> None:
        self.host = socket.socket(socket.AF_UNIX)
        self.host.bind(str(place / "e-0"))
        self.host.listen(128)
        self.host.settimeout(_S)
        self.agent, theirs = socket.socketpair()
        self.agent.settimeout(_S)
        with theirs, socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
            self.address = listener.getsockname()
            numbers = (theirs.fileno(), listener.fileno())
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-B", guest_code_dir() / "forward.py"),
                    *(str(numbers[0]), str(numbers[1]), place / "e-0"),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=numbers,
            )
        assert self.agent.recv(1) == b"1"

    def connect(self) -> socket.socket:
        """Connect as the guest's kernel does."""
        return socket.create_connection(self.address, _S)

    def accept(self) -> socket.socket:
        """Accept as the host does."""
        sock, _ = self.host.accept()
        sock.settimeout(_S)
        return sock

    def takes_another(self) -> bool:
        """Whether it takes a connection again before long, once one has ended."""
        deadline = time.monotonic() + _S
        while time.monotonic() < deadline:
            with self.connect() as guest:
                # Either the host's socket has a connection, or the guest's was closed.
                ready, _, _ = select.select([self.host, guest], [], [], _S)
                if self.host in ready:
                    self.accept().close()
                    return True
        return False

    def close(self) -> None:
        """End it as the agent's end does."""
        self.agent.close()
        self.process.wait(_S)
        self.host.close()


@pytest.fixture
def forwarder(tmp_path: Path) -> Iterator[Forwarder]:
    made = Forwarder(tmp_path)
    try:
        yield made
    finally:
        made.close()


def whole(sock: socket.socket) -> bytes:
    return b"".join(iter(lambda: sock.recv(65536), b""))


END, ENDED = b"\0" * 4, b"\xff" * 4


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(4) + data


def exactly(sock: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = sock.recv(length - len(data))
        assert more, f"it ended after {len(data)} of {length} bytes"
        data += more
    return data


def unframed(sock: socket.socket) -> bytes:
    """Read a way to its end."""
    data = b""
    while length := int.from_bytes(exactly(sock, 4)):
        assert length <= 65536
        data += exactly(sock, length)
        sock.sendall((0x80000000 | length).to_bytes(4))
    return data


def test_each_side_may_end_and_still_hear_the_other(forwarder: Forwarder) -> None:
    with forwarder.connect() as guest, forwarder.accept() as host:
        guest.sendall(b"question" * 20_000)
        guest.shutdown(socket.SHUT_WR)
        assert unframed(host) == b"question" * 20_000
        host.sendall(ENDED + frame(b"x" * 60_000) * 3 + END)
        assert len(whole(guest)) == 180_000
        assert exactly(host, 4) == ENDED
        assert host.recv(1) == b"", "it closes once both ends were confirmed"


def test_it_closes_only_once_the_host_has_all(forwarder: Forwarder) -> None:
    with forwarder.connect() as guest, forwarder.accept() as host:
        guest.close()
        assert unframed(host) == b""
        host.sendall(END)
        assert exactly(host, 4) == ENDED
        ready, _, _ = select.select([host], [], [], 0.2)
        assert ready == []
        host.sendall(ENDED)
        assert host.recv(1) == b""


def test_host_may_end_first(forwarder: Forwarder) -> None:
    with forwarder.connect() as guest, forwarder.accept() as host:
        host.sendall(END)
        assert exactly(host, 4) == ENDED
        assert whole(guest) == b""
        guest.sendall(b"late")
        guest.close()
        assert unframed(host) == b"late"
        host.sendall(ENDED)
        assert host.recv(1) == b""


def test_no_more_is_on_its_way_than_the_host_takes(forwarder: Forwarder) -> None:
    """The host must be able to read all that comes: a microVM's channels share one device."""
    window = 1 << 20
    with forwarder.connect() as guest, forwarder.accept() as host:
        sender = threading.Thread(target=guest.sendall, args=(b"x" * (3 * window),))
        sender.start()
        received = taken = 0
        while received < 3 * window:
            ready, _, _ = select.select([host], [], [], _S if received < window - 65536 else 0.3)
            if not ready:
                # It waits, although the host reads: only what was passed on makes room.
                host.sendall((0x80000000 | 65536).to_bytes(4) * 4)
                taken += 4 * 65536
                continue
            length = int.from_bytes(exactly(host, 4))
            received += len(exactly(host, length))
            assert received <= window + taken
        sender.join(_S)
        assert not sender.is_alive()
        assert taken >= 2 * window


@pytest.mark.parametrize("ends", ["host", "guest"])
def test_a_way_that_breaks_is_a_reset_for_the_other_side(forwarder: Forwarder, ends: str) -> None:
    with forwarder.connect() as guest, forwarder.accept() as host:
        guest.sendall(b"x")
        assert exactly(host, 5) == frame(b"x")
        if ends == "host":
            host.close()
            with pytest.raises(ConnectionResetError):
                guest.recv(1)
        else:
            guest.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            guest.close()
            assert host.recv(1) == b"", "broken off without an end"


def test_host_that_takes_none_ends_the_connection_alone(forwarder: Forwarder) -> None:
    name = forwarder.host.getsockname()
    forwarder.host.close()
    with forwarder.connect() as guest:
        assert whole(guest) == b""
    Path(name).unlink()
    with socket.socket(socket.AF_UNIX) as forwarder.host:
        forwarder.host.bind(name)
        forwarder.host.listen()
        forwarder.host.settimeout(_S)
        with forwarder.connect() as guest, forwarder.accept() as host:
            guest.sendall(b"again")
            guest.close()
            assert unframed(host) == b"again"


def test_one_connection_too_many_is_closed_at_once(forwarder: Forwarder) -> None:
    guests, hosts = [], []
    try:
        for _ in range(64):
            guests.append(forwarder.connect())
            hosts.append(forwarder.accept())
        with forwarder.connect() as refused:
            assert whole(refused) == b""
        guests[0].sendall(b"still")
        assert exactly(hosts[0], 9) == frame(b"still")
        for sock in (guests.pop(), hosts.pop()):
            sock.close()
        assert forwarder.takes_another()
    finally:
        for sock in (*guests, *hosts):
            sock.close()


def test_it_ends_with_the_agent(forwarder: Forwarder) -> None:
    with forwarder.connect() as guest, forwarder.accept():
        forwarder.agent.close()
        assert forwarder.process.wait(_S) == 0
        with pytest.raises(ConnectionRefusedError):
            forwarder.connect()
        assert guest.recv(1) == b""
