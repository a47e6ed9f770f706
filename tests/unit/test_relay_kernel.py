"""A real ipykernel behind a real relay, used through real Jupyter clients (spec H2, H3, G4)."""

from __future__ import annotations

import hashlib
import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from relay_harness import PATIENCE_S, Kernel, RelayThread, kernel_behind_relay, resident

from kernel_provisioner.session.relay import Refuse


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[RelayThread, Kernel]]:
    with kernel_behind_relay() as both:
        yield both


@pytest.fixture
def relay(shared: tuple[RelayThread, Kernel]) -> RelayThread:
    return shared[0]


@pytest.fixture
def client(relay: RelayThread) -> Iterator[BlockingKernelClient]:
    client = relay.client()
    client.wait_for_ready(timeout=60)
    yield client
    client.stop_channels()


def finish(
    client: BlockingKernelClient, msg_id: str, timeout: float = PATIENCE_S
) -> tuple[Any, list[Any]]:
    """Return the reply and the iopub messages of a request up to its idle."""
    outputs = []
    deadline = time.monotonic() + timeout
    while True:
        message = client.get_iopub_msg(timeout=deadline - time.monotonic())
        if message["parent_header"].get("msg_id") != msg_id:
            continue
        outputs.append(message)
        if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            break
    return reply_to(client, msg_id, deadline - time.monotonic()), outputs


def reply_to(client: BlockingKernelClient, msg_id: str, timeout: float = PATIENCE_S) -> Any:
    """Return the reply on shell to a request.

    Others may come before it: wait_for_ready asks anew each second and reads one answer only.
    """
    deadline = time.monotonic() + timeout
    while True:
        reply = client.get_shell_msg(timeout=deadline - time.monotonic())
        if reply["parent_header"].get("msg_id") == msg_id:
            return reply


def kinds(outputs: list[Any]) -> list[str]:
    return [message["msg_type"] for message in outputs]


def test_execute_is_reported_in_order(relay: RelayThread, client: BlockingKernelClient) -> None:
    msg_id = client.execute("6 * 7")
    reply, outputs = finish(client, msg_id)
    assert reply["content"]["status"] == "ok"
    assert kinds(outputs) == ["status", "execute_input", "execute_result", "status"]
    assert outputs[2]["content"]["data"]["text/plain"] == "42"
    relay.monitor.wait_for("replied", msg_id, "ok")
    mine = [call[0] for call in relay.monitor.calls if call[1] == msg_id]
    assert mine[0] == "admit"
    assert sorted(mine) == ["admit", "replied", "started"]


def test_error_status_is_reported(relay: RelayThread, client: BlockingKernelClient) -> None:
    msg_id = client.execute("1/0")
    reply, _ = finish(client, msg_id)
    assert reply["content"]["ename"] == "ZeroDivisionError"
    relay.monitor.wait_for("replied", msg_id, "error")


def test_silent_and_subshell_are_told_to_the_monitor(
    relay: RelayThread, client: BlockingKernelClient
) -> None:
    message = client.session.msg("create_subshell_request")
    client.control_channel.send(message)
    subshell = client.get_control_msg(timeout=PATIENCE_S)["content"]["subshell_id"]
    silent = client.execute("x = 1", silent=True)
    reply_to(client, silent)
    content = {"code": "y = 2", "silent": False, "store_history": False}
    message = client.session.msg("execute_request", content)
    message["header"]["subshell_id"] = subshell
    client.shell_channel.send(message)
    reply = reply_to(client, message["header"]["msg_id"])
    assert reply["content"]["status"] == "ok"
    requests = {request.msg_id: request for request in relay.monitor.requests}
    assert requests[silent].silent
    assert not requests[silent].is_cell
    there = requests[message["header"]["msg_id"]]
    assert (there.subshell_id, there.channel, there.is_cell) == (subshell, "shell", True)


def test_completion(client: BlockingKernelClient) -> None:
    reply = reply_to(client, client.complete("impo", 4))
    assert "import" in reply["content"]["matches"]


def test_input_pauses_and_goes_on(relay: RelayThread, client: BlockingKernelClient) -> None:
    msg_id = client.execute("print(input('name? '))", allow_stdin=True)
    request = client.get_stdin_msg(timeout=PATIENCE_S)
    assert request["content"]["prompt"] == "name? "
    relay.monitor.wait_for("input_requested", msg_id)
    client.input("Ada")
    reply, outputs = finish(client, msg_id)
    assert reply["content"]["status"] == "ok"
    assert any(m["content"].get("text") == "Ada\n" for m in outputs)
    relay.monitor.wait_for("input_replied", msg_id)


def test_heartbeat(client: BlockingKernelClient) -> None:
    client.hb_channel.unpause()
    deadline = time.monotonic() + PATIENCE_S
    while not client.hb_channel.is_beating() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert client.hb_channel.is_beating()


def test_refusal_is_answered_in_the_cell_and_the_guest_lives(
    relay: RelayThread, client: BlockingKernelClient
) -> None:
    relay.monitor.refuse = lambda request: (
        Refuse("CellLimitExceeded", "too many") if request.is_cell else None
    )
    try:
        msg_id = client.execute("touched = True")
        reply, outputs = finish(client, msg_id)
    finally:
        relay.monitor.refuse = lambda request: None
    assert reply["msg_type"] == "execute_reply"
    assert reply["content"]["status"] == "error"
    assert reply["content"]["ename"] == "CellLimitExceeded"
    assert kinds(outputs) == ["error", "status"]
    reply, _ = finish(client, client.execute("touched"))
    assert reply["content"]["ename"] == "NameError"


def test_large_refused_request_is_swallowed_whole(
    relay: RelayThread, client: BlockingKernelClient
) -> None:
    relay.monitor.refuse = lambda request: Refuse("No", "no") if request.is_cell else None
    try:
        reply, _ = finish(client, client.execute("x = '" + "a" * 5_000_000 + "'"))
    finally:
        relay.monitor.refuse = lambda request: None
    assert reply["content"]["ename"] == "No"
    reply, _ = finish(client, client.execute("1"))
    assert reply["content"]["status"] == "ok"


def test_large_code_passes(client: BlockingKernelClient) -> None:
    reply, outputs = finish(client, client.execute("len('" + "a" * 3_000_000 + "')"))
    assert reply["content"]["status"] == "ok"
    assert any("3000000" in str(m["content"]) for m in outputs if m["msg_type"] == "execute_result")


def test_100_mib_buffer_is_intact_both_ways(client: BlockingKernelClient) -> None:
    code = """
import hashlib
def opened(comm, message):
    comm.on_msg(lambda m: comm.send({"sha": hashlib.sha256(m["buffers"][0]).hexdigest()},
                                    buffers=[m["buffers"][0]]))
get_ipython().kernel.comm_manager.register_target("echo", opened)
"""
    finish(client, client.execute(code))
    open_message = client.session.msg(
        "comm_open", {"comm_id": "c1", "target_name": "echo", "data": {}}
    )
    client.shell_channel.send(open_message)
    payload = hashlib.sha256(b"seed").digest() * (100 * 1024 * 1024 // 32)
    message = client.session.msg("comm_msg", {"comm_id": "c1", "data": {}})
    begin = time.monotonic()
    client.session.send(client.shell_channel.socket, message, buffers=[payload])
    while True:
        got = client.get_iopub_msg(timeout=60)
        if got["msg_type"] == "comm_msg":
            break
    print(f"100 MiB there and back: {time.monotonic() - begin:.2f} s")
    assert got["content"]["data"]["sha"] == hashlib.sha256(payload).hexdigest()
    assert bytes(got["buffers"][0]) == payload


def test_comm_messages_end_with_idle(relay: RelayThread, client: BlockingKernelClient) -> None:
    message = client.session.msg("comm_msg", {"comm_id": "unknown", "data": {}})
    client.shell_channel.send(message)
    relay.monitor.wait_for("replied", message["header"]["msg_id"], "idle")


@pytest.mark.timeout(400)
def test_20000_displays_to_a_stalled_subscriber_arrive_in_full(
    relay: RelayThread, client: BlockingKernelClient
) -> None:
    code = "from IPython.display import display\nfor i in range(20000): display(i)"
    msg_id = client.execute(code)
    # Not reading iopub until the reply is here: 20,000 are more than any queue on the way holds.
    reply = reply_to(client, msg_id, 300)
    assert reply["content"]["status"] == "ok"
    seen = []
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != msg_id:
            continue
        if message["msg_type"] == "display_data":
            seen.append(int(message["content"]["data"]["text/plain"]))
        elif message["content"].get("execution_state") == "idle":
            break
    assert seen == list(range(20000))


def ask(client: BlockingKernelClient, kind: str, content: dict[str, Any], **header: Any) -> Any:
    """Send a control request and return its reply."""
    message = client.session.msg(kind, content)
    message["header"].update(header)
    client.control_channel.send(message)
    reply = client.get_control_msg(timeout=PATIENCE_S)
    assert reply["parent_header"]["msg_id"] == message["header"]["msg_id"]
    return reply


def test_an_interrupted_question_is_followed_by_another(
    relay: RelayThread, client: BlockingKernelClient
) -> None:
    """The first one is never answered: it must not stand in the way."""
    code = """
for _ in range(3):
    try:
        print("got", input("again? "))
    except KeyboardInterrupt:
        print("interrupted")
"""
    msg_id = client.execute(code, allow_stdin=True)
    for _ in range(2):
        assert client.get_stdin_msg(timeout=PATIENCE_S)["content"]["prompt"] == "again? "
        assert ask(client, "interrupt_request", {})["content"]["status"] == "ok"
    client.get_stdin_msg(timeout=PATIENCE_S)
    client.input("Ada")
    reply, outputs = finish(client, msg_id)
    assert reply["content"]["status"] == "ok"
    text = "".join(m["content"]["text"] for m in outputs if m["msg_type"] == "stream")
    assert text == "interrupted\ninterrupted\ngot Ada\n"


def test_subshells_and_the_debugger_are_answered(
    relay: RelayThread, client: BlockingKernelClient
) -> None:
    made = ask(client, "create_subshell_request", {})["content"]["subshell_id"]
    listed = ask(client, "list_subshell_request", {})["content"]["subshell_id"]
    assert made in listed
    ask(client, "delete_subshell_request", {"subshell_id": made})
    info = {"type": "request", "seq": 1, "command": "debugInfo"}
    assert ask(client, "debug_request", info)["content"]["success"]
    assert "pid" in ask(client, "usage_request", {})["content"]
    # To a subshell that is gone: a request and a comm message are both answered with an error.
    for kind, content in (
        ("execute_request", {"code": "1", "silent": False}),
        ("comm_open", {"comm_id": "c", "target_name": "t", "data": {}}),
    ):
        message = client.session.msg(kind, content)
        message["header"]["subshell_id"] = made
        client.shell_channel.send(message)
        reply = reply_to(client, message["header"]["msg_id"])
        assert reply["msg_type"] == kind.rsplit("_", 1)[0] + "_reply"
        assert reply["content"]["ename"] == "UnknownSubshellError"


def test_an_aborted_queue_is_answered(relay: RelayThread, client: BlockingKernelClient) -> None:
    # It fails only when the others are in the queue; what comes after the abort is executed.
    code = "import time; input(); time.sleep(0.5); 1/0"
    failing = client.execute(code, allow_stdin=True)
    client.get_stdin_msg(timeout=PATIENCE_S)
    queued = [client.execute(f"{number}") for number in range(3)]
    for msg_id in queued:
        relay.monitor.wait_for("admit", msg_id)
    client.input("")
    statuses = {
        msg_id: reply_to(client, msg_id)["content"]["status"] for msg_id in (failing, *queued)
    }
    assert statuses == {failing: "error", **dict.fromkeys(queued, "aborted")}


def test_text_that_is_odd_json_arrives(client: BlockingKernelClient) -> None:
    """ipykernel sends the first as a byte that is no UTF-8: clients replace it."""
    for expression, shown in (
        ("'name\\udcff'", "name\ufffd"),
        ("'[{' * 2000", "[{" * 2000),
        ("'9' * 6000", "9" * 6000),
        ("10 ** 4000", "1" + "0" * 4000),
    ):
        reply, outputs = finish(client, client.execute(f"print({expression})"))
        assert reply["content"]["status"] == "ok"
        text = "".join(m["content"]["text"] for m in outputs if m["msg_type"] == "stream")
        assert text == shown + "\n"


def test_output_of_a_forked_child_arrives(client: BlockingKernelClient) -> None:
    code = """
import os
child = os.fork()
if child == 0:
    print("from the child", flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    reply, _ = finish(client, client.execute(code))
    assert reply["content"]["status"] == "ok"
    reply, _ = finish(client, client.execute("1"))
    assert reply["content"]["status"] == "ok"


def test_a_client_that_leaves_does_not_stop_the_observation(relay: RelayThread) -> None:
    client = relay.client()
    client.wait_for_ready(timeout=PATIENCE_S)
    msg_id = client.execute("import time; time.sleep(1)")
    relay.monitor.wait_for("started", msg_id)
    client.stop_channels()
    relay.monitor.wait_for("replied", msg_id, "ok")


def test_nothing_is_dropped_in_ordinary_use(relay: RelayThread) -> None:
    assert relay.monitor.kinds("violation") == []
    assert relay.monitor.kinds("output_exceeded") == []
    assert relay.call(lambda: relay.relay.stats)["dropped"] == 0


FLOOD = """
from ipykernel.kernelapp import IPKernelApp
app = IPKernelApp.instance()
session, header = app.kernel.session, app.kernel.get_parent("shell")["header"]
identity = app.kernel._parent_ident["shell"][0]
buffer = b"x" * (20 * 2**20)
for _ in range(20):
    parts = session.serialize(session.msg({kind!r}, {{}}, parent=header))
    app.{socket}.send_multipart([identity, *parts, buffer], copy=False)
"""


@pytest.mark.parametrize(
    ("socket", "kind"),
    [
        ("control_socket", "interrupt_reply"),
        ("control_socket", "execute_reply"),
        ("stdin_socket", "input_request"),
        ("stdin_socket", "display_data"),
        ("shell_socket", "inspect_reply"),
    ],
)
def test_a_kernel_that_floods_its_client_reaches_the_relay_only(
    client: BlockingKernelClient, relay: RelayThread, socket: str, kind: str
) -> None:
    before, dropped = resident(), relay.call(lambda: relay.relay.stats)["dropped"]
    msg_id = client.execute(FLOOD.format(socket=socket, kind=kind), allow_stdin=True)
    reply, outputs = finish(client, msg_id)
    assert (reply["msg_type"], reply["content"]["status"]) == ("execute_reply", "ok"), outputs
    deadline = time.monotonic() + 30
    while relay.call(lambda: relay.relay.stats)["dropped"] < dropped + 20:
        assert time.monotonic() < deadline
    assert resident() - before < 64 * 2**20  # 400 MiB were sent; the client is in this process
    relay.monitor.wait_for("replied", msg_id, "ok")
    finish(client, client.execute("1"))


# ---- death


def test_death_in_a_cell_is_told_to_it_and_to_the_queue() -> None:
    with kernel_behind_relay() as (relay, kernel):
        client = relay.client()
        client.wait_for_ready(timeout=60)
        running = client.execute("import time; print('begun', flush=True); time.sleep(600)")
        queued = client.execute("1")
        relay.monitor.wait_for("started", running)
        relay.monitor.wait_for("admit", queued)
        kernel.kill()
        begin = time.monotonic()
        count = relay.run(
            relay.relay.fail_pending("CellDeadlineExceeded", "ran too long", timeout=50)
        )
        # Not even half of its time, as for a guest that does not close.
        assert time.monotonic() - begin < 20
        assert count == 2
        for msg_id in (running, queued):
            reply, outputs = finish(client, msg_id)
            assert kinds(outputs)[-2:] == ["error", "status"]
            assert outputs[-2]["content"]["ename"] == "CellDeadlineExceeded"
            assert outputs[-2]["content"]["evalue"] == "ran too long"
            assert reply["content"]["status"] == "error"
            assert reply["content"]["traceback"] == ["CellDeadlineExceeded: ran too long"]
        reply, outputs = finish(client, client.execute("2"))  # linger
        assert reply["content"]["ename"] == "CellDeadlineExceeded"
        assert kinds(outputs) == ["error", "status"]
        late = relay.client()  # a client that comes after the death
        try:
            msg_id = late.execute("3")
            reply = late.get_shell_msg(timeout=PATIENCE_S)
            assert reply["parent_header"]["msg_id"] == msg_id
            assert reply["content"]["ename"] == "CellDeadlineExceeded"
        finally:
            late.stop_channels()
            client.stop_channels()


def test_death_amid_large_frames_is_told() -> None:
    """Where the kill falls is up to the machine; test_relay_hostile fixes it inside a frame."""
    with kernel_behind_relay() as (relay, kernel):
        client = relay.client()
        client.wait_for_ready(timeout=60)
        code = """
from IPython.display import publish_display_data
while True:
    publish_display_data({'text/plain': 'x' * 20_000_000})
"""
        msg_id = client.execute(code)
        relay.monitor.wait_for("started", msg_id)

        def inside() -> bool:
            return any(entry._from_guest.streaming for entry in relay.relay._of("iopub"))

        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if relay.call(inside):
                kernel.kill()
                break
        relay.run(relay.relay.fail_pending("GuestLost", "gone", timeout=5))
        reply, outputs = finish(client, msg_id)
        assert reply["content"]["ename"] == "GuestLost"
        assert kinds(outputs)[-2:] == ["error", "status"]
        client.stop_channels()


def test_connections_before_open_wait_and_then_work() -> None:
    with kernel_behind_relay() as (relay, _):
        second = RelayThread(relay.client_paths["shell"].parent, name="x")
        second.relay._guest_paths = relay.guest_paths
        client = second.client()
        msg_id = client.kernel_info()
        with pytest.raises(queue.Empty):
            client.get_shell_msg(timeout=0.5)
        second.open()
        assert client.get_shell_msg(timeout=PATIENCE_S)["parent_header"]["msg_id"] == msg_id
        client.stop_channels()
        second.stop()
        assert not any(path.exists() for path in second.client_paths.values())
