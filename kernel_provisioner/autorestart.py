"""When a kernel manager's automatic restart may start a fresh guest (spec A1, G; cases 22).

jupyter_client's restarter takes every death for one that trying again may mend, and says nothing
when the new launch raises. Here is decided what trying again can help, and the restarter is made
to report the rest at once by its ``dead`` callbacks; a restart that a person asks for is never in
question. Trusts the supervisor's word on how a guest ended.
"""

from __future__ import annotations

from typing import Any

from kernel_provisioner.errors import ENDS, BackIntelError, Reason

FAILED_STARTS = 3
"""How many automatic starts in a row may fail before the kernel is given up."""


def may_follow(reason: Reason, after_end: str) -> bool:
    """Return whether a fresh guest may follow this end by itself, by a profile's ``after_end``."""
    return ENDS[reason].again and after_end == "restart"


def may_retry(error: BaseException, failed: int) -> bool:
    """Return whether an automatic start is tried again after ``failed`` failures in a row."""
    transient = isinstance(error, BackIntelError) and not error.permanent
    return transient and failed < FAILED_STARTS


class Autorestart:
    """The automatic restarts of one kernel manager, which has a restarter only inside a server."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._failed = 0
        self._given_up = False

    @property
    def possible(self) -> bool:
        """Whether the next start may be an automatic one, and not a person's."""
        return self._restarter is not None and not self._given_up

    @property
    def _restarter(self) -> Any:
        return getattr(self._manager, "_restarter", None)

    def guest_ended(self, reason: Reason, after_end: str) -> None:
        """Before a manager hears of an end: where none may follow, its next look gives up."""
        restarter = self._restarter
        if restarter is not None and not may_follow(reason, after_end):
            self._given_up = True
            # As if all tries were used up: it fires ``dead``, never "restarting", and stops.
            restarter._restarting = True
            restarter._restart_count = restarter.restart_limit

    def started(self, *, automatic: bool) -> None:
        """A guest is up; one that a person asked for starts the count anew."""
        self._failed = 0
        self._given_up = False
        restarter = self._restarter
        if restarter is not None and not automatic:
            restarter._restarting = False
            restarter._restart_count = 0

    def start_failed(self, error: BaseException) -> None:
        """An automatic start raised. The manager has stopped its restarter for it by now.

        Without ``dead``, JupyterLab would show "restarting" for ever.
        """
        self._failed += 1
        restarter = self._restarter
        if restarter is None:
            return
        if may_retry(error, self._failed):
            restarter.start()
            return
        self._failed = 0
        self._given_up = True
        restarter.stop()
        restarter._fire_callbacks("dead")
