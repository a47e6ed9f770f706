"""SIGKILL of each process of a session at named moments of its start, run and end (spec I1).

enterprise_gateway#672, smolvm#582, SmolVM#189, distributed#1322: after each kill no process is left
after two seconds, nothing else after one sweep, a receipt or an error says why, the client hears of
it within ten seconds, and the next start works.
"""

from __future__ import annotations

import pytest
from crew import Crew
from schedule import BARRIERS, Kill, schedule

pytestmark = [pytest.mark.sandbox, pytest.mark.filterwarnings("default")]


def test_a_schedule_is_reproducible_and_covers_every_pair_before_it_repeats_one() -> None:
    pairs = {(barrier.event, victims) for barrier in BARRIERS for victims in barrier.victims}
    chosen = schedule(7, len(pairs))
    assert {(kill.barrier.event, kill.victims) for kill in chosen} == pairs
    assert schedule(7, len(pairs)) == chosen
    assert schedule(8, len(pairs)) != chosen


def test_kill(crew: Crew, kill: Kill) -> None:
    """enterprise_gateway#672, smolvm#582: whoever is killed, nothing is left but a reason."""
    if problem := crew.problem(kill):
        pytest.fail(problem, pytrace=False)
