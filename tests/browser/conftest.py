"""One Chromium and one Jupyter server for all tests; each test has its own profile and kernels."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

sys.path.insert(0, str(Path(__file__).parent))

from labs import CHROMIUM, ROOT, SLOW_MS, VENV, Lab, Person, kernel, person

# A busy machine needs this also for what a page does by itself.
expect.set_options(timeout=SLOW_MS)

PICTURES = ROOT / ".data" / "browser"
"""Where a failed test leaves what the page looked like."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start the system's Chromium, headless."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    assert program, "Chromium is missing. Run: sudo apt-get install chromium"
    flags = [*CHROMIUM, *(["--no-sandbox"] if os.getuid() == 0 else [])]
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=flags)
        yield started
        started.close()


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a SQLite database that a kernel has as a source."""
    place = tmp_path_factory.mktemp("source") / "book.sqlite"
    with contextlib.closing(sqlite3.connect(place)) as book, book:
        book.execute("CREATE TABLE line (text)")
        book.execute("INSERT INTO line VALUES ('of the owner')")
    return place


@pytest.fixture(scope="session")
def kernels(database: Path) -> dict[str, dict[str, object]]:
    """Return kernels with limits that a test can reach, and one with a source."""
    # The interrupted one may take its time: what it does with it is not what is tested.
    late = {"cell_deadline": 3, "grace": 60}
    return {
        "sourced": kernel("With a source", profile="small", sources={"book": str(database)}),
        "late": kernel("Interrupted at 3 s", **late, on_deadline="interrupt"),
        "strict": kernel("Ended at 3 s", **late, on_deadline="cancel", after_end="stay"),
        "small": kernel("Little memory", profile="small"),
        "again": kernel("Followed by a fresh one", profile="small", after_end="restart"),
    }


@pytest.fixture(scope="session")
def lab(
    tmp_path_factory: pytest.TempPathFactory, kernels: dict[str, dict[str, object]]
) -> Iterator[Lab]:
    """Start a Jupyter server with the installed wheel."""
    assert (VENV / "bin/jupyter-lab").exists(), f"{VENV} is missing. Run: make lab-wheel"
    with Lab(tmp_path_factory.mktemp("lab"), kernels) as server:
        yield server


@pytest.fixture
def join(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Callable[[Lab], Person]]:
    """Return a function that brings somebody to a server; afterwards their kernels end."""
    people: list[Person] = []

    def come(server: Lab) -> Person:
        people.append(person(browser, server))
        return people[-1]

    yield come
    failed = request.session.testsfailed
    for number, someone in enumerate(people):
        if failed and not someone.page.is_closed():
            PICTURES.mkdir(parents=True, exist_ok=True)
            someone.page.screenshot(path=PICTURES / f"{request.node.name}-{number}.png")
        someone.leave()


@pytest.fixture
def someone(join: Callable[[Lab], Person], lab: Lab) -> Person:
    """Return somebody at the shared server."""
    return join(lab)
