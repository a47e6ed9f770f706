"""Why a session ends, what the person sees, and what is left (spec G, I)."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sandboxes import Sandbox, gone_within, guest_processes, sandbox
from test_session import started

from kernel_provisioner.paths import state_dirs
from kernel_provisioner.records import live_sessions, sweep

pytestmark = [pytest.mark.sandbox, pytest.mark.filterwarnings("default")]


async def ending(box: Sandbox) -> dict[str, Any]:
    """Wait until the provisioner knows the end."""
    async with asyncio.timeout(15):
        await box.provisioner.wait()
    assert box.provisioner.ended is not None
    return box.provisioner.ended


def processes_of(box: Sandbox) -> dict[int, str]:
    """Return the guest's processes and the supervisor of this sandbox."""
    session = box.provisioner.session_id
    assert session is not None
    found = {}
    for pid, name in guest_processes().items():
        try:
            cgroup = Path(f"/proc/{pid}/cgroup").read_text()
        except OSError:
            continue
        if session in cgroup or pid == box.supervisor_pid:
            found[pid] = name
    return found


def test_queued_cells_do_not_count_and_all_hear_of_the_end() -> None:
    """nbval#41: cells behind one that is cancelled do not wait for ever."""

    async def body() -> None:
        async with sandbox(profile="analysis", cell_deadline=4) as box:
            quick = [box.client.execute("import time; time.sleep(1.2)") for _ in range(4)]
            for _ in quick:
                reply = await box.client.get_shell_msg(timeout=30)
                assert reply["content"]["status"] == "ok", "4.8 s in all, 1.2 s each"
            waiting = [box.client.execute(c) for c in ("while True: pass", "1", "2")]
            replies = [await box.client.get_shell_msg(timeout=30) for _ in waiting]
            assert {r["parent_header"]["msg_id"] for r in replies} == set(waiting)
            assert {r["content"]["ename"] for r in replies} == {"CellDeadlineExceeded"}

    asyncio.run(body())


def test_waiting_for_input_pauses_the_cells_clock() -> None:
    async def body() -> None:
        async with sandbox(profile="analysis", cell_deadline=2) as box:
            box.client.allow_stdin = True
            box.client.execute("name = input('? ')", allow_stdin=True)
            await box.client.get_stdin_msg(timeout=30)
            with pytest.raises(queue.Empty):
                await box.client.get_shell_msg(timeout=3)
            box.client.input("Ada")
            reply = await box.client.get_shell_msg(timeout=30)
            assert reply["content"]["status"] == "ok"

    asyncio.run(body())


def test_the_41st_cell_is_refused_and_the_guest_lives() -> None:
    async def body() -> None:
        async with sandbox(profile="analysis") as box:
            for number in range(40):
                assert (await box.run(f"x = {number}")).reply["content"]["status"] == "ok"
            refused = await box.run("x = 'ran'")
            assert refused.error.startswith("CellLimitExceeded: This sandbox runs at most 40 cells")
            silent = await box.run("", silent=True, user_expressions={"x": "x"})
            values = silent.reply["content"]["user_expressions"]
            assert values["x"]["data"]["text/plain"] == "39"

    asyncio.run(body())


@pytest.mark.parametrize(
    ("code", "reason", "status"),
    [
        ("x = bytearray(3 << 30)", "OutOfMemory: The kernel was killed for memory: limit 768", 5),
        ("import os; os._exit(3)", "KernelCrashed: The kernel process ended: exit status 3", 1),
        ("import ctypes; ctypes.string_at(0)", "KernelCrashed: The kernel process ended: sig", 1),
        ("import os; os.killpg(0, 9)", "KernelCrashed: The kernel process ended: signal SI", 1),
        ("import os; os.kill(os.getpid(), 9)", "KernelCrashed: The kernel process ended", 1),
    ],
)
def test_a_death_has_its_reason_in_the_cell(code: str, reason: str, status: int) -> None:
    """2i2c infrastructure#3427: a kill has its reason, with limit and peak where it was memory."""

    async def body() -> None:
        async with sandbox(profile="benchmark") as box:
            result = await box.run(code)
            assert result.error.startswith(reason)
            assert (await ending(box))["exit_status"] == status
            assert await box.manager.is_alive() is False

    asyncio.run(body())


def first_process(box: Sandbox) -> int:
    """Return the host's pid of the sandbox's process 1."""
    session = box.provisioner.session_id
    found = [r for r in live_sessions(state_dirs()) if r.session == session]
    return found[0].leftovers.processes[1].pid


def test_a_guest_killed_from_outside_is_lost_and_not_the_users_doing() -> None:
    """Spec G4: no code in the sandbox can kill its process 1, so that is the host's doing."""

    async def body() -> None:
        async with sandbox(profile="benchmark") as box:
            task = await started(box, "while True: pass")
            os.kill(first_process(box), signal.SIGKILL)
            assert (await task).error.startswith("GuestLost: The sandbox was lost: ")
            assert (await ending(box))["class"] == "infrastructure"

    asyncio.run(body())


@pytest.mark.parametrize("orphans", [0, 20])
def test_a_guest_that_kills_all_it_can_is_the_users_doing(orphans: int) -> None:
    """Spec G4: all but process 1 can be killed, which then reports the kernel's end."""

    async def body() -> None:
        async with sandbox(profile="benchmark") as box:
            code = (
                "import os, signal, time\n"
                f"for _ in range({orphans}):\n"
                "    if os.fork() == 0: signal.pause()\n"
                "if _n: os.kill(-1, 9)\n"
                "os.kill(os.getpid(), 9)\n"
            ).replace("_n", str(orphans))
            result = await box.run(code)
            assert result.error.startswith("KernelCrashed: The kernel process ended: signal SIGK")
            assert (await ending(box))["class"] == "user"

    asyncio.run(body())


def test_a_flood_of_output_is_cut_with_a_notice_and_the_reply_arrives() -> None:
    """notebook#2287: 64 MiB of stream text a cell, a visible notice, no final reply lost."""

    async def body() -> None:
        async with sandbox(grace=2) as box:
            result = await box.run("while True: print('x' * 100000)", timeout=100)
            assert "OutputLimitExceeded" in result.text + result.error
            assert result.reply["content"]["status"] == "error"

    asyncio.run(body())


def test_children_that_ignore_signals_die_with_the_session() -> None:
    async def body() -> None:
        async with sandbox() as box:
            await box.run(
                "import os, signal\n"
                "for _ in range(30):\n"
                "    if os.fork() == 0:\n"
                "        os.setsid()\n"
                "        for n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\n"
                "        while True: signal.pause()\n"
            )
            assert len(processes_of(box)) > 30
            await box.manager.shutdown_kernel(now=True)
            await gone_within(2, lambda: len(guest_processes()) > 30)

    asyncio.run(body())


def test_sigkill_of_the_supervisor_ends_everything() -> None:
    async def body() -> None:
        async with sandbox() as box:
            await started(box, "while True: pass")
            session = box.provisioner.session_id
            os.kill(box.supervisor_pid, signal.SIGKILL)
            await gone_within(2, lambda: [p for p in processes_of(box) if p != box.supervisor_pid])
            assert (await ending(box))["reason"] == "GuestLost"
            assert any(str(session) in line for line in sweep(state_dirs()).done)
            receipt = json.loads((state_dirs().receipts / f"{session}.json").read_text())
            assert receipt["ended"]["reason"] == "GuestLost"

    asyncio.run(body())


# x86-64 code for process 1: prctl(PR_SET_PDEATHSIG, 0), then for ever wait4 and pause.
TAKE_OVER = """
import os, time
pc = int(open('/proc/1/syscall').read().split()[-1], 16)
code = bytes.fromhex(
    'b89d000000bf0100000031f631d24d31d24d31c00f05'
    'b83d000000bfffffffff31f631d24d31d20f05b8220000000f05ebe3'
)
with open('/proc/1/mem', 'rb+', buffering=0) as memory:
    memory.seek(pc)
    print('wrote', memory.write(code))
if os.fork() == 0:  # an orphan's end wakes process 1, which runs the code then
    if os.fork() == 0:
        os._exit(0)
    os._exit(0)
"""


@pytest.mark.parametrize("victim", ["supervisor", "monitor"])
def test_a_guest_that_takes_over_process_1_cannot_outlive_its_session(victim: str) -> None:
    """Process 1 has the guest's uid: its parent-death signal alone would not hold."""

    async def body() -> None:
        async with sandbox() as box:
            result = await box.run(TAKE_OVER)
            assert result.text == "wrote 50\n"
            monitor, child, *_ = next(
                record.leftovers.processes
                for record in live_sessions(state_dirs())
                if record.session == box.provisioner.session_id
            )
            state = Path(f"/proc/{child.pid}/syscall")
            await gone_within(5, lambda: state.read_text().split()[0] not in ("34", "61"))
            os.kill({"supervisor": box.supervisor_pid, "monitor": monitor.pid}[victim], 9)
            await gone_within(2, lambda: [p for p in processes_of(box) if p != box.supervisor_pid])
            assert (await ending(box))["reason"] == "GuestLost"
            sweep(state_dirs())

    asyncio.run(body())


CLIENT = """
import asyncio, os, sys
sys.path.insert(0, {path!r})
from sandboxes import sandbox
async def body():
    async with sandbox() as box:
        task = asyncio.create_task(box.run("while True: pass"))
        print(box.provisioner.session_id, flush=True)
        await task
asyncio.run(body())
"""


def test_sigkill_of_the_client_ends_the_session_as_client_gone() -> None:
    """enterprise_gateway#672, code-interpreter#278: kernels do not outlive their server."""
    code = CLIENT.format(path=str(Path(__file__).parent))
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    session = client.stdout.readline().strip()
    client.kill()
    client.wait()
    client.stdout.close()

    def running() -> list[int]:
        found = []
        for pid in guest_processes():
            try:
                text = Path(f"/proc/{pid}/cgroup").read_text()
            except OSError:
                continue
            if session in text:
                found.append(pid)
        return found

    asyncio.run(gone_within(2, running))
    path = state_dirs().receipts / f"{session}.json"
    asyncio.run(gone_within(5, lambda: not path.exists()))
    assert json.loads(path.read_text())["ended"]["reason"] == "ClientGone"


def test_a_stopped_supervisor_cannot_keep_its_guest_beyond_the_backstop() -> None:
    """Spec B: the native backstop ends the guest at the run deadline + 10 s."""

    async def body() -> None:
        async with sandbox(run_deadline=12, cell_deadline=12) as box:
            os.kill(box.supervisor_pid, signal.SIGSTOP)
            try:
                await gone_within(
                    12 + 10 + 2, lambda: [p for p in processes_of(box) if p != box.supervisor_pid]
                )
            finally:
                os.kill(box.supervisor_pid, signal.SIGCONT)
            assert (await ending(box))["reason"] == "RunDeadlineExceeded"

    asyncio.run(body())


def test_a_hung_supervisor_is_killed_when_the_kernel_is_shut_down() -> None:
    async def body() -> None:
        async with sandbox() as box:
            pid = box.supervisor_pid
            os.kill(pid, signal.SIGSTOP)
            await box.manager.shutdown_kernel(now=True)
            assert not Path(f"/proc/{pid}").exists()

    asyncio.run(body())


def test_autorestart_gives_a_new_guest_on_the_same_run_clock() -> None:
    """Spec A1: an autorestart after a crash does not extend the run deadline."""
    from jupyter_client.ioloop import AsyncIOLoopKernelManager
    from jupyter_client.kernelspec import KernelSpec

    from kernel_provisioner.kernelspec import build

    async def body() -> None:
        manager = AsyncIOLoopKernelManager()
        manager._kernel_spec = KernelSpec(
            **build(engine="bwrap", profile="interactive", sources={})
        )
        await manager.start_kernel()
        restarted = asyncio.Event()
        manager.add_restart_callback(restarted.set, "restart")
        client = manager.client()
        client.start_channels()
        try:
            await client.wait_for_ready(timeout=60)
            provisioner: Any = manager.provisioner
            first, clock = provisioner.session_id, provisioner._clock_started
            client.execute("import os; os._exit(7)")
            await asyncio.wait_for(restarted.wait(), 30)
            async with asyncio.timeout(30):
                while provisioner.session_id == first or not await manager.is_alive():
                    await asyncio.sleep(0.05)
            await client.wait_for_ready(timeout=60)
            assert provisioner._clock_started == clock
            assert provisioner.receipt is None
        finally:
            client.stop_channels()
            await manager.shutdown_kernel(now=True)
        assert provisioner.receipt["previous"] == first

    asyncio.run(body())
