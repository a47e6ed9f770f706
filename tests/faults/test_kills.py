"""SIGKILL of each process of a session at named moments of its start, run and end (spec I1).

enterprise_gateway#672, smolvm#582, SmolVM#189, distributed#1322: after each kill no process is left
after two seconds, nothing else after one sweep, a receipt or an error says why, the client hears of
it within ten seconds, and the next start works.
"""

from __future__ import annotations

import pytest
from schedule import BARRIERS, Kill, schedule
from trial import Lab

pytestmark = [pytest.mark.sandbox, pytest.mark.filterwarnings("default")]


def test_a_schedule_is_reproducible_and_covers_every_pair_before_it_repeats_one() -> None:
    pairs = {(barrier.event, victims) for barrier in BARRIERS for victims in barrier.victims}
    chosen = schedule(7, len(pairs))
    assert {(kill.barrier.event, kill.victims) for kill in chosen} == pairs
    assert schedule(7, len(pairs)) == chosen
    assert schedule(8, len(pairs)) != chosen


def test_kill(lab: Lab, kill: Kill) -> None:
    lab.perform(kill)
    if kill.number % 10 == 9:
        lab.prove_next_start()
