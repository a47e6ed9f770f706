"""The deadlines: each rule of spec G, and a model that tries everything."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kernel_provisioner.errors import Reason
from kernel_provisioner.session.watchdog import (
    Cancel,
    Interrupt,
    Refuse,
    Running,
    Watchdog,
    WatchdogLimits,
)


def make(**changes: object) -> Watchdog:
    values: dict[str, object] = {"cell_s": 10.0, "run_s": 1000.0, "grace_s": 5.0}
    return Watchdog(WatchdogLimits(**{**values, **changes}), 100.0)  # type: ignore[arg-type]


def admit(dog: Watchdog, msg_id: str, now: float, lane: str | None = None) -> None:
    assert dog.admit(msg_id, lane=lane, counts=True, now=now) is None


def test_interrupt_then_cancel_each_once() -> None:
    dog = make()
    admit(dog, "a", 100)
    assert dog.next_wakeup() == 110
    assert dog.tick(109.9) == []
    assert dog.tick(110) == [Interrupt("a", Reason.CELL_DEADLINE)]
    assert dog.next_wakeup() == 115
    assert dog.tick(114.9) == []
    assert dog.tick(115) == [Cancel(Reason.CELL_DEADLINE, "a")]
    assert dog.tick(2000) == []
    assert dog.next_wakeup() is None


def test_the_longest_is_the_one_whose_clock_ran_most() -> None:
    dog = make()
    assert dog.longest(100) is None
    admit(dog, "a", 100)
    admit(dog, "queued", 100)
    dog.input_requested("a", 103)
    admit(dog, "b", 101, lane="sub")
    assert dog.longest(103) == Running("a", 3.0, True)
    assert dog.longest(109) == Running("b", 6.0, False)
    dog.replied("b", 109)
    dog.input_replied("a", 110)
    assert dog.longest(112) == Running("a", 5.0, False)
    dog.replied("a", 112)
    assert dog.longest(113) == Running("queued", 1.0, False)


def test_interrupted_cell_that_replies_is_left_alone() -> None:
    dog = make()
    admit(dog, "a", 100)
    dog.tick(110)
    dog.replied("a", 111)
    assert not dog.running("a")
    assert dog.tick(116) == []
    assert dog.next_wakeup() == 1100


def test_cancel_policy_has_no_interrupt() -> None:
    dog = make(on_cell_deadline="cancel")
    admit(dog, "a", 100)
    assert dog.tick(110) == [Cancel(Reason.CELL_DEADLINE, "a")]


def test_grace_of_zero_cancels_at_the_deadline() -> None:
    dog = make(grace_s=0.0)
    admit(dog, "a", 100)
    assert dog.tick(110) == [Cancel(Reason.CELL_DEADLINE, "a")]


def test_stopped_supervisor_fires_what_expired_at_once() -> None:
    dog = make()
    admit(dog, "a", 100)
    assert dog.tick(500) == [Cancel(Reason.CELL_DEADLINE, "a")]


def test_queued_cells_do_not_count() -> None:
    dog = make()
    for msg_id in "abc":
        admit(dog, msg_id, 100)
    assert dog.elapsed("b", 105) is None
    dog.replied("a", 109)
    assert dog.tick(111) == []
    assert dog.next_wakeup() == 119
    dog.replied("b", 118)
    assert dog.next_wakeup() == 128
    assert dog.tick(128) == [Interrupt("c", Reason.CELL_DEADLINE)]


def test_cell_after_a_rest_starts_when_it_is_forwarded() -> None:
    dog = make()
    admit(dog, "a", 100)
    dog.replied("a", 101)
    admit(dog, "b", 200)
    assert dog.next_wakeup() == 210


def test_late_busy_does_not_move_the_start() -> None:
    dog = make()
    admit(dog, "a", 100)
    dog.started("a", 108)
    assert dog.next_wakeup() == 110


def test_early_busy_starts_a_queued_clock_and_stops_none() -> None:
    dog = make()
    admit(dog, "a", 100)
    admit(dog, "b", 100)
    dog.started("b", 103)
    assert dog.tick(110) == [Interrupt("a", Reason.CELL_DEADLINE)]
    dog.replied("a", 111)
    assert dog.next_wakeup() == 113
    assert dog.tick(113) == [Interrupt("b", Reason.CELL_DEADLINE)]


def test_subshells_have_clocks_of_their_own_and_no_interrupt() -> None:
    dog = make()
    admit(dog, "a", 100)
    admit(dog, "s", 103, lane="sub")
    assert dog.tick(110) == [Interrupt("a", Reason.CELL_DEADLINE)]
    dog.replied("a", 112)
    # SIGINT would hit the main thread, not the subshell's.
    assert dog.tick(113) == []
    assert dog.next_wakeup() == 118
    assert dog.tick(118) == [Cancel(Reason.CELL_DEADLINE, "s")]


def test_reply_ends_what_was_before_it_on_its_lane_only() -> None:
    dog = make()
    admit(dog, "comm", 100)
    admit(dog, "b", 101)
    admit(dog, "s", 101, lane="sub")
    dog.replied("b", 105)
    assert [dog.running(m) for m in ("comm", "b", "s")] == [False, False, True]


def test_cell_limit_counts_admitted_cells_only() -> None:
    dog = make(cells=2)
    admit(dog, "a", 100)
    assert dog.admit("silent", lane=None, counts=False, now=100) is None
    admit(dog, "b", 100)
    refusal = dog.admit("c", lane=None, counts=True, now=100)
    assert isinstance(refusal, Refuse)
    assert refusal.ename == "CellLimitExceeded"
    assert "at most 2 cells" in refusal.evalue
    assert not dog.running("c")
    assert dog.admit("silent2", lane=None, counts=False, now=100) is None
    assert dog.cells == 2


def test_silent_requests_have_a_clock() -> None:
    dog = make()
    dog.admit("silent", lane=None, counts=False, now=100)
    assert dog.tick(110) == [Interrupt("silent", Reason.CELL_DEADLINE)]


def test_input_pauses_the_cell_but_not_the_run() -> None:
    dog = make()
    admit(dog, "a", 100)
    dog.input_requested("a", 104)
    assert dog.tick(300) == []
    assert dog.elapsed("a", 300) == 4
    dog.input_replied("a", 300)
    assert dog.next_wakeup() == 306
    assert dog.tick(306) == [Interrupt("a", Reason.CELL_DEADLINE)]
    dog = make(run_s=50.0)
    admit(dog, "a", 100)
    dog.input_requested("a", 104)
    assert dog.next_wakeup() == 150
    assert dog.tick(150) == [Cancel(Reason.RUN_DEADLINE, None)]


def test_pauses_of_a_cell_are_limited_in_total() -> None:
    dog = make(input_pause_s=20.0)
    admit(dog, "a", 100)
    dog.input_requested("a", 102)
    dog.input_replied("a", 117)  # 15 of 20
    dog.input_requested("a", 118)
    assert dog.next_wakeup() == 130  # start + cell + all of the pause
    dog.input_replied("a", 400)
    assert dog.tick(400)


def test_input_after_the_interrupt_extends_nothing() -> None:
    dog = make()
    admit(dog, "a", 100)
    dog.tick(110)
    dog.input_requested("a", 111)
    assert dog.tick(115) == [Cancel(Reason.CELL_DEADLINE, "a")]


def test_run_deadline_comes_without_cells_and_once() -> None:
    dog = make(run_s=30.0, cell_s=None)
    admit(dog, "a", 100)
    assert dog.next_wakeup() == dog.run_deadline == 130
    assert dog.tick(130) == [Cancel(Reason.RUN_DEADLINE, None)]
    assert dog.tick(131) == []


def test_after_a_cancel_nothing_is_admitted() -> None:
    dog = make(run_s=30.0)
    dog.tick(130)
    refusal = dog.admit("a", lane=None, counts=True, now=131)
    assert isinstance(refusal, Refuse)
    assert refusal.ename == "RunDeadlineExceeded"


@pytest.mark.parametrize("policy", ["interrupt", "cancel"])
def test_output_limit_is_interrupt_grace_cancel_under_every_policy(policy: str) -> None:
    dog = make(on_cell_deadline=policy)
    admit(dog, "a", 100)
    dog.output_exceeded("a", 103)
    assert dog.next_wakeup() == 103
    assert dog.tick(103) == [Interrupt("a", Reason.OUTPUT_LIMIT)]
    dog.output_exceeded("a", 104)
    assert dog.tick(108) == [Cancel(Reason.OUTPUT_LIMIT, "a")]


def test_output_of_no_running_request_cancels_the_session() -> None:
    dog = make()
    dog.output_exceeded("", 103)
    assert dog.next_wakeup() is not None
    assert dog.tick(103) == [Cancel(Reason.OUTPUT_LIMIT, None)]


def test_times_never_run_backwards() -> None:
    dog = make()
    admit(dog, "a", 105)
    dog.tick(108)
    assert dog.elapsed("a", 50) == 3


def test_unknown_ids_change_nothing() -> None:
    dog = make()
    for event in (dog.started, dog.replied, dog.input_requested, dog.input_replied):
        event("forged", 101)
    assert dog.next_wakeup() == 1100
    assert dog.tick(200) == []


class Model(RuleBasedStateMachine):
    """Any order of events and any jumps forward keep the promises of spec G."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.limits = WatchdogLimits(cell_s=10, run_s=400, grace_s=3, cells=30, input_pause_s=20)
        self.dog = Watchdog(self.limits, 0.0)
        self.lanes: dict[str | None, list[str]] = {None: [], "s": []}
        self.known_start: dict[str, float] = {}
        self.forwarded: dict[str, float] = {}
        self.last: dict[str | None, float] = {None: -math.inf, "s": -math.inf}
        self.counted = 0
        self.number = 0
        self.seen: list[object] = []
        self.cancelled = False
        self.ticked = True

    def first_starts(self, lane: str | None) -> None:
        if self.lanes[lane]:
            first = self.lanes[lane][0]
            start = max(self.forwarded[first], self.last[lane])
            self.known_start[first] = min(start, self.known_start.get(first, math.inf))

    def alive(self) -> list[str]:
        return [m for queue in self.lanes.values() for m in queue]

    @rule(step=st.sampled_from([0.0, 0.5, 1.0, 3.0, 9.0, 14.0, 60.0]))
    def time_passes(self, step: float) -> None:
        self.now += step
        self.ticked = False

    @rule(lane=st.sampled_from([None, "s"]), counts=st.booleans())
    def request(self, lane: str | None, counts: bool) -> None:
        self.number += 1
        msg_id = f"m{self.number}"
        refusal = self.dog.admit(msg_id, lane=lane, counts=counts, now=self.now)
        if self.cancelled or (counts and self.counted >= 30):
            assert refusal is not None
            return
        if refusal is None:
            self.counted += counts
            self.forwarded[msg_id] = self.now
            self.lanes[lane].append(msg_id)
            self.first_starts(lane)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def busy(self, data: st.DataObject) -> None:
        msg_id = data.draw(st.sampled_from(self.alive()))
        self.dog.started(msg_id, self.now)
        self.known_start.setdefault(msg_id, self.now)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def reply(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from([k for k, queue in self.lanes.items() if queue]))
        index = data.draw(st.integers(0, len(self.lanes[lane]) - 1))
        self.dog.replied(self.lanes[lane][index], self.now)
        del self.lanes[lane][: index + 1]
        self.last[lane] = self.now
        self.first_starts(lane)

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), answered=st.booleans())
    def stdin(self, data: st.DataObject, answered: bool) -> None:
        msg_id = data.draw(st.sampled_from(self.alive()))
        if answered:
            self.dog.input_replied(msg_id, self.now)
        else:
            self.dog.input_requested(msg_id, self.now)
            self.known_start.setdefault(msg_id, self.now)

    @rule()
    def tick(self) -> None:
        actions = self.dog.tick(self.now)
        self.ticked = True
        for action in actions:
            assert action not in self.seen, "an action came twice"
            assert not self.cancelled, "an action after the Cancel"
            self.seen.append(action)
            if isinstance(action, Interrupt):
                assert action.msg_id in self.lanes[None], "an interrupt for a replied cell"
                assert self.now >= self.known_start[action.msg_id] + self.limits.cell_s
            else:
                self.cancelled = True
                assert action.msg_id is None or action.msg_id in self.alive()
                assert action.msg_id is not None or self.now >= self.limits.run_s
        assert self.dog.tick(self.now) == []

    @invariant()
    def nobody_overruns(self) -> None:
        if not self.ticked or self.cancelled:
            return
        assert self.now < self.limits.run_s
        assert self.limits.cell_s is not None
        latest = self.limits.cell_s + self.limits.grace_s + self.limits.input_pause_s
        for msg_id in self.alive():
            if msg_id in self.known_start:
                assert self.now < self.known_start[msg_id] + latest

    @invariant()
    def clocks_and_wakeups_are_sane(self) -> None:
        wakeup = self.dog.next_wakeup()
        assert (wakeup is None) == self.cancelled
        assert wakeup is None or wakeup <= self.limits.run_s
        for msg_id in self.alive():
            assert self.dog.running(msg_id)
            elapsed = self.dog.elapsed(msg_id, self.now)
            assert (elapsed is None) == (msg_id not in self.known_start)
            assert elapsed is None or 0 <= elapsed <= self.now - self.known_start[msg_id] + 1e-9


Model.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestModel = Model.TestCase
