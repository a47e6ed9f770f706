"""Every documented route with every documented status, asked of a real server and sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from contract import DOCUMENT, check, documented
from openapi_spec_validator import validate
from server import API, Answer, Server

from kernel_provisioner.paths import state_dirs
from kernel_provisioner.records import live_sessions

pytestmark = pytest.mark.sandbox

UNKNOWN = "00000000-0000-0000-0000-000000000000"
FILES = r"""
import os
open('/artifacts/plain.csv', 'w').write('a,b\n1,2\n')
open('/artifacts/page.html', 'w').write('<script>alert(1)</script>')
open('/artifacts/raw.parquet', 'wb').write(bytes(range(256)))
open('/artifacts/big.png', 'wb').write(bytes(9 << 20))
"""


@dataclass
class World:
    """A server, a kernel that runs, and one that ended."""

    server: Server
    running: str
    ended: str
    config: Path

    def get(self, path: str, kernel: str | None = None) -> Answer:
        return self.server.ours(kernel or self.running, path)


@pytest.fixture(scope="module")
def world(shared_server: Server) -> Iterator[World]:
    """Both kernels; the tests of this module put nothing bad into the running one for good."""
    server = shared_server
    ended = server.start()
    server.stop(ended)
    running = server.start()
    server.kernels.remove(running)  # not a single test's to stop
    asyncio.run(_run(server, running, FILES))
    config = shared_server.root.parent / "xdg" / "backintel"
    yield World(server, running, ended, config)
    assert server.request("DELETE", f"api/kernels/{running}").status == 204


async def _run(server: Server, kernel: str, code: str) -> None:
    async with server.channels(kernel) as channels:
        await channels.run(code)


@contextlib.contextmanager
def broken(world: World) -> Iterator[None]:
    """The owner's configuration has a mistake meanwhile."""
    file = world.config / "backintel.toml"
    right = file.read_text()
    file.write_text("nonsense = 1\n")
    try:
        yield
    finally:
        file.write_text(right)


def refused(world: World, ask: Callable[[World], Answer]) -> Answer:
    """Ask while something that may not leave lies in /artifacts."""
    asyncio.run(_run(world.server, world.running, "os.symlink('/etc/passwd', '/artifacts/x.csv')"))
    try:
        return ask(world)
    finally:
        asyncio.run(_run(world.server, world.running, "os.unlink('/artifacts/x.csv')"))


def profiles_broken(world: World) -> Answer:
    with broken(world):
        return world.server.get(f"{API}/profiles")


def existing(world: World) -> Answer:
    (world.server.root / "full").mkdir(exist_ok=True)
    (world.server.root / "full" / "mine.txt").write_text("mine")
    return world.server.export(world.running, "full")


def anonymous(path: str) -> Callable[[World], Answer]:
    return lambda w: w.server.ours(w.running, path, token=False)


CASES: dict[tuple[str, int], Callable[[World], Answer]] = {
    ("getStatus", 200): lambda w: w.get(""),
    ("getStatus", 403): anonymous(""),
    ("getStatus", 404): lambda w: w.get("", UNKNOWN),
    ("listArtifacts", 200): lambda w: w.get("/artifacts"),
    ("listArtifacts", 403): anonymous("/artifacts"),
    ("listArtifacts", 404): lambda w: w.get("/artifacts", UNKNOWN),
    ("listArtifacts", 409): lambda w: w.get("/artifacts", w.ended),
    ("getArtifact", 200): lambda w: w.get("/artifacts/plain.csv"),
    ("getArtifact", 403): anonymous("/artifacts/plain.csv"),
    ("getArtifact", 404): lambda w: w.get("/artifacts/none.csv"),
    ("getArtifact", 409): lambda w: w.get("/artifacts/plain.csv", w.ended),
    ("getArtifact", 413): lambda w: w.get("/artifacts/big.png?preview=1"),
    ("getArtifact", 415): lambda w: w.get("/artifacts/raw.parquet?preview=1"),
    ("getArtifact", 422): lambda w: refused(w, lambda w: w.get("/artifacts/plain.csv")),
    ("exportArtifacts", 200): lambda w: w.server.export(w.running, "out"),
    ("exportArtifacts", 400): lambda w: w.server.export(w.running, "../out"),
    ("exportArtifacts", 403): lambda w: w.server.export(w.running, "out", token=False),
    ("exportArtifacts", 404): lambda w: w.server.export(UNKNOWN, "out"),
    ("exportArtifacts", 409): existing,
    ("exportArtifacts", 422): lambda w: refused(w, lambda w: w.server.export(w.running, "no")),
    ("getReceipt", 200): lambda w: w.get("/receipt"),
    ("getReceipt", 400): lambda w: w.get("/receipt?session=../../etc"),
    ("getReceipt", 403): anonymous("/receipt"),
    ("getReceipt", 404): lambda w: w.get("/receipt?session=0123456789abcdef"),
    ("listProfiles", 200): lambda w: w.server.get(f"{API}/profiles"),
    ("listProfiles", 403): lambda w: w.server.get(f"{API}/profiles", token=False),
    ("listProfiles", 409): profiles_broken,
    ("getSources", 200): lambda w: w.server.get(f"{API}/sources?kernel=with-source"),
    ("getSources", 403): lambda w: w.server.get(f"{API}/sources", token=False),
    ("getSources", 404): lambda w: w.server.get(f"{API}/sources?kernel=python3"),
    ("getSources", 409): lambda w: w.server.get(f"{API}/sources?kernel=bad-source"),
}
STOPPED = {
    (operation, 504)
    for operation in ("getStatus", "listArtifacts", "getArtifact", "exportArtifacts", "getReceipt")
}
STARTING = {("getReceipt", 409)}


def test_the_document_is_valid() -> None:
    validate(DOCUMENT)


def test_every_documented_answer_is_asked_for_here() -> None:
    assert CASES.keys() | STOPPED | STARTING == documented()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def test_the_answer_is_as_documented(world: World, case: tuple[str, int]) -> None:
    answer = CASES[case](world)
    assert answer.status == case[1], answer
    check(case[0], answer)


def supervisor(kernel: str) -> int:
    (record,) = [r for r in live_sessions(state_dirs()) if r.kernel_id == kernel]
    return record.supervisor.pid


def test_a_supervisor_that_hangs_is_told_within_seconds(server: Server) -> None:
    kernel = server.start()
    pid = supervisor(kernel)
    os.kill(pid, signal.SIGSTOP)
    try:
        asked: dict[str, Callable[[], Answer]] = {
            "getStatus": lambda: server.ours(kernel),
            "listArtifacts": lambda: server.ours(kernel, "/artifacts"),
            "getArtifact": lambda: server.ours(kernel, "/artifacts/a.csv"),
            "exportArtifacts": lambda: server.export(kernel, "hung"),
            "getReceipt": lambda: server.ours(kernel, "/receipt"),
        }
        assert {(operation, 504) for operation in asked} == STOPPED
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = {name: pool.submit(ask) for name, ask in asked.items()}
        for operation, answer in answers.items():
            assert answer.result().status == 504
            check(operation, answer.result())
    finally:
        os.kill(pid, signal.SIGCONT)
    # It has five old questions to answer first.
    deadline = time.monotonic() + 60
    while (answer := server.ours(kernel)).status == 504 and time.monotonic() < deadline:
        check("getStatus", answer)
    assert answer.status == 200
    check("getStatus", answer)


def test_a_sandbox_that_is_being_started_says_so(server: Server) -> None:
    asyncio.run(_while_it_starts(server))


async def _while_it_starts(server: Server) -> None:
    """It waits for a database that somebody writes to, until that is committed."""
    kernel = "11111111-2222-3333-4444-555555555555"
    book = sqlite3.connect(server.root.parent / "book.sqlite", isolation_level=None)
    with contextlib.closing(book) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        async with server.events() as events:
            starting = asyncio.create_task(
                asyncio.to_thread(
                    server.request,
                    "POST",
                    "api/kernels",
                    {"name": "with-book", "kernel_id": kernel},
                )
            )
            await events.until("phase", kernel)
            status = await asyncio.to_thread(server.ours, kernel)
            receipt = await asyncio.to_thread(server.ours, kernel, "/receipt")
        server.kernels.append(kernel)
        writer.execute("COMMIT")
        assert (await starting).status == 201
    check("getStatus", status)
    assert status.json["state"] == "starting"
    assert "supervisor" in status.json["phases"]
    assert receipt.status == 409
    check("getReceipt", receipt)
