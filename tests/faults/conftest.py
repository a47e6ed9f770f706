"""The home, the schedule and the summary of the fault injection."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent / "jupyter"))

import home
from crew import Crew
from schedule import schedule
from trial import Lab

from kernel_provisioner.paths import StateDirs

_CREW = pytest.StashKey[Crew]()
_MOST_WORKERS = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the schedule's two figures, and how many work at it."""
    parser.addoption("--kills", type=int, default=100, help="how many kills to inject")
    parser.addoption("--seed", type=int, default=None, help="seed of the schedule of kills")
    workers = min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
    parser.addoption("--workers", type=int, default=workers, help="how many kill side by side")


def pytest_configure(config: pytest.Config) -> None:
    """Choose a seed once, so that the header and the summary can name it."""
    if config.option.seed is None:
        config.option.seed = secrets.randbelow(1_000_000)


def pytest_report_header(config: pytest.Config) -> str:
    """Say how to repeat this run."""
    option = config.option
    return f"faults: --kills {option.kills} --seed {option.seed} --workers {option.workers}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of each kill."""
    if "kill" in metafunc.fixturenames:
        option = metafunc.config.option
        metafunc.parametrize("kill", schedule(option.seed, option.kills), ids=str)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that `make faults` is judged by."""
    config = terminalreporter.config
    crew = config.stash.get(_CREW, None)
    if crew is None:
        return
    figures = crew.figures
    victims = ", ".join(f"{name} {count}" for name, count in sorted(figures.kills.items()))
    terminalreporter.section("faults")
    terminalreporter.line(
        f"seed {config.option.seed}: {figures.kills.total()} kills, {figures.left} residues, "
        f"{figures.late} late guests"
    )
    terminalreporter.line(
        f"slowest: processes gone after {figures.slowest_end_s:.2f} s, client told after "
        f"{figures.slowest_client_s:.2f} s; {figures.missed} sessions passed their barrier unkilled"
    )
    terminalreporter.line(f"victims: {victims}")


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables that lead to a home of these tests."""
    home.enter_own_mounts()
    directory = tmp_path_factory.mktemp("home")
    yield home.make(directory)
    home.unmake(directory)


@pytest.fixture
def dirs(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> StateDirs:
    """The same home for sessions that the test itself starts."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return home.dirs_of(environment)


@pytest.fixture(scope="session")
def lab(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Where the tests of the host's faults kill."""
    return Lab.open(home.dirs_of(environment), environment, tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def crew(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    """The workers, which begin with the schedule at once."""
    option = pytestconfig.option
    kills = schedule(option.seed, option.kills)
    made = Crew(kills, min(option.workers, len(kills)), tmp_path_factory.mktemp("crew"))
    pytestconfig.stash[_CREW] = made
    yield made
    made.dismiss()
