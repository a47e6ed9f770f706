"""Machines for the live lane: one shared by the tests that ruin nothing, others one by one."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import proven
import pytest
from live import LiveMachine
from product import left_behind

from kernel_provisioner.engines.base import SourceMount


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[SourceMount, ...]:
    """A directory and a single file beside another that must not be seen."""
    place = tmp_path_factory.mktemp("sources")
    for path in (place, place / "data", place / "single"):
        path.mkdir(exist_ok=True)
        path.chmod(0o755)
    (place / "data" / "a.txt").write_text("of the directory")
    (place / "single" / "one.txt").write_text("of the file")
    (place / "single" / "secret.txt").write_text("beside it")
    # Writable for all here, so that only the mounts can refuse it there.
    (place / "data").chmod(0o777)
    (place / "single" / "one.txt").chmod(0o666)
    return (
        SourceMount("data", place / "data"),
        SourceMount("one", place / "single" / "one.txt"),
    )


@pytest.fixture(scope="module")
def shared(sources: tuple[SourceMount, ...]) -> Iterator[LiveMachine]:
    """A machine that the tests of a module share; it is gone before another module's boots."""
    machine = LiveMachine(sources)
    try:
        yield machine.start().release()
    finally:
        machine.close()


@pytest.fixture
def own(sources: tuple[SourceMount, ...]) -> Iterator[LiveMachine]:
    """A machine of the test's own, not yet started."""
    machine = LiveMachine(sources)
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
    """Fail the whole lane in the emulated machine if it did not show what it is there for."""
    whole = "backintel_slow" in sys.modules and not session.config.option.keyword
    if exitstatus == 0 and whole and proven.missing():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in words what this run showed; where no guest was meant to boot there is nothing."""
    if "backintel_slow" not in sys.modules and not proven.anything():
        return
    terminalreporter.section("what this run showed")
    for line in proven.summary():
        terminalreporter.write_line(line)
