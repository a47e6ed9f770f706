"""What joins relay and watchdog: messages become events, due actions become interrupts and ends.

Called on the supervisor's loop; never blocks. The watchdog decides, this module only carries.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kernel_provisioner.errors import Reason
from kernel_provisioner.profiles import Profile
from kernel_provisioner.session.relay import Forward, Refuse, Relay, Request
from kernel_provisioner.session.watchdog import (
    Action,
    Interrupt,
    Running,
    Watchdog,
    WatchdogLimits,
)


class SessionMonitor:
    """Implements the relay's monitor for one session."""

    def __init__(
        self,
        profile: Profile,
        started_at: float,
        *,
        end: Callable[..., None],
        interrupt: Callable[[str], None],
        late: Callable[[str], None],
    ) -> None:
        self._profile = profile
        self._end = end
        self._interrupt = interrupt
        self._late = late
        self._relay: Relay | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watchdog = Watchdog(
            WatchdogLimits(
                cell_s=profile.cell_deadline_s,
                run_s=profile.run_deadline_s,
                grace_s=profile.grace_s,
                cells=profile.cells,
                on_cell_deadline="interrupt"
                if profile.on_cell_deadline == "interrupt"
                else "cancel",
            ),
            started_at,
        )
        self.shutdown_expected = False
        self._cells: dict[str, None] = {}
        self._last_cell = ""
        self._first_notice = ""
        self._run = 0
        self._failed = 0
        self._interrupted = 0
        self._output_limited = 0

    def longest(self) -> Running | None:
        """Return the request that has run longest of those that run now."""
        return self._watchdog.longest(time.monotonic())

    def attach(self, relay: Relay) -> None:
        """Give the relay through which notices reach the cell."""
        self._relay = relay

    def cell_counts(self) -> dict[str, int]:
        """Return the receipt's figures."""
        return {
            "run": self._run,
            "failed": self._failed,
            "interrupted": self._interrupted,
            "output_limited": self._output_limited,
        }

    def tell(self, text: str) -> None:
        """Show a text in the cell that has run longest, or in the last one if none runs."""
        if self._relay is not None:
            msg_id = next(iter(self._cells), self._last_cell)
            self._relay.notify(msg_id, f"\nBackIntel sandbox: {text}\n")

    def tell_first_cell(self, text: str) -> None:
        """Show a text in the session's first cell, when that comes."""
        self._first_notice = text

    # -- RelayMonitor --------------------------------------------------------------------------

    def admit(self, request: Request) -> Forward | Refuse:
        """Decide on a request before it is forwarded."""
        if request.msg_type == "shutdown_request":
            self.shutdown_expected = True
        # Completion, inspection and comm messages run code too, and the shell works in order: each
        # shell request is on the clock, only cells count against the limit of cells.
        # Not kernel_info: a client asks it while it waits for the kernel to be ready.
        if request.channel == "shell" and request.msg_type != "kernel_info_request":
            refusal = self._watchdog.admit(
                request.msg_id,
                lane=request.subshell_id,
                counts=request.is_cell,
                now=time.monotonic(),
            )
            self.arm()
            if refusal is not None:
                return refusal
        if request.is_cell:
            self._cells[request.msg_id] = None
            self._last_cell = request.msg_id
            self._run += 1
        return Forward()

    def started(self, msg_id: str) -> None:
        """The guest says that it began to work on a request."""
        if self._first_notice and msg_id in self._cells:
            self.tell(self._first_notice)
            self._first_notice = ""
        self._watchdog.started(msg_id, time.monotonic())
        self.arm()

    def replied(self, msg_id: str, status: str) -> None:
        """A final reply passed."""
        if msg_id in self._cells:
            del self._cells[msg_id]
            if status == "error":
                self._failed += 1
        self._watchdog.replied(msg_id, time.monotonic())
        self.arm()

    def input_requested(self, msg_id: str) -> None:
        """The cell waits for a person."""
        self._watchdog.input_requested(msg_id, time.monotonic())
        self.arm()

    def input_replied(self, msg_id: str) -> None:
        """The person answered."""
        self._watchdog.input_replied(msg_id, time.monotonic())
        self.arm()

    def output_exceeded(self, msg_id: str, detail: str) -> None:
        """A cell's output passed a bound: the relay said so in it; interrupt, grace, kill."""
        del detail
        self._watchdog.output_exceeded(msg_id, time.monotonic())
        self.arm()

    def oversized(self, detail: str) -> None:
        """One message was larger than any may be: the connection cannot go on (spec H3)."""
        self._end(Reason.OUTPUT_LIMIT, how=detail)

    def violation(self, detail: str) -> None:
        """The guest broke the protocol: its session ends, the host goes on (spec H3).

        That is its own doing, so it is told as the user code's and not as the infrastructure's.
        """
        self._end(Reason.KERNEL_CRASHED, how=f"its messages broke the protocol, {detail}")

    # -- clock ---------------------------------------------------------------------------------

    def arm(self) -> None:
        """Set the timer for the watchdog's next decision."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wakeup = self._watchdog.next_wakeup()
        if wakeup is not None:
            # The loop's clock is time.monotonic().
            self._timer = asyncio.get_running_loop().call_at(wakeup, self._tick)

    def _tick(self) -> None:
        try:
            for action in self._watchdog.tick(time.monotonic()):
                self._act(action)
            self.arm()
        except Exception as error:
            # Without its timer no deadline would be kept but the engine's backstop.
            self._end(Reason.ENGINE_FAILED, how=f"its watchdog failed, {type(error).__name__}")
            raise

    def _act(self, action: Action) -> None:
        if isinstance(action, Interrupt):
            if not self._watchdog.running(action.msg_id):
                return
            if action.reason is Reason.OUTPUT_LIMIT:
                self._output_limited += 1
            else:
                self._interrupted += 1
            if self._relay is not None and action.reason is Reason.CELL_DEADLINE:
                self._relay.notify(
                    action.msg_id,
                    f"{action.reason.value}: the cell ran longer than its deadline of "
                    f"{self._profile.cell_deadline_s:g} s and is interrupted; variables are kept "
                    f"if it stops within {self._profile.grace_s:g} s.",
                )
                self._late(action.msg_id)
            self._interrupt(action.msg_id)
        else:
            seconds = (
                self._profile.run_deadline_s
                if action.reason is Reason.RUN_DEADLINE
                else self._profile.cell_deadline_s
            )
            self._end(action.reason, seconds=seconds, how="its cell did not stop in time")
