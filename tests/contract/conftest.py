"""Guests for the contract suite: each test runs on every engine that this host can run."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_guest import EMULATED, ENGINES, PACE, STALLED, LiveGuest, Starter, make_sources

from kernel_provisioner.engines.base import GuestEndpoint, SourceMount

HERE = Path(__file__).resolve().parent
# What is of one engine alone.
collect_ignore_glob = [] if "bwrap" in ENGINES else ["test_bwrap_*.py", "test_guest_user.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave what boots a guest of its own to the full live lane: it takes half a minute there."""
    for item in items if EMULATED else []:
        names = getattr(item, "fixturenames", ())
        if item.path.parent == HERE and ("start" in names or "guest" not in names):
            item.add_marker("full")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Count the boots that were tried again, where the live lane's own tests do not."""
    if EMULATED and "proven" not in sys.modules:
        terminalreporter.section("what this run tried again")
        terminalreporter.write_line(f"live boots that emulation stalled: {len(STALLED)}")


@pytest.fixture(autouse=True)
def _taken() -> None:
    """Take what the agents of running microVMs told meanwhile.

    libkrun waits with all channels of a machine for a socket that is not read, here after some 280
    figures, one each second (measured).
    """
    for live in LiveGuest.running:
        live.do(asyncio.sleep(0.02))


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """The name of the engine under test."""
    return str(request.param)


@pytest.fixture
def start(engine: str) -> Iterator[Starter]:
    """Start guests that the test may ruin; afterwards nothing of them may be left."""
    made: list[LiveGuest] = []

    def starter(*, release: bool = True, **options: object) -> LiveGuest:
        live = LiveGuest(engine, **options)  # type: ignore[arg-type]
        made.append(live)
        live.start()
        return live.release() if release else live

    yield starter
    for live in made:
        live.close()


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[SourceMount, ...]:
    """What the shared guest reads."""
    return make_sources(tmp_path_factory.mktemp("sources"))


ENDPOINTS = (
    GuestEndpoint("literal", "10.9.8.7", "10.9.8.7", 5432),
    GuestEndpoint("local", "localhost", "127.0.0.1", 5432),
    GuestEndpoint("named", "store.example", "127.0.1.1", 5432),
    GuestEndpoint("web", "store.example", "127.0.1.1", 80),
)
"""Three of one port, and one of a port that only root may listen on."""


@pytest.fixture(scope="session")
def guest(engine: str, sources: tuple[SourceMount, ...]) -> Iterator[LiveGuest]:
    """A guest that the tests share and do not ruin."""
    live = LiveGuest(engine, sources=sources, endpoints=ENDPOINTS, backstop_s=3600.0 * PACE)
    try:
        yield live.start().release()
    finally:
        live.close()
