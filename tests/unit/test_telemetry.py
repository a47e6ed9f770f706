"""When a person is warned of memory, and how often it is looked at."""

from __future__ import annotations

import pytest

from kernel_provisioner.engines.base import Sample
from kernel_provisioner.session.telemetry import INTERVAL_S, WATCHFUL_S, MemoryWatch

LIMIT = 1000


def sample(held: int, memory: int | None = None) -> Sample:
    return Sample(held if memory is None else memory, held, 0, "test", 0.0, 1, 0)


@pytest.mark.parametrize(("held", "due"), [(0, False), (899, False), (900, True), (1000, True)])
def test_the_warning_is_due_at_90_percent(held: int, due: bool) -> None:
    assert MemoryWatch(LIMIT).due(sample(held)) is due


def test_pages_that_can_be_taken_back_do_not_count() -> None:
    assert MemoryWatch(LIMIT).due(sample(500, memory=1000)) is False


def test_it_is_due_once() -> None:
    watch = MemoryWatch(LIMIT)
    assert [watch.due(sample(held)) for held in (950, 990, 100, 950)] == [True, False, False, False]


def test_it_is_looked_at_more_often_on_the_way_to_the_limit_only() -> None:
    watch = MemoryWatch(LIMIT)
    assert watch.interval_s(None) == INTERVAL_S == 1.0
    assert watch.interval_s(sample(499)) == INTERVAL_S
    assert watch.interval_s(sample(500)) == WATCHFUL_S
    assert watch.due(sample(900))
    assert watch.interval_s(sample(900)) == INTERVAL_S
