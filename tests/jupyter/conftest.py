"""All sandboxes are of bwrap, which each host of the tests has; after each test nothing is left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from sandboxes import leaving_nothing


@pytest.fixture(autouse=True)
def _on_bwrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name the engine of each run and kernel that names none."""
    monkeypatch.setenv("BACKINTEL_SANDBOX", "bwrap")


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Look around each test."""
    with leaving_nothing():
        yield
