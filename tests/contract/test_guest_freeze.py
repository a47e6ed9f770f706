"""A guest stands still for its export, never for more than 2 s, and can be killed meanwhile.

That it moves is seen by its heartbeat, which its own process answers; that it stands, by none, and
where the host's kernel holds it by what that says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
import zmq
from live_guest import PACE, LiveGuest, Starter, as_root, wait_gone

from kernel_provisioner.engines.base import Guest, Leftovers, ProcessIdentity
from kernel_provisioner.engines.leftovers import remove_leftovers
from kernel_provisioner.errors import ExportRefused
from kernel_provisioner.session.snapshot import snapshot

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.root,
    pytest.mark.skipif(not as_root(), reason="an ordinary user may have no cgroup freezer"),
]


@contextlib.contextmanager
def heart(live: LiveGuest) -> Iterator[zmq.Socket[bytes]]:
    """Return a socket of the guest's heartbeat that was answered once."""
    with zmq.Context() as context, context.socket(zmq.REQ) as beat:
        beat.linger = 0
        beat.connect(f"ipc://{live.guest.channels['hb']}")
        beat.send(b"first")
        assert beat.poll(30_000 * PACE)
        beat.recv()
        yield beat


def test_the_guest_stands_still_while_it_is_held_and_no_longer(start: Starter) -> None:
    live = start()

    async def hold(beat: zmq.Socket[bytes]) -> float:
        async with live.guest.frozen() as held:
            beat.send(b"held")
            assert not beat.poll(300 * PACE)
            assert live.still() or not live.seen
        assert not held.late
        return held.seconds

    with heart(live) as beat:
        seconds = live.loop.run_until_complete(hold(beat))
        assert beat.poll(30_000 * PACE)
    assert not live.still()
    assert 0.3 * PACE <= seconds <= 2.0 * PACE


def test_a_hold_that_nobody_ends_is_over_in_two_seconds(start: Starter) -> None:
    live = start()

    async def hold(beat: zmq.Socket[bytes]) -> tuple[bool, float]:
        async with live.guest.frozen() as held:
            beat.send(b"held")
            assert beat.poll(4000 * PACE)
        return held.late, held.seconds

    with heart(live) as beat:
        late, seconds = live.loop.run_until_complete(hold(beat))
    assert late
    assert 1.0 * PACE < seconds <= 2.0 * PACE
    assert live.run("1").status == "ok"


def test_a_guest_can_be_frozen_again(start: Starter) -> None:
    live = start()

    async def hold() -> None:
        for _ in range(5):
            async with live.guest.frozen() as held:
                assert live.still() or not live.seen
            assert not held.late

    live.loop.run_until_complete(hold())
    assert live.run("print(6 * 7)").text == "42\n"


def test_a_frozen_guest_is_killed_at_once(start: Starter) -> None:
    live = start()

    async def hold() -> float:
        async with live.guest.frozen():
            assert live.still() or not live.seen
            killed = time.monotonic()
            live.guest.kill()
            async with asyncio.timeout(30 * PACE):
                assert (await live.guest.wait()).status == -signal.SIGKILL
            return time.monotonic() - killed

    seconds = live.loop.run_until_complete(hold())
    assert seconds < 1.5 * PACE, "it waited for the end of its hold"


def test_a_dead_guest_needs_no_freezing(start: Starter) -> None:
    live = start()
    live.guest.kill()
    live.loop.run_until_complete(live.guest.wait())

    async def hold() -> bool:
        async with live.guest.frozen() as held:
            pass
        return held.late

    assert live.loop.run_until_complete(hold()) is False


def test_sigkill_of_the_supervisor_ends_a_frozen_guest(engine: str) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            live = LiveGuest(engine).start().release()

            async def hold() -> None:
                async with live.guest.frozen():
                    assert live.still() or not live.seen
                    left = live.guest.leftovers
                    for words in (
                        live.processes(),
                        [f"{process.pid}:{process.start_time}" for process in left.processes],
                        left.cgroups,
                        left.directories,
                        [live.spec.session, live.directory],
                    ):
                        os.write(writer, " ".join(map(str, words)).encode() + b"\n")
                    signal.pause()

            live.loop.run_until_complete(hold())
        finally:
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as told:
        inside, identities, groups, places, names = (told.readline().split() for _ in range(5))
    session, directory = names
    assert inside
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert wait_gone([int(word) for word in inside]) == []
    left = Leftovers(
        tuple(ProcessIdentity(*map(int, word.split(":"))) for word in identities),
        tuple(map(Path, groups)),
        tuple(map(Path, places)),
    )
    assert remove_leftovers(left, session) == []
    assert [path for path in (*left.cgroups, *left.directories) if path.exists()] == []
    shutil.rmtree(directory)


class Stalled:
    """A guest whose artifacts never come, as if the disk that takes them hung."""

    def __init__(self, guest: Guest) -> None:
        self.frozen = guest.frozen
        reader, self.writer = os.pipe()
        self.reader = os.fdopen(reader, "rb")

    def artifacts(self) -> BinaryIO:
        return self.reader


def test_a_copy_that_takes_too_long_is_refused_and_the_guest_goes_on(
    start: Starter, tmp_path: Path
) -> None:
    live = start()
    stalled = Stalled(live.guest)

    async def hold() -> None:
        async with snapshot(stalled, tmp_path, 1 << 20):  # type: ignore[arg-type]
            raise AssertionError("there was nothing to copy")

    with pytest.raises(ExportRefused, match="nothing was published"):
        live.loop.run_until_complete(hold())
    os.close(stalled.writer)
    assert not live.still()
    assert live.run("print(1)").text == "1\n"
    assert list(tmp_path.iterdir()) == []
