"""What a failed cell means: limits are believed from the sandbox only, never from a name."""

from __future__ import annotations

from typing import Any

import pytest

from kernel_provisioner.errors import ENDS, Reason
from kernel_provisioner.runmodel import Verdict, judge

_NOTHING: dict[str, Any] = {
    "ours": False,
    "ended": None,
    "over_cells": False,
    "watchdog_interrupts": 0,
    "output_limited": 0,
}


def _judge(ename: str, **facts: Any) -> Verdict:
    return judge(ename, "said by the cell", **(_NOTHING | facts))


@pytest.mark.parametrize("reason", list(Reason))
def test_a_name_alone_is_only_the_notebooks_own_failure(reason: Reason) -> None:
    assert _judge(reason.value) == Verdict(1, reason.value, "said by the cell")


@pytest.mark.parametrize("reason", list(Reason))
def test_the_supervisors_word_outranks_the_cell(reason: Reason) -> None:
    verdict = _judge("ValueError", ended={"reason": reason.value, "message": "why"})
    assert verdict == Verdict(ENDS[reason].exit_status, reason.value, "why")


def test_an_interrupt_by_the_watchdog_is_a_deadline() -> None:
    assert _judge("KeyboardInterrupt", watchdog_interrupts=1).exit_status == 4
    assert _judge("KeyboardInterrupt", output_limited=1).exit_status == 5
    assert _judge("KeyboardInterrupt").exit_status == 1


def test_the_cell_limit_needs_as_many_cells() -> None:
    assert _judge("CellLimitExceeded", over_cells=True).exit_status == 5
    assert _judge("ValueError", over_cells=True).exit_status == 1


def test_a_loss_that_this_side_saw_is_infrastructure() -> None:
    assert _judge("GuestLost", ours=True).exit_status == 3
