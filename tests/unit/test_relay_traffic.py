"""What a hostile guest may send on which channel, and what its client gets of it (spec H3)."""

from __future__ import annotations

import asyncio
import json
import select
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from relay_harness import (
    PATIENCE_S,
    HostileGuest,
    RelayThread,
    Shell,
    message,
    receive,
    resident,
    short_directory,
    until,
)

from kernel_provisioner.session.relay import RelayBounds
from kernel_provisioner.session.relay.inspect import (
    MalformedMessage,
    TooDeep,
    load_object,
    nesting_within,
)
from kernel_provisioner.session.relay.meter import OutputMeter
from kernel_provisioner.session.relay.zmtp import encode_message


@pytest.fixture
def relay() -> Iterator[RelayThread]:
    bounds = RelayBounds(cell_messages=50, cell_inputs=20, open_inputs=4, dial_s=20.0)
    with short_directory() as directory:
        relay = RelayThread(directory, bounds=bounds)
        yield relay
        relay.stop()


@pytest.fixture
def guest(relay: RelayThread) -> Iterator[HostileGuest]:
    guest = HostileGuest(relay)
    relay.open()
    yield guest
    guest.die()


@pytest.fixture
def shell(relay: RelayThread, guest: HostileGuest) -> Iterator[Shell]:
    shell = Shell(relay, guest, b"me")
    yield shell
    shell.close()


def reply(parent: dict[str, Any], kind: str = "execute_reply", **more: Any) -> bytes:
    return message(kind, {"status": "ok"}, parent=parent, **more)


def dropped(relay: RelayThread) -> int:
    return int(relay.call(lambda: relay.relay.stats["dropped"]))


def wait_dropped(relay: RelayThread, count: int) -> None:
    """Wait until the relay dropped so many guest messages, and fail at one more."""
    deadline = time.monotonic() + PATIENCE_S
    while dropped(relay) < count:
        assert time.monotonic() < deadline
    assert dropped(relay) == count


def test_a_reply_of_an_end_waits_for_output_that_lies_unread(
    relay: RelayThread, guest: HostileGuest, shell: Shell
) -> None:
    """A reply that overtakes its cell's error would be taken for the cell's own end."""
    header = shell.request()
    wire = message("stream", {"name": "stdout", "text": "x" * 100_000}, parent=header)
    for _ in range(40):  # more than sockets hold
        shell.guest_iopub.sendall(wire)
    guest.die()
    end = relay.relay.fail_pending("GuestLost", "gone", timeout=4 * PATIENCE_S)
    told = asyncio.run_coroutine_threadsafe(end, relay.loop)
    assert select.select([shell.shell], [], [], 0.5)[0] == []
    assert until(shell.iopub, b"GuestLost").count(b"x" * 100_000) == 40
    until(shell.shell, b"execute_reply")
    assert told.result(PATIENCE_S) == 1


# ---- replies (shell, control)


@pytest.mark.parametrize(
    "forge",
    [
        lambda header: reply({"msg_id": "unknown"}),
        lambda header: reply({"msg_id": None}),
        lambda header: reply({}),
        lambda header: reply(header, "inspect_reply"),
        lambda header: reply(header, "execute_request"),
        lambda header: reply(header, "status"),
        lambda header: reply(header, "input_request"),
        lambda header: reply(header, key=b"wrong"),
        lambda header: message("x_reply", {"long": "y" * 900_000}, parent=header),
    ],
)
def test_what_answers_no_request_is_swallowed_and_teaches_nothing(
    relay: RelayThread, shell: Shell, forge: Callable[[dict[str, Any]], bytes]
) -> None:
    header = shell.request()
    honest = reply(header)
    shell.guest_shell.sendall(forge(header) + honest)
    assert receive(shell.shell, len(honest)) == honest  # the first thing that its client gets
    relay.monitor.wait_for("replied", header["msg_id"], "ok")
    assert dropped(relay) == 1
    assert [call[0] for call in relay.monitor.calls] == ["admit", "replied"]


def test_a_second_reply_is_dropped(relay: RelayThread, shell: Shell) -> None:
    first = shell.request()
    second = shell.request()
    wires = [reply(first), reply(first), reply(second)]
    shell.guest_shell.sendall(b"".join(wires))
    assert receive(shell.shell, len(wires[0] + wires[2])) == wires[0] + wires[2]
    relay.monitor.wait_for("replied", second["msg_id"])
    assert len(relay.monitor.kinds("replied")) == 2
    assert dropped(relay) == 1


@pytest.mark.parametrize("channel", ["control", "stdin", "shell"])
def test_a_reply_elsewhere_does_not_end_the_request(
    relay: RelayThread, shell: Shell, channel: str
) -> None:
    """Neither another channel of the same client counts, nor the same channel of another one."""
    other, guest_other = shell.join(channel, b"you" if channel == "shell" else None)
    header = shell.request()
    guest_other.sendall(reply(header))
    asked = shell.request(other) if channel == "shell" else None
    if asked:  # what comes next shows that the forged one was not forwarded
        guest_other.sendall(reply(asked))
        assert receive(other, len(reply(asked)))
        relay.monitor.wait_for("replied", asked["msg_id"])
    wait_dropped(relay, 1)
    assert ("replied", header["msg_id"], "ok") not in relay.monitor.calls
    # So its client is told when the guest is dead.
    assert relay.run(relay.relay.fail_pending("GuestLost", "gone", timeout=1)) == 1
    assert b"GuestLost" in until(shell.shell, b"execute_reply")


def test_a_reply_follows_its_client_to_a_new_connection(relay: RelayThread, shell: Shell) -> None:
    """The kernel's ROUTER hands a reconnected client over by its identity."""
    header = shell.request()
    again, guest_again = shell.join("shell")
    guest_again.sendall(reply(header))
    until(again, b"execute_reply")
    relay.monitor.wait_for("replied", header["msg_id"], "ok")


def test_control_requests_are_answered_on_control(relay: RelayThread, shell: Shell) -> None:
    control, guest_control = shell.join("control")
    header = shell.request(control, msg_type="debug_request")
    guest_control.sendall(reply(header, "debug_reply"))
    until(control, b"debug_reply")
    relay.monitor.wait_for("replied", header["msg_id"], "ok")


def test_the_reply_to_a_comm_message_of_an_unknown_subshell_passes(
    relay: RelayThread, shell: Shell
) -> None:
    """ipykernel sends it beside the idle state, on another socket: either may come first."""
    header = shell.request(msg_type="comm_msg", subshell_id="gone")
    shell.guest_iopub.sendall(message("status", {"execution_state": "idle"}, parent=header))
    relay.monitor.wait_for("replied", header["msg_id"], "idle")
    wire = reply(header, "comm_reply")
    shell.guest_shell.sendall(wire + wire)
    assert receive(shell.shell, len(wire)) == wire
    wait_dropped(relay, 1)


@pytest.mark.parametrize("channel", ["control", "stdin"])
def test_giants_that_nobody_asked_for_take_no_memory(
    relay: RelayThread, shell: Shell, channel: str
) -> None:
    client, guest_end = shell.join(channel)
    header = shell.request()
    giant = message("debug_reply", {}, parent=header)[:-2]  # its last frame's body is {}
    assert giant[-2:] == b"\x00\x02"
    body = 100 * 2**20
    giant = giant[:-2] + b"\x02" + body.to_bytes(8, "big")
    piece = b"x" * 2**20
    before = resident()
    for _ in range(8):
        guest_end.sendall(giant)
        for _ in range(body // len(piece)):
            guest_end.sendall(piece)
    wait_dropped(relay, 8)
    assert resident() - before < 16 * 2**20
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(1)


@pytest.mark.parametrize("channel", ["shell", "control", "stdin", "hb"])
def test_a_flood_of_what_nobody_asked_for_is_too_much_output(
    relay: RelayThread, shell: Shell, channel: str
) -> None:
    guest_end = shell.guest_shell if channel == "shell" else shell.join(channel)[1]
    header = shell.request()
    guest_end.sendall(reply(header, "x_reply") * 60)
    # On hb nothing names a request.
    relay.monitor.wait_for("output_exceeded", "" if channel == "hb" else header["msg_id"])
    assert len(relay.monitor.kinds("output_exceeded")) == 1


def test_a_guest_that_dies_in_what_is_dropped_leaves_the_connection_usable(
    relay: RelayThread, shell: Shell
) -> None:
    header = shell.request()
    shell.guest_shell.sendall(message("x_reply", {"long": "y" * 900_000})[:400_000])
    wait_dropped(relay, 1)
    assert relay.run(relay.relay.fail_pending("GuestLost", "gone", timeout=0.4)) == 1
    assert b"GuestLost" in until(shell.shell, b"execute_reply")
    assert header["msg_id"].encode() in until(shell.iopub, b'"idle"')


# ---- heartbeat


def test_a_heartbeat_is_the_echo_of_a_ping(relay: RelayThread, shell: Shell) -> None:
    client, guest_end = shell.join("hb")
    beat = encode_message([b"", b"ping"])
    for _ in range(60):  # more than cell_messages: pings are not output
        client.sendall(beat)
        assert receive(guest_end, len(beat)) == beat
        guest_end.sendall(beat)
        assert receive(client, len(beat)) == beat
    assert (dropped(relay), relay.monitor.kinds("output_exceeded")) == (0, [])
    guest_end.sendall(beat)
    wait_dropped(relay, 1)
    client.settimeout(0.2)
    with pytest.raises(TimeoutError):
        client.recv(1)


# ---- stdin


def question(header: dict[str, Any], prompt: str = "?", **more: Any) -> bytes:
    return message("input_request", {"prompt": prompt, "password": False}, parent=header, **more)


def test_questions_that_no_running_cell_may_ask_are_dropped(
    relay: RelayThread, shell: Shell
) -> None:
    client, guest_end = shell.join("stdin")
    _, guest_stranger = shell.join("stdin", b"you")
    silent = shell.request(content={"code": "1", "allow_stdin": False})
    completion = shell.request(msg_type="complete_request")
    done = shell.request()
    shell.guest_shell.sendall(reply(done))
    relay.monitor.wait_for("replied", done["msg_id"])
    header = shell.request()
    bad = [
        question({"msg_id": "unknown"}),
        question(silent),
        question(completion),
        question(done),
        question(header, key=b"wrong"),
        message("display_data", {}, parent=header),
    ]
    guest_stranger.sendall(question(header))
    guest_end.sendall(b"".join(bad))
    good = question(header)
    guest_end.sendall(good)
    assert receive(client, len(good)) == good
    wait_dropped(relay, len(bad) + 1)
    relay.monitor.wait_for("input_requested", header["msg_id"])
    assert relay.monitor.kinds("input_requested") == [("input_requested", header["msg_id"])]


def test_questions_are_bounded_and_the_cell_is_told(relay: RelayThread, shell: Shell) -> None:
    client, guest_end = shell.join("stdin")
    header = shell.request()
    wire = question(header)
    answer = message("input_reply", {"value": "a"})
    for asked in range(5):
        guest_end.sendall(wire * 6)  # 4 may be open
        assert receive(client, 4 * len(wire)) == wire * 4
        wait_dropped(relay, 2 * (asked + 1))
        client.sendall(answer)
        assert receive(guest_end, len(answer)) == answer
    guest_end.sendall(wire)  # 20 a cell
    told = until(shell.iopub, b"asked 20 times")
    assert told.count(b"4 earlier questions have no answer") == 1  # once, not ten times
    wait_dropped(relay, 11)


def test_a_giant_prompt_is_dropped_and_the_cell_is_told(relay: RelayThread, shell: Shell) -> None:
    client, guest_end = shell.join("stdin")
    header = shell.request()
    good = question(header)
    guest_end.sendall(question(header, "x" * 900_000) + good)
    assert receive(client, len(good)) == good
    until(shell.iopub, b"its prompt has more than 262144 bytes")


# ---- publications


def test_a_publication_to_many_subscribers_is_one_output(relay: RelayThread, shell: Shell) -> None:
    pairs = [(shell.iopub, shell.guest_iopub), *(shell.join("iopub") for _ in range(2))]
    header = shell.request()
    wire = message("display_data", {"data": {}}, parent=header)
    for client, guest_end in pairs:
        guest_end.sendall(wire * 40)
        assert receive(client, 40 * len(wire)) == wire * 40
    assert relay.monitor.kinds("output_exceeded") == []
    # A subscriber that comes now has the rest of the bound, not a new one.
    late, guest_late = shell.join("iopub")
    guest_late.sendall(wire * 11)
    relay.monitor.wait_for("output_exceeded", header["msg_id"])
    for client, guest_end in [*pairs, (late, guest_late)]:
        guest_end.sendall(wire * 20)
        assert until(client, b"OutputLimitExceeded")
    assert len(relay.monitor.kinds("output_exceeded")) == 1


def test_all_channels_share_one_bound(relay: RelayThread, shell: Shell) -> None:
    _, guest_control = shell.join("control")
    header = shell.request()
    wire = message("display_data", {"data": {}}, parent=header)
    shell.guest_iopub.sendall(wire * 30)
    assert receive(shell.iopub, 30 * len(wire))
    guest_control.sendall(reply(header, "debug_reply") * 21)
    relay.monitor.wait_for("output_exceeded", header["msg_id"])
    wire = reply(header)
    shell.guest_shell.sendall(wire)  # the final reply is never lost
    assert receive(shell.shell, len(wire)) == wire
    relay.monitor.wait_for("replied", header["msg_id"], "ok")


def test_after_the_excess_only_small_endings_pass(relay: RelayThread, shell: Shell) -> None:
    header = shell.request()
    wire = message("display_data", {"data": {}}, parent=header)
    shell.guest_iopub.sendall(wire * 51)
    until(shell.iopub, b"OutputLimitExceeded")
    giant = message("error", {"ename": "x" * 900_000}, parent=header)
    idle = message("status", {"execution_state": "idle"}, parent=header)
    shell.guest_iopub.sendall(giant + idle * 1200)
    got = until(shell.iopub, idle * 1000)
    wait_dropped(relay, 201)
    assert b"x" * 100 not in got


def test_a_wrongly_signed_publication_is_dropped(relay: RelayThread, shell: Shell) -> None:
    """Clients raise at it."""
    header = shell.request()
    busy = message("status", {"execution_state": "busy"}, parent=header, key=b"wrong")
    good = message("stream", {"name": "stdout", "text": "a"}, parent=header)
    shell.guest_iopub.sendall(busy + good)
    assert receive(shell.iopub, len(good)) == good
    assert relay.monitor.kinds("started") == []
    assert dropped(relay) == 1


HUGE = b'{"n": ' + b"9" * 5000 + b"}"


@pytest.mark.parametrize("channel", ["iopub", "shell", "control", "stdin"])
@pytest.mark.parametrize(
    ("part", "text"),
    [
        (b"[]", "not a JSON object"),
        (b'"text"', "not a JSON object"),
        (b"7", "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe nonsense", "not JSON"),
        (HUGE, "not JSON"),
    ],
)
def test_content_and_metadata_that_are_no_objects_are_violations(
    relay: RelayThread, shell: Shell, channel: str, part: bytes, text: str
) -> None:
    ends = {"iopub": shell.guest_iopub, "shell": shell.guest_shell}
    guest_end = ends.get(channel) or shell.join(channel)[1]
    header = shell.request()
    if len(part) % 2:  # in either place
        wire = message("stream", {}, parent=header, metadata=part)
    else:
        wire = message("stream", part, parent=header)
    guest_end.sendall(wire)
    detail = relay.monitor.wait_for("violation")[1]
    assert detail.startswith(f"{channel}: ")
    assert text in detail


def test_a_message_without_content_is_a_violation(relay: RelayThread, shell: Shell) -> None:
    header = {"msg_id": "a", "msg_type": "stream"}
    wire = encode_message([b"<IDS|MSG>", b"", json.dumps(header).encode(), b"{}", b"{}"])
    shell.guest_iopub.sendall(wire)
    assert "no content" in relay.monitor.wait_for("violation")[1]


def test_what_an_honest_library_may_publish_is_no_violation(
    relay: RelayThread, shell: Shell
) -> None:
    header = shell.request()
    deep: Any = {}
    for _ in range(200):
        deep = {"a": deep}
    too_deep = message("display_data", {"data": deep}, parent=header)
    odd = [
        message("stream", b'{"text": "\xff\\ud800", "name": "stdout"}', parent=header),
        message("stream", {"text": "9" * 10_000, "name": "stdout"}, parent=header),
        message("stream", {"text": "[{" * 10_000, "name": "stdout"}, parent=header),
        message("display_data", b'{"data": {"n": ' + b"9" * 4000 + b"}}", parent=header),
        message("own_type", {}, parent={"msg_id": "unknown"}),
    ]
    shell.guest_iopub.sendall(too_deep * 2 + b"".join(odd))
    got = until(shell.iopub, odd[-1])
    assert got.endswith(b"".join(odd))
    assert got.count(b"nests deeper than 128 levels") == 1
    assert dropped(relay) == 2
    assert relay.monitor.kinds("violation") == []


# ---- parts without I/O


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max((depth_of(item) for item in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth_of(item) for item in value), default=0)
    return 0


@given(
    st.recursive(
        st.none() | st.integers() | st.text(alphabet='[]{}"\\a,:'),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text(alphabet='[{"\\'), inner, max_size=3)
        ),
        max_leaves=30,
    )
)
def test_nesting_of_any_json(value: object) -> None:
    text = json.dumps(value).encode()
    depth = depth_of(value)
    assert nesting_within(text, depth)
    assert not nesting_within(text, depth - 1) or depth == 0


@pytest.mark.parametrize(
    "text",
    [
        b'"' + b'\\"' * 128_000 + b"[" * 200,
        b'"' * 256_000 + b"[" * 200,
        b"[" * 128_000 + b"]" * 128_000,
        b"[{" * 128_000,
        b'{"a":[' * 40_000 + b'"' + b"\\" * 16_001,
        b"[]" * 128_000,
        HUGE[:-1] + b"9" * 250_000 + b"}",
    ],
)
def test_hostile_text_costs_little(text: bytes) -> None:
    begin = time.thread_time()
    with pytest.raises(MalformedMessage):
        load_object(text, 128)
    assert time.thread_time() - begin < 0.25


def test_too_deep_is_told_from_malformed() -> None:
    with pytest.raises(TooDeep):
        load_object(b'{"a": [[[]]]}', 2)
    assert load_object(b'{"a": [[[]]]}', 4) == {"a": [[[]]]}


def test_the_meter_forgets_what_nobody_knows() -> None:
    meter = OutputMeter(RelayBounds(cell_messages=1))
    meter.join(1)
    for number in range(3000):
        meter.publish(1, f"r{number}", size=1, text=0)
        meter.charge(f"r{number}", size=1)
    assert meter.exceeded("r7")
    meter.new_request({"r2999"})
    assert not meter.exceeded("r7")
    assert meter.exceeded("r2999")
    assert meter.charge("", size=1) == ""
    assert "more than 1 output messages" in meter.charge("", size=1)
    meter.new_request({})
    assert not meter.exceeded("")


def test_the_meter_counts_bytes_and_text() -> None:
    meter = OutputMeter(RelayBounds(cell_bytes=100, cell_text_bytes=10))
    meter.join(1)
    assert meter.publish(1, "a", size=50, text=0) == ""
    assert meter.charge("a", size=50) == ""
    meter.leave(1)
    meter.join(2)
    assert "MiB of output" in meter.publish(2, "a", size=1, text=0)
    assert "MiB of stream text" in meter.publish(2, "b", size=11, text=11)


def test_old_connections_do_not_double_a_request_that_one_of_them_saw_first() -> None:
    """A subscriber that was slow is behind, not ahead."""
    meter = OutputMeter(RelayBounds(cell_messages=10))
    meter.join(1)
    meter.join(2)
    for connection in (1, 2):
        for _ in range(10):
            assert meter.publish(connection, "a", size=1, text=0) == ""
