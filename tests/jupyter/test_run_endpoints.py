"""Assigned endpoints (spec F) through the whole product: a notebook reads a store of the host."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import Bench

pytestmark = pytest.mark.sandbox


class _Store(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = f"you asked {self.headers['Host']} for {self.path}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def store() -> Iterator[int]:
    """An HTTP server on the host's loopback; its port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Store) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_notebook_reads_an_assigned_store_and_the_receipt_says_so(
    bench: Bench, store: int
) -> None:
    bench.write(
        "import urllib.request as r\n"
        f"print(r.urlopen('http://localhost:{store}/rows', timeout=30).read().decode())",
        "import socket\n"
        "try:\n"
        f"    socket.create_connection(('127.0.0.1', {store + 1 if store < 65535 else 1}))\n"
        "    print('REACHED')\n"
        "except OSError as error:\n"
        "    print(error.strerror)",
    )
    run = bench.run("--endpoint", f"web=localhost:{store}")
    assert run.status == 0
    assert run.cells[0].outputs[0].text == f"you asked localhost:{store} for /rows\n"
    assert run.cells[1].outputs[0].text == "Connection refused\n"
    (endpoint,) = run.receipt["endpoints"]
    received, sent = endpoint.pop("received_bytes"), endpoint.pop("sent_bytes")
    assert received > len(f"you asked localhost:{store} for /rows")
    assert sent > 0
    assert endpoint == {
        "name": "web",
        "kind": "tcp",
        "host": "localhost",
        "port": store,
        "identity": "stated",
        "connections": 1,
        "refused": 0,
        "failed": 0,
    }
    assert "endpoints" in run.receipt["timings_ms"]


def test_without_an_endpoint_the_same_store_is_out_of_reach(bench: Bench, store: int) -> None:
    bench.write(f"import socket\nsocket.create_connection(('127.0.0.1', {store}), timeout=30)")
    run = bench.run()
    assert run.status == 1
    assert run.errors == ["ConnectionRefusedError"]
    assert run.receipt["endpoints"] == []


def test_a_store_that_is_down_is_told_in_the_cell_and_the_session_goes_on(bench: Bench) -> None:
    with socket.socket() as down:
        down.bind(("127.0.0.1", 0))
        port = down.getsockname()[1]
        bench.write(
            "import socket\n"
            f"with socket.create_connection(('127.0.0.1', {port}), timeout=30) as sock:\n"
            "    try:\n"
            "        print('closed', sock.recv(1))\n"
            "    except ConnectionResetError:\n"
            "        print('closed')",
            "print('goes on')",
        )
        run = bench.run("--endpoint", f"store=127.0.0.1:{port}")
    assert run.status == 0
    text = "".join(output.text for cell in run.cells for output in cell.outputs)
    assert f"endpoint store (127.0.0.1:{port}) was closed: connection refused." in text
    assert text.endswith("goes on\n")
    (endpoint,) = run.receipt["endpoints"]
    assert (endpoint["connections"], endpoint["failed"]) == (0, 1)


def test_the_33rd_connection_at_once_is_refused(bench: Bench, store: int) -> None:
    bench.write(
        "import socket\n"
        "def ask(sock):\n"
        "    try:\n"
        "        sock.sendall(b'GET / HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')\n"
        "        return sock.recv(12)\n"
        "    except ConnectionError:\n"
        "        return b''\n"
        f"held = [socket.create_connection(('localhost', {store}), timeout=30)"
        " for _ in range(32)]\n"
        "print({ask(sock) for sock in held})\n"
        f"print(ask(socket.create_connection(('localhost', {store}), timeout=30)))"
    )
    run = bench.run("--endpoint", f"web=localhost:{store}")
    assert run.status == 0
    text = "".join(output.text for output in run.cells[0].outputs if output.name == "stdout")
    assert text.startswith("{b'HTTP/1.1 200'}\nb''\n")
    (endpoint,) = run.receipt["endpoints"]
    assert (endpoint["connections"], endpoint["refused"]) == (32, 1)
