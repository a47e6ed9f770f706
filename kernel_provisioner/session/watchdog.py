"""The deadlines of one session as a pure state machine: events and times in, actions out (spec G).

Responsible for the arithmetic of the run clock and the cell clocks and for saying each action once.
It has no clock, no I/O and no threads. Times are seconds of CLOCK_MONOTONIC; a clock that jumps
forward (the supervisor was stopped) makes everything expired fire at the next ``tick``.

Whom it trusts: that a request was forwarded, and when, is the host's own knowledge. Replies, busy
states and input requests are the guest's word. A forged ``busy`` can only start a clock early; a
forged reply ends that cell's clock, and a forged input request pauses it for at most
``input_pause_s``. What binds a dishonest guest is therefore the run deadline, which no event moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from kernel_provisioner.errors import ENDS, Reason

MAIN_LANE = None
"""The main shell; every subshell is a lane of its own, named by its id."""


@dataclass(frozen=True, slots=True)
class WatchdogLimits:
    """Limits in seconds; ``cell_s`` or ``cells`` None means without."""

    cell_s: float | None
    run_s: float
    grace_s: float = 5.0
    cells: int | None = None
    on_cell_deadline: Literal["interrupt", "cancel"] = "interrupt"
    input_pause_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Refuse:
    """A request is not forwarded; the person sees ``ename: evalue`` in the cell."""

    ename: str
    evalue: str


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Send SIGINT to the kernel now; valid only while ``msg_id`` has not replied."""

    msg_id: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the guest now. ``msg_id`` is the request that caused it, None for the whole session."""

    reason: Reason
    msg_id: str | None


Action = Interrupt | Cancel


@dataclass(frozen=True, slots=True)
class Running:
    """A request whose clock runs, or is paused because it waits for a person."""

    msg_id: str
    elapsed_s: float
    paused: bool


@dataclass(slots=True)
class _Work:
    """One forwarded request that has not replied. ``start`` is None while it queues."""

    msg_id: str
    lane: str | None
    forwarded: float
    start: float | None = None
    paused_since: float | None = None
    paused_total: float = 0.0
    expired_at: float | None = None  # an output limit: expired whatever its clock says
    cancel_at: float | None = None  # set by the interrupt; nothing moves it any more
    reason: Reason = Reason.CELL_DEADLINE


@dataclass(slots=True)
class _Lane:
    """Requests of one shell in the order forwarded; the kernel works on the first."""

    queue: list[_Work] = field(default_factory=list)
    last_reply: float = float("-inf")


class Watchdog:
    """The clocks of one session.

    Every request on a shell lane has a clock, for completion, comm messages and silent requests run
    code too; only those admitted with ``counts`` use up the number of cells. A debugger's stop does
    not pause a clock.
    """

    def __init__(self, limits: WatchdogLimits, started_at: float) -> None:
        self._limits = limits
        self._run_deadline = started_at + limits.run_s
        self._now = started_at
        self._lanes: dict[str | None, _Lane] = {}
        self._work: dict[str, _Work] = {}
        self._cancelled: Cancel | None = None
        self._cancel_next: Cancel | None = None
        self.cells = 0

    @property
    def run_deadline(self) -> float:
        """When the session ends whatever happens."""
        return self._run_deadline

    def running(self, msg_id: str) -> bool:
        """Return whether the request was forwarded and has not replied: check before a SIGINT."""
        return msg_id in self._work

    def elapsed(self, msg_id: str, now: float) -> float | None:
        """Return how long a cell's clock has run without pauses; None while it queues."""
        work = self._work.get(msg_id)
        if work is None or work.start is None:
            return None
        return max(0.0, self._clamp(now) - work.start - self._paused(work))

    def longest(self, now: float) -> Running | None:
        """Return the request whose clock has run longest; None if none runs."""
        now = self._clamp(now)
        running = [
            Running(
                work.msg_id,
                max(0.0, now - work.start - self._paused(work)),
                work.paused_since is not None,
            )
            for work in self._work.values()
            if work.start is not None
        ]
        return max(running, key=lambda work: work.elapsed_s, default=None)

    def admit(self, msg_id: str, *, lane: str | None, counts: bool, now: float) -> Refuse | None:
        """Take a request that is about to be forwarded, or refuse it. A known id is not new."""
        now = self._clamp(now)
        ended = self._cancelled or self._cancel_next
        if ended is not None:
            return Refuse(ended.reason, "The sandbox is being ended; the request was not run.")
        if msg_id in self._work:
            return None
        limit = self._limits.cells
        if counts and limit is not None and self.cells >= limit:
            return Refuse(Reason.CELL_LIMIT, ENDS[Reason.CELL_LIMIT].text.format(cells=limit))
        if counts:
            self.cells += 1
        work = _Work(msg_id, lane, now)
        self._work[msg_id] = work
        self._lanes.setdefault(lane, _Lane()).queue.append(work)
        self._start_first(lane)
        return None

    def started(self, msg_id: str, now: float) -> None:
        """The guest says that it works on it: its clock runs from now if it did not yet."""
        now = self._clamp(now)
        work = self._work.get(msg_id)
        if work is not None and work.start is None:
            work.start = now

    def replied(self, msg_id: str, now: float) -> None:
        """The request is done, and with it what was forwarded before it on its lane.

        A lane works in order: an earlier request without a reply (a comm message whose idle nobody
        subscribed to) must not keep its clock running.
        """
        now = self._clamp(now)
        work = self._work.get(msg_id)
        if work is None:
            return
        lane = self._lanes[work.lane]
        done = lane.queue.index(work) + 1
        for finished in lane.queue[:done]:
            del self._work[finished.msg_id]
        del lane.queue[:done]
        lane.last_reply = now
        self._start_first(work.lane)

    def input_requested(self, msg_id: str, now: float) -> None:
        """The cell waits for a person who can answer: its clock pauses."""
        now = self._clamp(now)
        work = self._work.get(msg_id)
        if work is not None and work.paused_since is None:
            if work.start is None:
                work.start = now
            work.paused_since = now

    def input_replied(self, msg_id: str, now: float) -> None:
        """The person answered: the clock goes on."""
        self._clamp(now)
        work = self._work.get(msg_id)
        if work is not None and work.paused_since is not None:
            work.paused_total = self._paused(work)
            work.paused_since = None

    def output_exceeded(self, msg_id: str, now: float) -> None:
        """The request's output passed a bound: interrupt, grace, cancel under every policy.

        Output of no running request cannot be interrupted: the session is cancelled.
        """
        now = self._clamp(now)
        work = self._work.get(msg_id)
        if work is None:
            if self._cancelled is None and self._cancel_next is None:
                self._cancel_next = Cancel(Reason.OUTPUT_LIMIT, None)
        elif work.cancel_at is None and work.expired_at is None:
            work.expired_at = now
            work.reason = Reason.OUTPUT_LIMIT

    def tick(self, now: float) -> list[Action]:
        """Return what is due. After a Cancel nothing more comes: the guest is ended by it."""
        now = self._clamp(now)
        if self._cancelled is not None:
            return []
        if now >= self._run_deadline:
            return [self._cancel(Cancel(Reason.RUN_DEADLINE, None))]
        if self._cancel_next is not None:
            return [self._cancel(self._cancel_next)]
        actions: list[Action] = []
        for work, deadline in list(self._deadlines()):
            if now < deadline:
                continue
            if work.cancel_at is None:
                work.cancel_at = deadline + self._grace(work)
                if now < work.cancel_at and work.lane is MAIN_LANE:
                    # SIGINT reaches only the main thread: for a subshell's cell it would hit
                    # another cell, so such a cell just has its grace.
                    actions.append(Interrupt(work.msg_id, work.reason))
            if now >= work.cancel_at:
                return [self._cancel(Cancel(work.reason, work.msg_id))]
        return actions

    def next_wakeup(self) -> float | None:
        """Return when ``tick`` will next have something to say if no event comes; None: never."""
        if self._cancelled is not None:
            return None
        if self._cancel_next is not None:
            return self._now
        due = self._run_deadline
        for work, deadline in self._deadlines():
            due = min(due, deadline if work.cancel_at is None else work.cancel_at)
        return due

    def _deadlines(self) -> Iterator[tuple[_Work, float]]:
        """Yield each running request with its deadline if its present pause lasts."""
        for work in self._work.values():
            if work.cancel_at is not None:
                yield work, work.cancel_at - self._grace(work)
                continue
            deadline = float("inf") if work.expired_at is None else work.expired_at
            if work.start is not None and self._limits.cell_s is not None:
                cap = self._limits.input_pause_s
                pause = work.paused_total if work.paused_since is None else cap
                clock = work.start + self._limits.cell_s + pause
                if clock < deadline:
                    deadline = clock
            if deadline < float("inf"):
                yield work, deadline

    def _grace(self, work: _Work) -> float:
        if work.reason is Reason.CELL_DEADLINE and self._limits.on_cell_deadline == "cancel":
            return 0.0
        return self._limits.grace_s

    def _paused(self, work: _Work) -> float:
        """Return the cell's pause so far, never more than the total that is allowed."""
        ongoing = 0.0 if work.paused_since is None else self._now - work.paused_since
        return min(self._limits.input_pause_s, work.paused_total + ongoing)

    def _start_first(self, lane: str | None) -> None:
        """Start the clock of the lane's first request: no later than the host can know it."""
        state = self._lanes[lane]
        if not state.queue:
            if lane is not MAIN_LANE:
                del self._lanes[lane]  # subshells come and go; their ids are the client's
            return
        first = state.queue[0]
        known = max(first.forwarded, state.last_reply)
        first.start = known if first.start is None else min(first.start, known)

    def _cancel(self, action: Cancel) -> Cancel:
        self._cancelled = action
        return action

    def _clamp(self, now: float) -> float:
        """Times never run backwards, whatever the caller passes."""
        self._now = max(self._now, now)
        return self._now
