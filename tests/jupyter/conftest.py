"""After each test nothing of ours may be left on the host."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from sandboxes import remains


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Compare what is on the host before and two seconds after the test."""
    before = remains()
    yield
    deadline = time.monotonic() + 2.0
    while (left := remains() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
