"""Waits with deadlines on descriptors, on the event loop and off it."""

from __future__ import annotations

import os
import select
import time


def deadline_in(seconds: float) -> float:
    """Return the CLOCK_MONOTONIC time that lies ``seconds`` ahead."""
    return time.monotonic() + seconds


def left(deadline: float) -> float:
    """Return the seconds that remain, at least 0."""
    return max(0.0, deadline - time.monotonic())


async def readable(fd: int, deadline: float | None) -> None:
    """Wait until ``fd`` is readable (a pidfd: until the process is gone).

    A duplicate is watched, so that several waiters of one descriptor do not replace each other.
    Raises TimeoutError at the deadline (None: no deadline).
    """
    import asyncio  # here: a launch, which uses the rest of this module, does not wait for it

    loop = asyncio.get_running_loop()
    own = os.dup(fd)
    ready_now: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready_now.done():
            ready_now.set_result(None)

    loop.add_reader(own, wake)
    try:
        async with asyncio.timeout(None if deadline is None else left(deadline)):
            await ready_now
    finally:
        loop.remove_reader(own)
        os.close(own)


def ready(fd: int, seconds: float) -> bool:
    """Wait up to ``seconds``, blocking, until ``fd`` is readable; say whether it is."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(int(seconds * 1000)))


def exited(pidfd: int) -> bool:
    """Whether the process of a pidfd is gone."""
    return ready(pidfd, 0)
