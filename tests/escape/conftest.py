"""Hostile guests: each test tries to get out, to outlive its session or to lose somebody's work.

The guests are those of the contract suite and of the kernel tests, with code that means harm.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "contract"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "jupyter"))

from live_guest import ENGINES, LiveGuest, Starter


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """The name of the engine under test."""
    return str(request.param)


@pytest.fixture
def start(engine: str) -> Iterator[Starter]:
    """Start guests that the test may ruin; afterwards nothing of them may be left."""
    made: list[LiveGuest] = []

    def starter(**options: object) -> LiveGuest:
        live = LiveGuest(engine, **options)  # type: ignore[arg-type]
        made.append(live)
        return live.start().release()

    yield starter
    for live in made:
        live.close()


@pytest.fixture(scope="module")
def guest(engine: str) -> Iterator[LiveGuest]:
    """A guest that the tests of one module share and do not ruin."""
    live = LiveGuest(engine)
    try:
        yield live.start().release()
    finally:
        live.close()
