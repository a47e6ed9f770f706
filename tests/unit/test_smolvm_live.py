"""Artifacts of a running microVM: its real agent, without a VM, stops the kernel and lists."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from enclosed import Machine, machine, run
from jupyter_client import AsyncKernelClient

from kernel_provisioner.artifacts.listing import judge
from kernel_provisioner.artifacts.tarstream import ExportLimits
from kernel_provisioner.engines.base import Listed
from kernel_provisioner.engines.smolvm import live
from kernel_provisioner.errors import FreezeRefused
from kernel_provisioner.session.snapshot import snapshot

pytestmark = [pytest.mark.sandbox, pytest.mark.root]

# A thread of the kernel and a process that it started count into two files each, first a, then b.
_COUNT = """
import subprocess, sys, threading
source = '''
def count(place):
    a, b = (open(f'/artifacts/{place}{end}.csv', 'wb', buffering=0) for end in 'ab')
    n = 0
    while True:
        n += 1
        text = b'%012d' % n
        a.seek(0); a.write(text); b.seek(0); b.write(text)
'''
exec(source)
threading.Thread(target=count, args=('thread',), daemon=True).start()
child = subprocess.Popen([sys.executable, '-c', source + 'count("child")'])
"""
_FILES = {"threada.csv", "threadb.csv", "childa.csv", "childb.csv"}


async def counts(made: Machine) -> dict[str, int]:
    return {name: int(data) for name, data in (await made.contents()).items() if data}


async def until_moved(made: Machine, beyond: dict[str, int]) -> None:
    """Wait until every count is another. Fails after 60 s."""
    async with asyncio.timeout(60):
        while True:
            now = await counts(made)
            if set(now) == _FILES and all(now[name] > beyond.get(name, 0) for name in now):
                return


@contextlib.asynccontextmanager
async def counting(directory: Path) -> AsyncIterator[tuple[Machine, AsyncKernelClient]]:
    async with machine(directory) as made:
        await made.boot()
        client = await made.release()
        try:
            assert await run(client, _COUNT) == ""
            await until_moved(made, {})
            yield made, client
        finally:
            client.stop_channels()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds that no busy host outlasts: what ends them is not their time."""
    monkeypatch.setattr(live, "HOLD_S", 60.0)


def test_everything_stands_still_while_it_is_held_and_goes_on(
    tmp_path: Path, patient: None
) -> None:
    async def scenario() -> None:
        async with counting(tmp_path) as (made, client):
            for _ in range(3):
                async with made.frozen() as hold:
                    first = await counts(made)
                    end = time.monotonic() + 0.3
                    while time.monotonic() < end:
                        assert await counts(made) == first
                assert not hold.late
                assert hold.seconds >= 0.3
                # Of one moment: each of the counters stood between two writes at the most.
                assert first["threada.csv"] - first["threadb.csv"] in (0, 1)
                assert first["childa.csv"] - first["childb.csv"] in (0, 1)
                await until_moved(made, first)
            assert await run(client, "print(6 * 7)") == "42"

    asyncio.run(scenario())


def test_a_session_takes_its_snapshot(tmp_path: Path, patient: None) -> None:
    async def scenario() -> None:
        async with counting(tmp_path) as (made, _):
            place = tmp_path / "scratch"
            place.mkdir()
            async with snapshot(made, place, 1 << 20) as taken:  # type: ignore[arg-type]
                assert taken.frozen_s > 0
                assert taken.stream.read().endswith(bytes(1024))

    asyncio.run(scenario())


def test_a_hold_that_nobody_ends_is_over_in_two_seconds(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with counting(tmp_path) as (made, _):
            async with made.frozen() as hold:
                await until_moved(made, await counts(made))
                assert hold.deadline <= time.monotonic()
            assert hold.late
            assert 1.0 < hold.seconds <= 2.0

    asyncio.run(scenario())


def test_a_kill_ends_what_is_held(tmp_path: Path, patient: None) -> None:
    async def scenario() -> None:
        async with counting(tmp_path) as (made, _):
            async with made.frozen() as hold:
                first = await counts(made)
                made.control.send({"op": "kill"})
                assert (await made.frame())["exited"] == -9
                assert await counts(made) == first
            assert not hold.late
            # The dead need no holding, but the agent says so too.
            async with made.frozen() as hold:
                assert await counts(made) == first
            assert not hold.late

    asyncio.run(scenario())


def test_a_host_that_is_gone_ends_what_is_held(tmp_path: Path, patient: None) -> None:
    async def scenario() -> None:
        async with counting(tmp_path) as (made, _):
            made.control.send({"op": "freeze", "hold": 1, "seconds": 60.0})
            assert (await made.holds.get())["frozen"] is True
            made.control.close()
            assert await asyncio.to_thread(made.process.wait, 60) == 0

    asyncio.run(scenario())


def test_an_interrupt_comes_after_the_hold(tmp_path: Path, patient: None) -> None:
    async def scenario() -> None:
        async with counting(tmp_path) as (made, client):
            busy = client.execute("print('busy')\nwhile True: pass")
            while (await client.get_iopub_msg(timeout=60))["msg_type"] != "stream":
                pass
            async with made.frozen():
                made.control.send({"op": "signal", "signum": 2, "msg_id": busy})
            reply = await client.get_shell_msg(timeout=60)
            while reply["parent_header"]["msg_id"] != busy:
                reply = await client.get_shell_msg(timeout=60)
            assert reply["content"]["ename"] == "KeyboardInterrupt"

    asyncio.run(scenario())


def test_an_export_that_is_abandoned_lets_it_go_on(tmp_path: Path, patient: None) -> None:
    async def scenario() -> None:
        async with counting(tmp_path) as (made, _):
            standing = asyncio.Event()

            async def export() -> None:
                async with made.frozen():
                    standing.set()
                    await made.gone

            task = asyncio.create_task(export())
            await standing.wait()
            first = await counts(made)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until_moved(made, first)
            assert (await made.holds.get())["frozen"] is True
            assert (await made.holds.get())["late"] is False

    asyncio.run(scenario())


def test_a_second_hold_at_once_is_refused_and_ends_no_other(tmp_path: Path, patient: None) -> None:
    async def scenario() -> None:
        async with counting(tmp_path) as (made, _):
            async with made.frozen() as hold:
                first = await counts(made)
                assert (await made.holds.get())["frozen"] is True
                made.control.send({"op": "freeze", "hold": 9, "seconds": 0.0})
                assert await made.holds.get() == {
                    "frozen": False,
                    "why": "it stands still already",
                    "hold": 9,
                }
                assert await counts(made) == first
            assert not hold.late

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("group_is", "why"),
    [
        ("echo 0 > cgroup.max.descendants", "the machine has no cgroup freezer: "),
        # Nothing can enter a group below a threaded one; empty, it would seem to stand still.
        (
            "mkdir t; echo threaded > t/cgroup.type; echo 0 > t/cgroup.threads",
            "the enclosure is not in its cgroup",
        ),
    ],
)
def test_a_machine_without_a_group_refuses_by_name_and_works(
    tmp_path: Path, group_is: str, why: str
) -> None:
    async def scenario() -> None:
        async with machine(tmp_path, group_is) as made:
            assert "attest" in await made.boot()
            client = await made.release()
            try:
                with pytest.raises(FreezeRefused, match=why):
                    async with made.frozen():
                        raise AssertionError("it does not stand still")
                assert await run(client, "open('/artifacts/a.csv', 'w').write('1')") == ""
                found = await asyncio.to_thread(live.listing, made.root / "agent")
                assert [entry.name for entry in found] == [b"a.csv"]
            finally:
                client.stop_channels()

    asyncio.run(scenario())


def test_the_kernel_sees_no_group_and_cannot_leave_its_own(tmp_path: Path) -> None:
    code = """
import ctypes, os
print([line for line in open('/proc/self/mountinfo') if 'cgroup' in line])
print([line for line in open('/proc/self/cgroup') if line.startswith('0::')])
print([n for n in os.listdir('/proc/self/fd') if 'group' in os.path.realpath('/proc/self/fd/' + n)])
libc = ctypes.CDLL(None, use_errno=True)
print(libc.mount(b'cgroup2', b'/tmp', b'cgroup2', 0, None), os.strerror(ctypes.get_errno()))
"""

    async def scenario() -> None:
        async with machine(tmp_path) as made:
            await made.boot()
            client = await made.release()
            try:
                assert (await run(client, code)).splitlines() == [
                    "[]",
                    "['0::/\\n']",
                    "[]",
                    "-1 Operation not permitted",
                ]
            finally:
                client.stop_channels()

    asyncio.run(scenario())


_HOSTILE = """
import os, socket
os.chdir('/artifacts')
open('a.csv', 'w').write('abc')
os.utime('a.csv', (0, 1000.5))
os.link('a.csv', 'second.csv')
os.symlink('/etc/passwd', 'link.csv')
os.mkfifo('pipe.csv')
socket.socket(socket.AF_UNIX).bind('socket.csv')
open(b'\\xff\\n.csv', 'w')
os.mkdir('sub'); open('sub/b.csv', 'w').truncate(5000)
os.mkdir('closed'); open('closed/c.csv', 'w'); os.chmod('closed', 0)
here = os.open('.', os.O_RDONLY)
for _ in range(40):
    os.mkdir('d' * 200, dir_fd=here)
    here = os.open('d' * 200, os.O_RDONLY, dir_fd=here)
"""
_MANY = """
for n in range(5000): open(f'/artifacts/{n:04}.csv', 'w')
"""


def test_a_hostile_tree_is_listed_as_it_is_while_the_kernel_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with machine(tmp_path) as made:
            await made.boot()
            client = await made.release()
            try:
                assert await run(client, _HOSTILE) == ""
                found = await asyncio.to_thread(live.listing, made.root / "agent")
                deep = [entry for entry in found if entry.name.startswith(b"ddd")]
                assert len(deep) == 33 and max(len(entry.name) for entry in deep) == 2048
                kinds = {entry.name: entry.kind for entry in found if entry not in deep}
                assert kinds == {
                    b"\xff\n.csv": b"0",
                    b"a.csv": b"0",
                    b"closed": b"5",
                    b"closed/c.csv": b"0",
                    b"link.csv": b"2",
                    b"pipe.csv": b"6",
                    b"second.csv": b"1",
                    b"socket.csv": b"Y",
                    b"sub": b"5",
                    b"sub/b.csv": b"0",
                }
                assert Listed(b"a.csv", b"0", 3, 1000.5) in found
                shown = judge(found, ExportLimits(max_bytes=1 << 20)).artifacts
                fine = [item["name"] for item in shown if item["refused"] is None]
                assert fine == ["a.csv", "closed/c.csv", "sub/b.csv"]
                assert await run(client, _MANY) == ""
                many = await asyncio.to_thread(live.listing, made.root / "agent")
                assert len(many) == 4096
            finally:
                client.stop_channels()

    asyncio.run(scenario())
