"""One Jupyter server for all tests of the extension; each test has kernels of its own."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "jupyter"))

from sandboxes import remains
from server import Server, jupyter_server, kernelspec

SMALL = """
[profiles.small]
ram_mib = 512
cpus = 1
workspace_mib = 64
artifacts_mib = 64
temp_mib = 64
cell_deadline = 120
run_deadline = 900
"""


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the kernels that the tests use."""
    home = tmp_path_factory.mktemp("lab")
    data = home / "data"
    files = home / "files"
    files.mkdir()
    (files / "a.txt").write_text("source")
    kernelspec(
        data,
        "with-source",
        engine="bwrap",
        profile="analysis",
        sources={"files": str(files)},
    )
    book = home / "book.sqlite"
    with contextlib.closing(sqlite3.connect(book)) as database, database:
        database.execute("CREATE TABLE line (text)")
    kernelspec(data, "with-book", engine="bwrap", profile="small", sources={"book": str(book)})
    kernelspec(data, "bad-source", engine="bwrap", sources={"files": "/etc"})
    kernelspec(data, "hasty", engine="bwrap", cell_deadline=1, grace=60)
    kernelspec(data, "small", engine="bwrap", profile="small")
    config = home / "xdg" / "backintel"
    config.mkdir(parents=True)
    (config / "backintel.toml").write_text(SMALL)
    with jupyter_server(home) as server:
        yield server


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """The server; the test's kernels are shut down and nothing of them is left."""
    before = remains()
    yield shared_server
    for kernel in list(shared_server.kernels):
        shared_server.stop(kernel)
    deadline = time.monotonic() + 2.0
    while (left := remains() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
