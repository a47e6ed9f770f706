"""The home, the schedule and the summary of the fault injection."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent.parent / "jupyter"))

import home
from schedule import schedule
from trial import Lab

from kernel_provisioner.paths import StateDirs

_LAB = pytest.StashKey[Lab]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the schedule's two figures."""
    parser.addoption("--kills", type=int, default=100, help="how many kills to inject")
    parser.addoption("--seed", type=int, default=None, help="seed of the schedule of kills")


def pytest_configure(config: pytest.Config) -> None:
    """Choose a seed once, so that the header and the summary can name it."""
    if config.option.seed is None:
        config.option.seed = secrets.randbelow(1_000_000)


def pytest_report_header(config: pytest.Config) -> str:
    """Say how to repeat this run."""
    return f"faults: --kills {config.option.kills} --seed {config.option.seed}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test of each kill."""
    if "kill" in metafunc.fixturenames:
        option = metafunc.config.option
        metafunc.parametrize("kill", schedule(option.seed, option.kills), ids=str)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the figures that `make faults` is judged by."""
    config = terminalreporter.config
    lab = config.stash.get(_LAB, None)
    if lab is None:
        return
    victims = ", ".join(f"{name} {count}" for name, count in sorted(lab.kills.items()))
    terminalreporter.section("faults")
    terminalreporter.line(
        f"seed {config.option.seed}: {lab.kills.total()} kills, {lab.left} residues, "
        f"{lab.late} late guests"
    )
    terminalreporter.line(
        f"slowest: processes gone after {lab.slowest_end_s:.2f} s, client told after "
        f"{lab.slowest_client_s:.2f} s; {lab.missed} sessions passed their barrier unkilled"
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
def lab(
    pytestconfig: pytest.Config,
    environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Lab:
    """Where the kills happen."""
    made = Lab.open(home.dirs_of(environment), environment, tmp_path_factory.mktemp("lab"))
    pytestconfig.stash[_LAB] = made
    return made
