"""Deaths and deadlines that users of other kernels reported: the whole kind of each, for real.

Each docstring cites where the symptom was reported; the table is in docs/promises.md.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbformat.v4 import new_code_cell, new_notebook
from runs import Bench
from sandboxes import Sandbox, gone_within, guest_processes, sandbox
from test_ends import processes_of
from test_session import started

from kernel_provisioner.provisioner import SandboxKernelManager

pytestmark = [pytest.mark.sandbox, pytest.mark.filterwarnings("default")]

ALLOCATE_WITHOUT_END = """
kept = []
while True:
    try:
        kept.append(bytearray(b'x' * (16 << 20)))
    except BaseException:
        pass
"""
SPIN_ON_ALL_CPUS = """
import os, signal
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while True: pass
"""

DIE_WHEN_INTERRUPTED = """
import os, time
try:
    print('may be', 'interrupted', flush=True)
    time.sleep(1000)
except KeyboardInterrupt:
    os._exit(3)
"""


async def replies(box: Sandbox, *msg_ids: str) -> dict[str, dict[str, Any]]:
    """Return the content of the reply to each of these requests."""
    found: dict[str, dict[str, Any]] = {}
    while set(found) != set(msg_ids):
        reply = await box.client.get_shell_msg(timeout=30)
        found[reply["parent_header"]["msg_id"]] = reply["content"]
    return found


async def texts(box: Sandbox, *msg_ids: str) -> dict[str, str]:
    """Read until each of these requests is idle; return the stream text of each."""
    found = dict.fromkeys(msg_ids, "")
    waiting = set(msg_ids)
    while waiting:
        message = await box.client.get_iopub_msg(timeout=30)
        parent, content = message["parent_header"].get("msg_id", ""), message["content"]
        if message["msg_type"] == "stream" and parent in found:
            found[parent] += content["text"]
        elif content.get("execution_state") == "idle":
            waiting.discard(parent)
    return found


async def last_states(box: Sandbox, *msg_ids: str) -> dict[str, str]:
    """Read until each of these requests is idle; return the last state of each."""
    found: dict[str, str] = {}
    while any(found.get(msg_id) != "idle" for msg_id in msg_ids):
        message = await box.client.get_iopub_msg(timeout=30)
        if message["msg_type"] == "status":
            parent = message["parent_header"].get("msg_id", "")
            found[parent] = message["content"]["execution_state"]
    return {msg_id: found[msg_id] for msg_id in msg_ids}


def test_a_kill_for_memory_that_was_a_childs_is_not_the_kernels() -> None:
    """colabtools#3070: out of memory is claimed only with evidence, and for what it killed."""

    async def body() -> None:
        async with sandbox(profile="interactive") as box:
            child = "import subprocess, sys\nbig = 'b = bytearray(3 << 30)'\n"
            child += "print(subprocess.run([sys.executable, '-c', big]).returncode)"
            assert "-9\n" in (await box.run(child)).text
            later = "import os, time; time.sleep(5); os.kill(os.getpid(), 9)"
            result = await box.run(later)
            assert result.error.startswith("KernelCrashed"), "memory was long enough again"

    asyncio.run(body())


@pytest.mark.parametrize("how", ["os._exit(3)", "os.kill(os.getpid(), 11)"])
def test_a_headless_client_ends_within_seconds_of_a_death(how: str) -> None:
    """nbclient#88, papermill#125: a run without a person does not hang after a kill."""

    async def body() -> None:
        cells = [f"import os\n{how}", "print('no')"]
        notebook = new_notebook(cells=[new_code_cell(source) for source in cells])
        manager = SandboxKernelManager(
            command_line={"engine": "bwrap"}, default_profile="interactive"
        )
        begun: list[float] = []
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=None,
            on_cell_execute=lambda **_: begun.append(time.monotonic()),
        )
        # Then it shuts the kernel down and closes its channels.
        client.owns_km = True
        with pytest.raises((DeadKernelError, CellExecutionError)):
            await client.async_execute()
        assert time.monotonic() - begun[0] < 10
        assert len(begun) == 1
        assert "KernelCrashed" in nbformat.writes(notebook)

    asyncio.run(body())


def test_a_loop_that_allocates_and_ignores_everything_does_not_pass(tmp_path: Path) -> None:
    """nbgrader#427: no reply is a failure; the checks after it count as not run."""
    bench = Bench(tmp_path)
    bench.write("print('begun', flush=True)\n" + ALLOCATE_WITHOUT_END, "assert True")
    run = bench.run()
    assert run.status == 5
    assert run.errors == ["OutOfMemory"]
    assert run.report["cells"] == {"total": 2, "run": 0, "failed": 1}
    assert run.cells[0].outputs[0].text == "begun\n"
    assert run.cells[1].execution_count is None
    assert not (run.out / "artifacts").exists()


def test_after_a_death_no_cell_stays_busy_and_none_waits() -> None:
    """jupyterlab#13780, jupyterlab#6918: running, queued and late cells all end idle."""

    async def body() -> None:
        async with sandbox() as box:
            first = await started(box, DIE_WHEN_INTERRUPTED, "may be interrupted")
            queued = [box.client.execute(code, stop_on_error=False) for code in ("1", "2")]
            await box.manager.interrupt_kernel()
            result = await first
            assert result.error.startswith("KernelCrashed")
            assert result.messages[-1]["content"] == {"execution_state": "idle"}
            assert set(await last_states(box, *queued)) == set(queued)
            late = box.client.execute("3")
            answered = await replies(box, *queued, late)
            assert {content["ename"] for content in answered.values()} == {"KernelCrashed"}
            assert set(await last_states(box, late)) == {late}
            async with asyncio.timeout(10):
                assert await box.provisioner.wait() is not None
            assert await box.manager.is_alive() is False

    asyncio.run(body())


def test_children_do_not_survive_the_kernels_end_for_memory() -> None:
    """distributed#1322: after a kill for memory no child of the session is left on the host."""

    async def body() -> None:
        async with sandbox(profile="benchmark") as box:
            others = len(guest_processes())
            family = SPIN_ON_ALL_CPUS.replace("while True: pass", "signal.pause()")
            await box.run(family + "print('family')", silent=True)
            assert len(guest_processes()) >= others + 4
            result = await box.run(ALLOCATE_WITHOUT_END, silent=False)
            assert result.error
            await gone_within(2, lambda: len(guest_processes()) > others)

    # One cell is all that the profile has: the family is made by a silent request.
    asyncio.run(body())


def test_a_guest_without_processor_time_or_memory_is_killed_all_the_same() -> None:
    """E2B#339: a kill needs no answer of the guest, whatever it has used up."""

    async def body() -> None:
        async with sandbox(profile="interactive") as box:
            await box.run("kept = b'x' * (1700 << 20)\n" + SPIN_ON_ALL_CPUS)
            busy = await started(box, "while True: pass")
            # From the host: a kernel that stops itself can keep back what it printed before.
            for pid in processes_of(box):
                if pid != box.supervisor_pid:
                    os.kill(pid, signal.SIGSTOP)
            begun = time.monotonic()
            await box.manager.shutdown_kernel(now=True)
            assert time.monotonic() - begun < 8
            assert (await busy).error.startswith("Shutdown")
            assert (box.provisioner.ended or {})["reason"] == "Shutdown"

    asyncio.run(body())


DEAF = {
    "handler": "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
    "except": "import time\nwhile True:\n    try: time.sleep(9)\n    except BaseException: pass",
    "C code": (
        "import ctypes, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
        "ctypes.PyDLL(None).sleep(1000)"
    ),
}


@pytest.mark.parametrize("how", sorted(DEAF))
def test_an_ignored_interrupt_is_no_success(how: str) -> None:
    """CoursIA#11115, smolvm#684: a cell that goes on after the grace is killed and told so."""

    async def body() -> None:
        settings = {"cell_deadline": 2, "on_deadline": "interrupt", "grace": 1}
        async with sandbox(**settings) as box:
            # So that it is deaf at once, long before the deadline.
            await box.run("import ctypes, signal, time")
            begun = time.monotonic()
            result = await box.run(DEAF[how])
            assert 2.9 < time.monotonic() - begun < 8
            assert result.error.startswith("CellDeadlineExceeded")
            assert result.reply["content"]["status"] == "error"
            async with asyncio.timeout(10):
                assert await box.provisioner.wait() is not None
            assert await box.manager.is_alive() is False

    asyncio.run(body())


def test_the_host_counts_interrupted_cells() -> None:
    """ipykernel#845: an interrupt is recorded by the host, whatever the cell makes of it."""

    async def body() -> None:
        async with sandbox(cell_deadline=1, on_deadline="interrupt") as box:
            hidden = "import time\ntry: time.sleep(9)\nexcept KeyboardInterrupt:\n    pass"
            result = await box.run(hidden)
            assert result.reply["content"]["status"] == "ok"
            assert "CellDeadlineExceeded" in result.text
            shown = await box.run("while True: pass")
            assert shown.reply["content"]["ename"] == "KeyboardInterrupt"
            await box.manager.shutdown_kernel(now=True)
            assert box.provisioner.receipt is not None
            cells = box.provisioner.receipt["cells"]
            assert (cells["run"], cells["interrupted"], cells["failed"]) == (2, 2, 1)

    asyncio.run(body())


def test_an_interrupt_lands_while_all_processors_are_busy() -> None:
    """enterprise_gateway#686: a busy guest does not starve the interrupt."""

    async def body() -> None:
        async with sandbox() as box:
            await box.run(SPIN_ON_ALL_CPUS)
            busy = await started(box, "while True: pass")
            begun = time.monotonic()
            await box.manager.interrupt_kernel()
            assert (await busy).error.startswith("KeyboardInterrupt")
            assert time.monotonic() - begun < 30
            assert (await box.run("print(6 * 7)")).text == "42\n"

    asyncio.run(body())


def test_a_deadlines_interrupt_hits_its_own_cell_or_none() -> None:
    """Flowfile#595: one that comes too late takes away no reply, and spares the queued cell."""

    async def body() -> None:
        async with sandbox(cell_deadline=1, on_deadline="interrupt", grace=5) as box:
            late = "import time\nend = time.monotonic() + {}\nwhile time.monotonic() < end: pass"
            follows = "import time\nfor _ in range(30): time.sleep(0.01)"
            awaits = "import asyncio\nfor _ in range(30): await asyncio.sleep(0.01)"
            for number in range(16):
                # Around the moment at which the signal is sent: before, at, after.
                code = late.format(0.97 + 0.003 * number)
                first = box.client.execute(code, stop_on_error=False)
                second = box.client.execute((follows, awaits)[number % 2], stop_on_error=False)
                content = await replies(box, first, second)
                told = await texts(box, first, second)
                assert content[first].get("ename", "KeyboardInterrupt") == "KeyboardInterrupt"
                # On a host that is slow enough it has an interrupt of its own, which it is told.
                own = "CellDeadlineExceeded" in told[second]
                assert own or content[second]["status"] == "ok", content[second]
            assert (await box.run("print(number := 1)")).text == "1\n"
            assert await box.manager.is_alive() is True

    asyncio.run(body())


def test_a_person_interrupts_whatever_runs_after_a_deadline_did() -> None:
    """Flowfile#595: what a deadline's interrupt was for does not stick to the next one."""

    async def body() -> None:
        async with sandbox(cell_deadline=6, on_deadline="interrupt", grace=5) as box:
            deaf = (
                "import signal, time\n"
                "mine = signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
                "time.sleep(7)\n"
                "signal.signal(signal.SIGINT, mine)"
            )
            result = await box.run(deaf)
            assert result.error == ""
            assert "CellDeadlineExceeded" in result.text
            for code in ("while True: pass", "import time\ntime.sleep(100)"):
                cell = await started(box, code)
                await box.manager.interrupt_kernel()
                result = await cell
                assert result.error.startswith("KeyboardInterrupt")
                assert "CellDeadlineExceeded" not in result.text, "the deadline ended it"

    asyncio.run(body())


def test_a_client_that_leaves_its_cell_finds_the_session_and_its_deadline() -> None:
    """code-interpreter#278: the cell of a client that disconnects goes on, under its deadline."""

    async def body() -> None:
        async with sandbox(cell_deadline=4, on_deadline="interrupt") as box:
            box.client.execute("kept = 1\nwhile True: pass", stop_on_error=False)
            while (await box.client.get_iopub_msg(timeout=30))["msg_type"] != "execute_input":
                pass
            begun = time.monotonic()
            box.client.stop_channels()
            box.client = box.manager.client()
            box.client.start_channels()
            try:
                # Answered only when the abandoned cell was interrupted.
                result = await box.run("print(kept + 1)", timeout=30)
                assert result.text == "2\n"
                assert time.monotonic() - begun < 10
            finally:
                box.client.stop_channels()

    asyncio.run(body())
