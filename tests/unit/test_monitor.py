"""A watchdog that cannot act ends the session: a deadline is never just forgotten."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from kernel_provisioner.errors import Reason
from kernel_provisioner.profiles import BUILTIN
from kernel_provisioner.session.monitor import SessionMonitor
from kernel_provisioner.session.relay import Forward, Request


def test_an_interrupt_that_fails_ends_the_session() -> None:
    async def body() -> Reason:
        ended: asyncio.Future[Reason] = asyncio.get_running_loop().create_future()
        told: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

        def interrupt(msg_id: str) -> None:
            raise OSError("the guest cannot be signalled")

        def end(reason: Reason, **_: object) -> None:
            ended.set_result(reason)

        profile = replace(BUILTIN["interactive"], cell_deadline_s=0.05)
        monitor = SessionMonitor(
            profile, time.monotonic(), end=end, interrupt=interrupt, late=lambda msg_id: None
        )
        request = Request("shell", "1", "execute_request", None, False, 1)
        assert monitor.admit(request) == Forward()
        reason = await asyncio.wait_for(ended, 30)
        assert "the guest cannot be signalled" in str(told[0]["exception"])
        return reason

    assert asyncio.run(body()) is Reason.ENGINE_FAILED
