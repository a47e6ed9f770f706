"""Guests for the contract suite: each test runs on every engine of this version."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live_guest import NATIVE_ENGINES, LiveGuest, Starter


@pytest.fixture(scope="module", params=NATIVE_ENGINES)
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


@pytest.fixture(scope="module")
def guest(engine: str) -> Iterator[LiveGuest]:
    """A guest that the tests of one module share and do not ruin."""
    live = LiveGuest(engine)
    try:
        yield live.start().release()
    finally:
        live.close()
