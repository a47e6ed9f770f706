"""The extension in a real Jupyter server: who may ask, what moves, what leaves, what is told."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contract import check
from sandboxes import remains
from server import API, STOP_S, WAIT_S, Answer, Server, jupyter_server, kernelspec

from kernel_provisioner.engines.base import ProcessIdentity
from kernel_provisioner.paths import state_dirs
from kernel_provisioner.processes import is_running
from kernel_provisioner.records import live_sessions

pytestmark = pytest.mark.sandbox

KERNEL_ROUTES = ("", "/artifacts", "/artifacts/a.csv", "/receipt")


def run(server: Server, kernel: str, *cells: str) -> str:
    """Run cells one by one; return their text."""

    async def body() -> str:
        async with server.channels(kernel) as channels:
            return "".join([await channels.run(cell) for cell in cells])

    return asyncio.run(body())


async def later(function: Callable[..., Answer], *args: object) -> Answer:
    """Ask without stopping the test's own event loop."""
    return await asyncio.to_thread(function, *args)


@pytest.fixture(scope="module")
def shared_kernel(shared_server: Server) -> Iterator[str]:
    """A kernel for tests that leave it as it was, but for its artifacts."""
    kernel = shared_server.start()
    shared_server.kernels.remove(kernel)
    yield kernel
    assert shared_server.request("DELETE", f"api/kernels/{kernel}").status == 204


@pytest.fixture
def kernel(server: Server, shared_kernel: str) -> Iterator[str]:
    """That kernel; its artifacts are removed afterwards."""
    yield shared_kernel
    run(
        server,
        shared_kernel,
        "import os, shutil\nos.chdir('/workspace')\nfor name in os.listdir(b'/artifacts'):\n"
        " path = os.path.join(b'/artifacts', name)\n"
        " real = os.path.isdir(path) and not os.path.islink(path)\n"
        " shutil.rmtree(path) if real else os.unlink(path)",
    )


# -- who may ask -------------------------------------------------------------------------------


def test_a_kernel_that_is_not_ours_looks_like_one_that_is_not_there(server: Server) -> None:
    plain = server.start("python3")
    unknown = plain.replace(plain[:8], "00000000")
    for route in KERNEL_ROUTES:
        mine, none = server.ours(plain, route), server.ours(unknown, route)
        assert (mine.status, none.status) == (404, 404)
        assert mine.body.replace(plain.encode(), b"") == none.body.replace(unknown.encode(), b"")
    assert server.export(plain, "x").status == 404


def test_a_kernel_of_another_server_is_not_there(
    server: Server, kernel: str, tmp_path: Path
) -> None:
    with jupyter_server(tmp_path) as other:
        for route in KERNEL_ROUTES:
            assert other.ours(kernel, route).status == 404
        assert other.export(kernel, "x").status == 404
    assert server.ours(kernel).status == 200
    assert not (server.root / "x").exists()


def test_the_authorizer_decides(server: Server, kernel: str) -> None:
    for route in KERNEL_ROUTES:
        assert server.ours(kernel, route, headers={"X-Deny": "read:kernels"}).status == 403
    for denied in ("write:kernels", "write:contents"):
        answer = server.export(kernel, "denied", headers={"X-Deny": denied})
        assert answer.status == 403
        check("exportArtifacts", answer)
    assert not (server.root / "denied").exists()
    for route in ("profiles", "sources"):
        denied_read = server.get(f"{API}/{route}", headers={"X-Deny": "read:kernels"})
        assert denied_read.status == 403


def test_a_page_of_another_origin_cannot_export(server: Server, kernel: str) -> None:
    session = server.get("api/status").headers["Set-Cookie"].partition(";")[0]
    cookie = {"Cookie": f"{session}; _xsrf=0f0f"}
    ask: Callable[[dict[str, str]], Answer] = lambda more: server.export(  # noqa: E731
        kernel, "cookie", token=False, headers={**cookie, **more}
    )
    assert ask({}).status == 403
    assert ask({"X-XSRFToken": "0f0e"}).status == 403
    assert not (server.root / "cookie").exists()
    assert ask({"X-XSRFToken": "0f0f"}).status == 200


# -- what moves --------------------------------------------------------------------------------


def test_the_figures_move(server: Server) -> None:
    asyncio.run(_figures(server))


async def _figures(server: Server) -> None:
    kernel = await asyncio.to_thread(server.start, "with-source")
    first = (await later(server.ours, kernel)).json
    assert first["state"] == "idle"
    assert first["cell"] is None
    assert first["network"] == "off"
    assert first["profile"] == "analysis"
    assert first["isolation"] == "namespaces: weaker isolation"
    assert [source["guest_path"] for source in first["sources"]] == ["/sources/files"]
    async with server.channels(kernel) as channels:
        await channels.run(
            "held = bytearray(200 << 20)\nfor i in range(0, 200 << 20, 4096):\n held[i] = 1"
        )
        msg_id = channels.send(
            "import os, time\nprint('at work', flush=True)\n"
            "while not os.path.exists('/tmp/stop'): time.sleep(0.01)"
        )
        await channels.until(msg_id, "stream")
        busy = await _until(
            server, kernel, lambda status: status["memory"]["used_bytes"] > 200 << 20
        )
        assert busy["state"] == "busy"
        assert busy["cell"]["msg_id"] == msg_id
        assert busy["cell"]["deadline_s"] == 120
        later_on = await _until(
            server, kernel, lambda s: s["cell"]["elapsed_s"] > busy["cell"]["elapsed_s"]
        )
        assert later_on["run"]["left_s"] < first["run"]["left_s"]
        assert later_on["cells"] == {"count": 2, "limit": 40}
        interrupted = await later(server.request, "POST", f"api/kernels/{kernel}/interrupt")
        assert interrupted.status == 204
        await channels.until(msg_id, "execute_reply")
        idle = await _until(server, kernel, lambda status: status["state"] == "idle")
        assert idle["cell"] is None
        assert await channels.run("print(len(held))") == f"{200 << 20}\n"


async def _until(server: Server, kernel: str, holds: Callable[[dict], bool]) -> dict:  # type: ignore[type-arg]
    """Ask until the status is so; each answer must be as documented."""
    async with asyncio.timeout(WAIT_S):
        while True:
            answer = await later(server.ours, kernel)
            check("getStatus", answer)
            if holds(answer.json):
                return answer.json
            await asyncio.sleep(0.05)


# -- what leaves -------------------------------------------------------------------------------


def test_bytes_and_digests_are_those_of_the_guest(server: Server, kernel: str) -> None:
    told = run(
        server,
        kernel,
        "import os, hashlib\nos.makedirs('/artifacts/deep/er')\ndata = os.urandom(5_000_001)\n"
        "open('/artifacts/deep/er/ä b%20.parquet', 'wb').write(data)\n"
        "print(hashlib.sha256(data).hexdigest())",
    ).strip()
    listed = server.ours(kernel, "/artifacts").json
    assert [(item["name"], item["size"]) for item in listed["artifacts"]] == [
        ("deep/er/ä b%20.parquet", 5_000_001)
    ]
    got = server.ours(kernel, "/artifacts/deep/er/%C3%A4%20b%2520.parquet")
    assert hashlib.sha256(got.body).hexdigest() == told
    assert got.headers["Digest"] == "sha-256=" + base64.b64encode(bytes.fromhex(told)).decode()
    assert got.headers["Content-Disposition"].startswith("attachment;")
    assert got.headers["Content-Type"] == "application/octet-stream"
    made = server.export(kernel, "here")
    assert made.json["artifacts"] == [
        {"name": "deep/er/ä b%20.parquet", "size": 5_000_001, "sha256": told}
    ]
    published = server.root / "here" / "deep" / "er" / "ä b%20.parquet"
    assert published.read_bytes() == got.body
    receipt = server.ours(kernel, "/receipt").json
    assert receipt["artifacts"] == made.json["artifacts"]
    assert receipt["exports"][-1]["files"] == 1
    assert receipt["ended"] is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("page.html", "text/html; charset=utf-8"),
        ("image.svg", "image/svg+xml"),
        ("image.png", "image/png"),
        ("table.csv", "text/plain; charset=utf-8"),
    ],
)
def test_a_preview_is_inert(server: Server, kernel: str, name: str, kind: str) -> None:
    run(server, kernel, f"open('/artifacts/{name}', 'w').write('<script>alert(1)</script>')")
    shown = server.ours(kernel, f"/artifacts/{name}?preview=1")
    assert shown.status == 200
    assert shown.headers["Content-Type"] == kind
    assert shown.headers["X-Content-Type-Options"] == "nosniff"
    rules = [rule.strip() for rule in shown.headers["Content-Security-Policy"].split(";")]
    assert rules == [
        "sandbox",
        "default-src 'none'",
        "img-src data:",
        "style-src 'unsafe-inline'",
        "frame-ancestors 'self'",
    ]


HOSTILE = r"""
import os
os.chdir('/artifacts')
open('good.csv', 'w').write('1')
for name in ('run.exe', 'line\nbreak.csv', 'right\u202eto left.csv', b'not-utf8-\xff.csv'):
    open(name, 'w').close()
os.symlink('/etc/passwd', 'passwd.txt')
os.link('good.csv', 'twin.csv')
os.mkfifo('pipe.csv')
import socket; socket.socket(socket.AF_UNIX).bind('socket.csv')
open('GOOD.csv', 'w').close()
"""


def test_hostile_names_are_shown_as_such_and_nothing_leaves(server: Server, kernel: str) -> None:
    run(server, kernel, HOSTILE)
    answer = server.ours(kernel, "/artifacts")
    check("listArtifacts", answer)
    judged = {item["name"]: item["refused"] for item in answer.json["artifacts"]}
    assert [name for name, reason in judged.items() if reason is None] == ["GOOD.csv"]
    assert len(judged) == 10
    assert all(name.isascii() and name.isprintable() for name in judged)
    for words in ("hard link", "symbolic link", "FIFO", "socket", "suffix", "not UTF-8", "clashes"):
        assert any(words in reason for reason in judged.values() if reason), words
    for refused in (
        server.ours(kernel, "/artifacts/GOOD.csv"),
        server.ours(kernel, "/artifacts/passwd.txt"),
        server.export(kernel, "nothing"),
    ):
        assert refused.status == 422
        assert refused.json["reason"] == "export_refused"
        assert "root:" not in refused.body.decode()
    assert not (server.root / "nothing").exists()
    assert not list(server.root.glob(".backintel-export-*"))


def test_an_export_goes_into_a_new_directory_of_the_root_only(server: Server, kernel: str) -> None:
    run(server, kernel, "open('/artifacts/a.csv', 'w').write('1')")
    outside = server.root.parent / "outside"
    outside.mkdir(exist_ok=True)
    (server.root / "link").symlink_to(outside)
    (server.root / "mine").mkdir()
    (server.root / "mine" / "notes.txt").write_text("mine")
    for bad in (
        "",
        "/abs",
        "../up",
        "a/../../up",
        "a//b",
        ".hidden",
        "link/in",
        "none/in",
        7,
        "x\n",
    ):
        answer = server.export(kernel, bad)
        assert answer.status == 400, bad
        check("exportArtifacts", answer)
    taken = server.export(kernel, "mine")
    assert (taken.status, taken.json["reason"]) == (409, "output_refused")
    assert [path.name for path in (server.root / "mine").iterdir()] == ["notes.txt"]
    assert list(outside.iterdir()) == []
    assert server.export(kernel, "mine/new").status == 200
    assert (server.root / "mine" / "new" / "a.csv").read_text() == "1"
    assert server.export(kernel, "mine/new").status == 409


# -- what is told ------------------------------------------------------------------------------


def test_events_tell_a_start_a_crash_and_its_receipt(server: Server) -> None:
    asyncio.run(_crash(server))


async def _crash(server: Server) -> None:
    (server.root / "books").mkdir(exist_ok=True)
    model = {
        "path": "books/flights.ipynb",
        "name": "flights.ipynb",
        "type": "notebook",
        "kernel": {"name": "backintel-sandbox"},
    }
    async with server.events() as events:
        asked = await later(server.request, "POST", "api/sessions", model)
        kernel = asked.json["kernel"]["id"]
        server.kernels.append(kernel)
        started = await events.until("ready")
        phases = [event["phase"] for event in started[:-1]]
        assert phases[0] == "supervisor"
        assert phases[-1] == "ready"
        assert {event["kernel_id"] for event in started} == {kernel}
        assert {event["notebook"] for event in started} == {"books/flights.ipynb"}
        first = started[-1]["session"]
        async with server.channels(kernel) as channels:
            channels.send("import os; os._exit(3)")
            ended = (await events.until("ended"))[-1]
        assert (ended["reason"], ended["class"]) == ("KernelCrashed", "user")
        assert ended["session"] == first
        again = await events.until("ready")
        second = again[-1]["session"]
    assert second != first
    status = (await later(server.ours, kernel)).json
    assert (status["session"], status["previous"]) == (second, first)
    old = await later(server.ours, kernel, f"/receipt?session={first}")
    check("getReceipt", old)
    assert old.json["ended"]["reason"] == "KernelCrashed"
    await asyncio.to_thread(server.stop, kernel)
    gone = await later(server.ours, kernel)
    check("getStatus", gone)
    assert gone.json["ended"]["reason"] == "Shutdown"
    last = await later(server.ours, kernel, "/receipt")
    assert (last.json["session"], last.json["previous"]) == (second, first)


def test_a_start_that_waits_tells_how_far_it_is(server: Server) -> None:
    """It waits for a database that somebody writes to, until that is committed."""
    asyncio.run(_waiting(server))


async def _waiting(server: Server) -> None:
    book = server.root.parent / "book.sqlite"
    with contextlib.closing(sqlite3.connect(book, isolation_level=None)) as writer:
        async with server.events() as events:
            writer.execute("BEGIN EXCLUSIVE")
            start = asyncio.create_task(asyncio.to_thread(server.start, "with-book"))
            (told,) = await events.until("phase")
            assert told["phase"] == "supervisor"
            assert not start.done()
            status = (await later(server.ours, told["kernel_id"])).json
            assert status["state"] == "starting"
            assert [source["name"] for source in status["sources"]] == ["book"]
            writer.execute("COMMIT")
            phases = [event["phase"] for event in (await events.until("ready"))[:-1]]
            assert phases == ["verified", "attested", "kernel", "image", "ready"]
            await start


def test_events_and_metrics_tell_a_deadline(server: Server) -> None:
    late = 'backintel_deadlines_total{clock="cell"}'
    (before,) = metrics(server, late)
    asyncio.run(_late(server))
    assert metrics(server, late) == [before + 1]


async def _late(server: Server) -> None:
    async with server.events() as events:
        kernel = await asyncio.to_thread(server.start, "hasty")
        await events.until("ready")
        async with server.channels(kernel) as channels:
            msg_id = channels.send("import time\nwhile True: time.sleep(0.01)")
            late = (await events.until("deadline"))[-1]
            assert (late["msg_id"], late["seconds"]) == (msg_id, 1)
            reply = (await channels.until(msg_id, "execute_reply"))[-1]
            assert reply["content"]["ename"] == "KeyboardInterrupt"


def test_a_killed_supervisor_is_told(server: Server) -> None:
    asyncio.run(_killed(server))


async def _killed(server: Server) -> None:
    async with server.events() as events:
        kernel = await asyncio.to_thread(server.start)
        await events.until("ready")
        (record,) = [r for r in live_sessions(state_dirs()) if r.kernel_id == kernel]
        os.kill(record.supervisor.pid, signal.SIGKILL)
        ended = (await events.until("ended"))[-1]
        assert (ended["reason"], ended["class"]) == ("GuestLost", "infrastructure")
        await events.until("ready")


def test_a_start_that_fails_is_told(server: Server) -> None:
    answer = server.request("POST", "api/kernels", {"name": "bad-source"})
    assert answer.status == 500
    plan = server.get(f"{API}/sources?kernel=bad-source")
    assert plan.status == 409
    assert "/etc" in plan.json["message"]
    assert plan.json["remedy"]


def test_a_server_stops_with_its_kernels_after_a_start_that_failed(tmp_path: Path) -> None:
    kernelspec(tmp_path / "data", "bad-source", engine="bwrap", sources={"files": "/etc"})
    with jupyter_server(tmp_path) as other:
        assert other.request("POST", "api/kernels", {"name": "bad-source"}).status == 500
        kernel = other.start()
        assert kernel in {record.kernel_id for record in live_sessions(state_dirs())}
    # It ended within its time, and nothing of the kernel is left.
    assert kernel not in {record.kernel_id for record in live_sessions(state_dirs())}


def test_a_server_that_stops_during_a_start_leaves_nothing(tmp_path: Path) -> None:
    """The start waits for a database that somebody writes to, for as long as that is locked."""
    book = tmp_path / "book.sqlite"
    with contextlib.closing(sqlite3.connect(book)) as database, database:
        database.execute("CREATE TABLE line (text)")
    kernelspec(tmp_path / "data", "with-book", engine="bwrap", sources={"book": str(book)})
    before = remains()
    with contextlib.closing(sqlite3.connect(book, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        supervisors = asyncio.run(_stopped_while_starting(tmp_path))
        # They end with their server, and not with the writer.
        deadline = time.monotonic() + STOP_S
        while any(map(is_running, supervisors)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(is_running, supervisors))
        assert not remains() - before


async def _stopped_while_starting(home: Path) -> list[ProcessIdentity]:
    """Stop a server with a live kernel while a second one starts; return their supervisors."""
    with jupyter_server(home) as other:
        kernel = await asyncio.to_thread(other.start)
        async with other.events() as events:
            start = asyncio.create_task(asyncio.to_thread(other.start, "with-book"))
            (told,) = await events.until("phase")
        assert not start.done()
        records = {record.kernel_id: record for record in live_sessions(state_dirs())}
        supervisors = [records[name].supervisor for name in (kernel, told["kernel_id"])]
    # It ended within its time: no answer came any more.
    with pytest.raises(ConnectionError):
        await start
    return supervisors


def metrics(server: Server, *names: str) -> list[float]:
    """Return figures of one look at Jupyter's own page of metrics; 0 for what is not there yet."""
    page = server.get("metrics").body.decode()
    told = {
        name: float(value)
        for name, _, value in (x.rpartition(" ") for x in page.splitlines())
        if name in names
    }
    return [told.get(name, 0.0) for name in names]


def test_metrics_count_what_happens(server: Server) -> None:
    names = {
        "starts": 'backintel_start_seconds_count{engine="bwrap"}',
        "peaks": 'backintel_memory_peak_bytes_count{engine="bwrap"}',
        "ends": 'backintel_ends_total{reason="Shutdown"}',
        "published": 'backintel_exports_total{result="published"}',
        "refused": 'backintel_exports_total{result="refused"}',
    }
    states = [
        f'backintel_sessions{{engine="bwrap",state="{state}"}}'
        for state in ("starting", "idle", "busy")
    ]
    before = metrics(server, *names.values())
    others = sum(metrics(server, *states))
    kernel = server.start()
    assert sum(metrics(server, *states)) == others + 1
    assert server.export(kernel, "counted").status == 200
    run(server, kernel, "import os; os.symlink('/etc', '/artifacts/e.csv')")
    assert server.export(kernel, "counted-not").status == 422
    server.stop(kernel)
    after = metrics(server, *names.values())
    grown = [now - then for now, then in zip(after, before, strict=True)]
    assert dict(zip(names, grown, strict=True)) == dict.fromkeys(names, 1.0)


def test_memory_that_nears_its_limit_is_told_before_it_ends(server: Server) -> None:
    asyncio.run(_full(server))


async def _full(server: Server) -> None:
    async with server.events() as events:
        kernel = await asyncio.to_thread(server.start, "small")
        await events.until("ready")
        async with server.channels(kernel) as channels:
            await channels.run("held = b'x' * (440 << 20)")
            warned = (await events.until("memory"))[-1]
            assert warned["limit_bytes"] == 512 << 20
            assert warned["used_bytes"] >= 0.9 * warned["limit_bytes"]
            status = (await later(server.ours, kernel)).json
            assert status["memory"]["warned"] is True
            channels.send("more = b'x' * (200 << 20)")
            ended = (await events.until("ended"))[-1]
            assert (ended["reason"], ended["class"]) == ("OutOfMemory", "limit")
