"""A guest that speaks raw bytes costs its own session, not the host (spec H3)."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from relay_harness import (
    CLIENT,
    KEY,
    PATIENCE_S,
    SCHEME,
    SERVER,
    HostileGuest,
    RelayThread,
    Shell,
    connect,
    in_step,
    message,
    receive,
    resident,
    short_directory,
    until,
)

from kernel_provisioner.errors import StartFailed
from kernel_provisioner.session.relay import ParserBounds, Refuse, RelayBounds
from kernel_provisioner.session.relay.inject import Injector
from kernel_provisioner.session.relay.inspect import (
    DELIMITER,
    MalformedMessage,
    Signer,
    load_object,
    nesting_within,
    parse_envelope,
)
from kernel_provisioner.session.relay.zmtp import (
    GREETING,
    encode_command,
    encode_message,
    encode_ready,
)


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as path:
        yield path


@pytest.fixture
def stall_s() -> float:
    """Longer than a busy machine keeps a test waiting that sends a message by parts."""
    return 60.0


SOON = pytest.mark.parametrize("stall_s", [1.0])
"""For the tests of a guest that stalls."""


@pytest.fixture
def relay(directory: Path, stall_s: float) -> Iterator[RelayThread]:
    bounds = RelayBounds(stall_s=stall_s, cell_messages=50, dial_s=20.0, unread_bytes=8 * 2**20)
    relay = RelayThread(directory, bounds=bounds)
    yield relay
    relay.stop()


@pytest.fixture
def guest(relay: RelayThread) -> Iterator[HostileGuest]:
    guest = HostileGuest(relay)
    relay.open()
    yield guest
    guest.die()


def drain_until_closed(sock: Any) -> int:
    total = 0
    try:
        while data := sock.recv(1 << 16):
            total += len(data)
    except ConnectionResetError:
        pass
    return total


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        (b"HTTP/1.1 200 OK\r\n", "greeting"),
        (GREETING[:12] + b"PLAIN" + bytes(15), "greeting"),
        (GREETING + encode_message([b"early"]), "before READY"),
        (SERVER + encode_command(b"EVIL", b""), "unexpected command"),
        (SERVER + encode_command(b"SUBSCRIBE", b"x"), "unexpected command"),
        (SERVER + b"\x02" + struct.pack(">Q", 2**63), "message announces"),
        (SERVER + b"\x02" + struct.pack(">Q", 257 * 2**20), "message announces"),
        (SERVER + b"\x06" + struct.pack(">Q", 2**40), "command announces"),
        (SERVER + b"\x01\x00" * 20000, "lacks its header|no delimiter|more than"),
        (SERVER + encode_message([b"no", b"delimiter"]), "no delimiter"),
        (SERVER + encode_message([DELIMITER, b"", b"[" * 5000, b"{}", b"{}", b"{}"]), "deeper"),
        (SERVER + encode_message([DELIMITER, b"", b"[]", b"{}", b"{}", b"{}"]), "not a JSON obj"),
        (SERVER + encode_message([DELIMITER, b"", b"{}", b"{}", b"{}", b"{}"]), "msg_id"),
        (SERVER + encode_message([DELIMITER, b"", b"\xff{}", b"{}", b"{}", b"{}"]), "not JSON"),
        (SERVER + encode_message([DELIMITER, b"", b"x" * 20000, b"{}", b"{}", b"{}"]), "header is"),
        (SERVER + encode_message([b"x" * 300_000, DELIMITER]), "no delimiter"),
    ],
)
def test_malformed_traffic_is_a_violation_and_ends_the_connection(
    relay: RelayThread, guest: HostileGuest, wire: bytes, text: str
) -> None:
    client = connect(relay.client_paths["iopub"])
    client.sendall(CLIENT)
    hostile = guest.accept("iopub")
    receive(hostile, len(CLIENT))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        hostile.sendall(wire)
    # A message over the bound is too much output, everything else a broken peer.
    kind = "oversized" if text == "message announces" else "violation"
    detail = relay.monitor.wait_for(kind)[1]
    assert detail.startswith("iopub: ")
    assert any(part in detail for part in text.split("|"))
    drain_until_closed(hostile)
    client.close()


def test_endless_small_frames_and_giant_announcements_take_no_memory(
    relay: RelayThread, guest: HostileGuest
) -> None:
    before = resident()
    for _ in range(10):
        client = connect(relay.client_paths["iopub"])
        client.sendall(CLIENT)
        hostile = guest.accept("iopub")
        start = [DELIMITER, b"", b'{"msg_id":"a","msg_type":"b"}', b"{}", b"{}", b"{}"]
        opening = encode_message([*start, b"end"])[:-5]  # the message goes on
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            hostile.sendall(SERVER + opening + b"\x01\x00" * 200_000)
        client.close()
    relay.monitor.wait_for("violation")
    assert resident() - before < 32 * 2**20


def test_a_client_that_does_not_read_holds_the_guest_back(
    relay: RelayThread, guest: HostileGuest
) -> None:
    client = connect(relay.client_paths["iopub"])
    client.sendall(CLIENT)
    hostile = guest.accept("iopub")
    hostile.sendall(SERVER)
    before = resident()
    wire = message("display_data", {"data": {"text/plain": "x" * 200_000}})
    sent = 0
    held_back = False
    while not held_back and sent < 200 * 2**20:
        try:
            # Only what comes after that much may be held back.
            hostile.settimeout(PATIENCE_S if sent <= 8 * 2**20 else 1.0)
            sent += hostile.send(wire)
        except TimeoutError:
            held_back = True
    assert held_back
    # A microVM is not held back by what little a client leaves: its channels share one device.
    assert 8 * 2**20 < sent < 12 * 2**20
    assert resident() - before < 24 * 2**20
    client.close()


@SOON
@pytest.mark.parametrize(
    "start",
    [
        b"",
        GREETING[:20],
        GREETING,
        SERVER + b"\x01",
        SERVER + message("status", {})[:40],
        SERVER + message("display_data", {"x": "y" * 300_000})[:200_000],
    ],
)
def test_a_guest_that_stops_inside_something_is_in_violation(
    relay: RelayThread, guest: HostileGuest, start: bytes
) -> None:
    client = connect(relay.client_paths["iopub"])
    client.sendall(CLIENT)
    hostile = guest.accept("iopub")
    hostile.sendall(start)
    assert "does not finish" in relay.monitor.wait_for("violation")[1]
    client.close()


@SOON
def test_dribbling_a_held_message_is_no_progress(relay: RelayThread, guest: HostileGuest) -> None:
    client = connect(relay.client_paths["iopub"])
    client.sendall(CLIENT)
    hostile = guest.accept("iopub")
    hostile.sendall(SERVER)
    wire = message("status", {"execution_state": "idle"})
    begin = time.monotonic()
    try:
        for byte in wire * 10:
            hostile.sendall(bytes([byte]))
            if relay.monitor.kinds("violation"):
                break
            time.sleep(0.02)
    except (BrokenPipeError, ConnectionResetError):
        pass
    assert relay.monitor.wait_for("violation")
    assert time.monotonic() - begin < 30  # it would take a minute
    client.close()


@SOON
def test_an_idle_guest_is_no_violation(relay: RelayThread, guest: HostileGuest) -> None:
    client = connect(relay.client_paths["iopub"])
    client.sendall(CLIENT)
    hostile = guest.accept("iopub")
    hostile.sendall(SERVER)
    receive(client, len(SERVER))
    client.settimeout(2.5)  # stall_s is 1
    with pytest.raises(TimeoutError):
        client.recv(1)
    assert relay.monitor.kinds("violation") == []
    client.close()


def test_output_over_the_bound_is_noticed_stopped_and_reported_once(
    relay: RelayThread, guest: HostileGuest
) -> None:
    shell = Shell(relay, guest)
    header = shell.request()
    one = message("display_data", {"data": {}}, parent=header)
    idle = message("status", {"execution_state": "idle"}, parent=header)
    shell.guest_iopub.sendall(one * 60 + idle)
    relay.monitor.wait_for("output_exceeded", header["msg_id"])
    got = b""
    while not got.endswith(idle):
        got += shell.iopub.recv(1 << 16)
    assert got.count(b"display_data") == 51  # the one that passed the bound was forwarded
    assert b"more than 50 output messages" in got
    assert len(relay.monitor.kinds("output_exceeded")) == 1
    shell.close()


def test_a_held_message_of_a_dead_guest_leaves_no_trace(
    relay: RelayThread, guest: HostileGuest
) -> None:
    shell = Shell(relay, guest)
    header = shell.request()
    whole = message("display_data", {"data": {"n": 1}}, parent=header)
    shell.guest_iopub.sendall(whole + whole[:-3])
    shell.guest_iopub.close()
    shell.guest_shell.close()
    assert relay.run(relay.relay.fail_pending("GuestLost", "gone", timeout=1)) == 1
    got = b""
    while b'"idle"' not in got:
        got += shell.iopub.recv(1 << 16)
    assert got.count(b"display_data") == 1
    assert got.startswith(whole)
    assert b"GuestLost" in got
    until(shell.shell, b"GuestLost")
    shell.close()


@pytest.mark.parametrize("closes", [True, False])
def test_death_inside_a_frame_closes_and_is_told_after_the_reconnect(
    relay: RelayThread, guest: HostileGuest, closes: bool
) -> None:
    shell = Shell(relay, guest)
    header = shell.request()
    wire = message("display_data", {"x": "y" * 900_000}, parent=header)[:400_000]
    assert in_step(shell.guest_iopub, shell.iopub, wire) == wire
    if closes:
        shell.guest_iopub.close()
        shell.guest_shell.close()
    # Half of the timeout is for a guest that does not close; here it is less than stall_s.
    work = relay.relay.fail_pending("GuestLost", "gone", timeout=1.6)
    waiting = asyncio.run_coroutine_threadsafe(work, relay.loop)
    assert shell.iopub.recv(1) == b""  # closed, with nothing put inside the frame
    again = connect(relay.client_paths["iopub"])
    again.sendall(CLIENT)
    told = until(again, b'"idle"')
    assert told.startswith(GREETING)
    assert told.index(b'"error"') < told.index(b'"idle"')
    assert b"GuestLost" in told
    assert b"GuestLost" in until(shell.shell, b"execute_reply")
    assert waiting.result(PATIENCE_S) == 1
    again.close()
    shell.close()


def test_injection_waits_for_the_end_of_a_message_under_way(
    relay: RelayThread, guest: HostileGuest
) -> None:
    shell = Shell(relay, guest)
    header = shell.request()
    wire = message("display_data", {"x": "y" * 600_000}, parent=header)
    assert in_step(shell.guest_iopub, shell.iopub, wire[:100_000]) == wire[:100_000]
    relay.monitor.refuse = lambda request: Refuse("CellLimitExceeded", "no")
    shell.request()
    until(shell.shell, b"execute_reply")  # by now iopub's part was injected, or is waiting
    assert in_step(shell.guest_iopub, shell.iopub, wire[100_000:]) == wire[100_000:]
    assert b"CellLimitExceeded" in until(shell.iopub, b'"idle"')
    shell.close()


def test_what_the_guest_sent_before_it_died_is_delivered_first(
    relay: RelayThread, guest: HostileGuest
) -> None:
    shell = Shell(relay, guest)
    header = shell.request()
    reply = message("execute_reply", {"status": "ok"}, parent=header)

    async def last_words() -> int:
        # On the loop's thread: the relay cannot have read them when it is told of the death.
        shell.guest_shell.sendall(reply)
        shell.guest_shell.close()
        shell.guest_iopub.close()
        return await relay.relay.fail_pending("GuestLost", "gone", timeout=2)

    assert relay.run(last_words()) == 0
    assert receive(shell.shell, len(reply)) == reply
    relay.monitor.wait_for("replied", header["msg_id"], "ok")
    told = until(shell.iopub, b'"idle"')  # replied, but the guest's idle never came
    assert header["msg_id"].encode() in told
    assert b"GuestLost" not in told
    shell.close()


def test_input_pause_ends_when_the_person_leaves(relay: RelayThread, guest: HostileGuest) -> None:
    shell = Shell(relay, guest)
    stdin = connect(relay.client_paths["stdin"])
    stdin.sendall(GREETING + encode_ready(b"DEALER"))
    hostile = guest.accept("stdin")
    hostile.sendall(GREETING + encode_ready(b"ROUTER"))
    header = shell.request()
    hostile.sendall(message("input_request", {"prompt": ""}, parent=header))
    relay.monitor.wait_for("input_requested", header["msg_id"])
    stdin.close()
    relay.monitor.wait_for("input_replied", header["msg_id"])
    shell.close()


def test_another_session_is_not_affected(directory: Path, relay: RelayThread) -> None:
    guest = HostileGuest(relay)
    relay.open()
    other = RelayThread(directory, name="o")
    peer = HostileGuest(other)
    other.open()
    calm = Shell(other, peer)
    client = connect(relay.client_paths["shell"])
    client.sendall(GREETING + encode_ready(b"DEALER"))
    guest.accept("shell").sendall(SERVER + b"\xff" * 100)
    relay.monitor.wait_for("violation")
    header = calm.request()
    calm.guest_shell.sendall(message("execute_reply", {"status": "ok"}, parent=header))
    other.monitor.wait_for("replied", header["msg_id"], "ok")
    assert other.monitor.kinds("violation") == []
    calm.close()
    client.close()
    other.stop()
    guest.die()
    peer.die()


def test_guest_with_a_full_backlog_is_dialled_again(relay: RelayThread) -> None:
    import socket

    path = relay.guest_paths["shell"]
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(0)
    first = connect(path)  # fills the backlog
    relay.open()
    client = connect(relay.client_paths["shell"])
    client.sendall(GREETING)
    listener.accept()[0].close()
    listener.settimeout(PATIENCE_S)
    accepted, _ = listener.accept()
    accepted.settimeout(PATIENCE_S)
    assert receive(accepted, len(GREETING)) == GREETING
    for sock in (first, client, accepted, listener):
        sock.close()


def test_a_malformed_client_loses_its_connection_only(
    relay: RelayThread, guest: HostileGuest
) -> None:
    client = connect(relay.client_paths["shell"])
    client.sendall(b"GET / HTTP/1.1\r\n\r\n")
    drain_until_closed(client)
    client.close()
    shell = Shell(relay, HostileProxy(guest))
    shell.request()
    assert relay.monitor.kinds("violation") == []
    shell.close()


class HostileProxy:
    """The guest with the connection of the malformed client already taken."""

    def __init__(self, guest: HostileGuest) -> None:
        guest.accept("shell").close()
        self.accept: Callable[[str], Any] = guest.accept


def test_close_ends_connections_that_were_never_bridged(directory: Path) -> None:
    relay = RelayThread(directory, name="w")
    client = connect(relay.client_paths["shell"])
    client.sendall(GREETING)
    relay.run(relay.relay.fail_pending("StartFailed", "no", timeout=0.1))  # also accepts
    relay.stop()
    drain_until_closed(client)
    client.close()
    assert not any(path.exists() for path in relay.client_paths.values())


def test_client_sockets_are_private_and_replace_stale_ones(directory: Path) -> None:
    first = RelayThread(directory)
    modes = {path.stat().st_mode & 0o777 for path in first.client_paths.values()}
    assert modes == {0o600}
    second = RelayThread(directory)  # the same paths, as after a restart
    first.stop()
    assert all(path.exists() for path in second.client_paths.values())  # not first's any more
    second.stop()


def test_a_file_in_the_way_is_refused(directory: Path) -> None:
    (directory / "h-1").write_text("mine")
    with pytest.raises(StartFailed, match="not a socket of this user"):
        RelayThread(directory)
    assert (directory / "h-1").read_text() == "mine"


def test_a_long_path_is_refused(directory: Path) -> None:
    deep = directory / ("d" * 120)
    deep.mkdir()
    with pytest.raises(StartFailed, match="longer than 107 bytes"):
        RelayThread(deep)


def test_unknown_signature_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="signature_scheme"):
        Signer(b"k", "md5")


def test_nesting() -> None:
    assert nesting_within(b'{"a": "[[[[[[[["}', 2)
    assert nesting_within(b'{"a\\"[[[[": [[]]}', 3)
    assert not nesting_within(b"[[[]]]", 2)
    with pytest.raises(MalformedMessage):
        load_object(b"[" * 100_000, 32)
    with pytest.raises(MalformedMessage):
        load_object(b'{"a": ' + b"9" * 10_000 + b"}", 32)


def test_envelope_needs_its_header_among_the_held_frames() -> None:
    with pytest.raises(MalformedMessage, match="lacks its header"):
        parse_envelope([DELIMITER, b"sig", b"{}"], RelayBounds())


def test_injected_messages_are_accepted_by_a_jupyter_session() -> None:
    from jupyter_client.session import Session

    failure = Injector(Signer(KEY, SCHEME)).failure(
        b'{"msg_id": "m"}', "execute_request", "E", "v", 3
    )
    assert failure.reply is not None
    from kernel_provisioner.session.relay.zmtp import FrameParser, Head

    parser = FrameParser(ParserBounds())
    list(parser.feed(SERVER))
    heads = [e for e in parser.feed(failure.iopub + failure.reply) if isinstance(e, Head)]
    session = Session(key=KEY)
    found = [
        session.deserialize(list(head.frames)[list(head.frames).index(DELIMITER) + 1 :])
        for head in heads
    ]
    assert [m["msg_type"] for m in found] == ["error", "status", "execute_reply"]
    assert all(m["parent_header"] == {"msg_id": "m"} for m in found)
    assert found[2]["content"]["execution_count"] == 3


def test_blocking_client_of_a_dead_relay_gets_its_answer(directory: Path) -> None:
    relay = RelayThread(directory, name="d")
    relay.run(relay.relay.fail_pending("GuestLost", "gone", timeout=0.1))
    client: BlockingKernelClient = relay.client()
    msg_id = client.kernel_info()
    reply = client.get_shell_msg(timeout=PATIENCE_S)
    assert reply["parent_header"]["msg_id"] == msg_id
    assert (reply["msg_type"], reply["content"]["ename"]) == ("kernel_info_reply", "GuestLost")
    client.stop_channels()
    relay.stop()
