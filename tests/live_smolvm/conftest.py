"""Machines for the live lane: one shared by the tests that ruin nothing, others one by one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "contract"))

import proven
from live_guest import EMULATED, LiveGuest, make_sources
from product import left_behind

from kernel_provisioner.engines.base import SourceMount


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[SourceMount, ...]:
    """A directory and a single file."""
    return make_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def shared(sources: tuple[SourceMount, ...]) -> Iterator[LiveGuest]:
    """A machine that the tests of a module share; it is gone before another module's boots."""
    machine = LiveGuest("smolvm", sources=sources)
    try:
        yield machine.start().release()
    finally:
        machine.close()


@pytest.fixture
def own(sources: tuple[SourceMount, ...]) -> Iterator[LiveGuest]:
    """A machine of the test's own, not yet started."""
    machine = LiveGuest("smolvm", sources=sources)
    try:
        yield machine
    finally:
        machine.close()


@pytest.fixture(scope="module", autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each module no process, record or directory of any session is on this machine.

    Elsewhere (``host``) a person may have sessions of their own.
    """
    yield
    if request.path.parent.name == "host":
        return
    assert left_behind() == []
    proven.note("nothing left", "no process of a monitor, no record, no directory, no socket")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail the whole lane in the emulated machine if it did not show what it is there for.

    Root's run is the lane; that of an ordinary user is a part of it.
    """
    root = os.geteuid() == 0
    whole = root and EMULATED and not session.config.option.keyword
    if exitstatus == 0 and whole and proven.missing():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in words what this run showed; where no guest was meant to boot there is nothing."""
    if not EMULATED and not proven.anything():
        return
    terminalreporter.section("what this run showed")
    for line in proven.summary():
        terminalreporter.write_line(line)
