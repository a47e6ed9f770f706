"""After each test nothing of ours may be left on the host."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from sandboxes import leaving_nothing


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Look around each test."""
    with leaving_nothing():
        yield
