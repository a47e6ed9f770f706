"""A kernel in a sandbox behaves as a local ipykernel does (spec A1, H1, H2)."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from sandboxes import Sandbox, sandbox

from kernel_provisioner.errors import DeadlineReached, ImageMissing
from kernel_provisioner.provisioner import SandboxKernelManager, SandboxProvisioner

pytestmark = [pytest.mark.sandbox, pytest.mark.filterwarnings("default")]


async def started(box: Sandbox, code: str, marker: str = "") -> asyncio.Task[Any]:
    """Execute code in the background; return once it runs, or once it printed the marker."""
    seen = asyncio.Event()
    text = ""

    def look(message: dict[str, Any]) -> None:
        nonlocal text
        if message["msg_type"] == "stream":
            # What one print() writes may come in several messages.
            text += message["content"]["text"]
            if marker in text:
                seen.set()

    if not marker:
        marker = "started"
        code = f"print({marker!r}, flush=True)\n{code}"
    task = asyncio.create_task(box.run(code, on_message=look))
    await asyncio.wait_for(seen.wait(), 30)
    return task


def test_interrupt_keeps_variables() -> None:
    async def body() -> None:
        async with sandbox() as box:
            await box.run("x = 41")
            task = await started(box, "while True: pass")
            await box.manager.interrupt_kernel()
            result = await task
            assert result.error.startswith("KeyboardInterrupt")
            (shown,) = [m["content"] for m in result.messages if m["msg_type"] == "error"]
            assert "interrupts.py" not in "".join(shown["traceback"]), "it is the person's code"
            assert (await box.run("print(x + 1)")).text == "42\n"

    asyncio.run(body())


def test_interrupt_reaches_a_child_process() -> None:
    async def body() -> None:
        async with sandbox() as box:
            code = (
                "import subprocess\n"
                "child = subprocess.Popen(['sh', '-c', 'echo; exec sleep 1000'], stdout=-1)\n"
                "child.stdout.readline()\n"
                "print('child', 'runs', flush=True)\n"
                "child.wait()"
            )
            task = await started(box, code, "child runs")
            await box.manager.interrupt_kernel()
            assert (await task).error.startswith("KeyboardInterrupt")
            # Its status may have been lost with the wait that was interrupted.
            assert (await box.run("child.wait(10)\nprint('gone')")).text == "gone\n"

    asyncio.run(body())


def test_restart_is_a_new_guest_at_the_same_sockets() -> None:
    """jupyter_server#481: a restart changes no endpoint."""

    async def body() -> None:
        async with sandbox() as box:
            await box.run("x = 1; open('/workspace/note', 'w').write('old')")
            first = box.provisioner.session_id
            sockets = box.manager.get_connection_info()["ip"]
            await box.manager.restart_kernel(now=False)
            await box.client.wait_for_ready(timeout=60)
            assert box.provisioner.session_id != first
            assert box.manager.get_connection_info()["ip"] == sockets
            result = await box.run("import os; print('x' in dir(), os.listdir('/workspace'))")
            assert result.text == "False []\n"
            provisioner = box.provisioner
        assert provisioner.receipt is not None
        assert provisioner.receipt["previous"] == first

    asyncio.run(body())


def test_orderly_shutdown_is_no_crash() -> None:
    async def body() -> None:
        async with sandbox() as box:
            await box.run("1")
            await box.manager.shutdown_kernel(now=False)
            assert box.provisioner.ended is not None
            assert box.provisioner.ended["reason"] == "Shutdown"
            assert box.provisioner.receipt is not None
            assert box.provisioner.receipt["ended"]["class"] == "done"
            assert box.provisioner.receipt["peak_memory_bytes"] > 10 << 20

    asyncio.run(body())


def test_input_is_answered() -> None:
    """nbconvert#288: with a person there, input() works."""

    async def body() -> None:
        async with sandbox() as box:
            box.client.allow_stdin = True
            asked = asyncio.Event()

            async def answer() -> None:
                message = await box.client.get_stdin_msg(timeout=30)
                assert message["content"]["prompt"] == "name? "
                box.client.input("Ada")
                asked.set()

            replier = asyncio.create_task(answer())
            box.client.execute("name = input('name? ')", allow_stdin=True)
            reply = await box.client.get_shell_msg(timeout=30)
            await replier
            assert reply["content"]["status"] == "ok"
            assert (await box.run("print(name)")).text == "Ada\n"

    asyncio.run(body())


def test_completion_and_inspection() -> None:
    async def body() -> None:
        async with sandbox() as box:
            await box.run("import collections")
            box.client.complete("collections.Ord")
            reply = await box.client.get_shell_msg(timeout=30)
            assert "OrderedDict" in str(reply["content"]["matches"])
            box.client.inspect("collections.OrderedDict")
            reply = await box.client.get_shell_msg(timeout=30)
            assert reply["content"]["found"]

    asyncio.run(body())


def test_subshell_runs_beside_a_busy_cell() -> None:
    async def body() -> None:
        async with sandbox() as box:
            message = box.client.session.msg("create_subshell_request")
            box.client.control_channel.send(message)
            reply = await box.client.get_control_msg(timeout=30)
            subshell = reply["content"]["subshell_id"]
            await box.run("import threading; go = threading.Event()")
            message = box.client.session.msg(
                "execute_request",
                {"code": "go.wait()", "silent": False, "store_history": True},
            )
            box.client.shell_channel.send(message)
            inner = box.client.session.msg(
                "execute_request", {"code": "go.set()", "silent": False, "store_history": True}
            )
            inner["header"]["subshell_id"] = subshell
            box.client.shell_channel.send(inner)
            replies = [await box.client.get_shell_msg(timeout=30) for _ in range(2)]
            done = {r["parent_header"]["msg_id"]: r["content"]["status"] for r in replies}
            assert done == {message["msg_id"]: "ok", inner["msg_id"]: "ok"}

    asyncio.run(body())


@pytest.mark.timeout(300)
def test_20000_displays_with_a_stalled_subscriber_arrive_with_the_final_idle() -> None:
    """papermill#426: the final messages of a flood are never lost."""

    async def body() -> None:
        # On a loaded machine of two cores they take most of a minute.
        async with sandbox(cell_deadline=240) as box:
            msg_id = box.client.execute(
                "from IPython.display import display\n"
                "for i in range(20000): display({'text/plain': str(i)}, raw=True)"
            )
            # The subscriber reads nothing until the cell has replied.
            reply = await box.client.get_shell_msg(timeout=240)
            assert reply["content"]["status"] == "ok"
            numbers = []
            while True:
                message = await box.client.get_iopub_msg(timeout=30)
                if message["parent_header"].get("msg_id") != msg_id:
                    continue
                if message["msg_type"] == "display_data":
                    numbers.append(int(message["content"]["data"]["text/plain"]))
                elif message["content"].get("execution_state") == "idle":
                    break
            assert numbers == list(range(20000))

    asyncio.run(body())


def test_a_100_mib_buffer_arrives_intact() -> None:
    async def body() -> None:
        async with sandbox() as box:
            code = (
                "import hashlib, random, comm\n"
                "data = random.Random(7).randbytes(100 << 20)\n"
                "comm.create_comm(target_name='t', buffers=[data])\n"
                "print(hashlib.sha256(data).hexdigest())"
            )
            result = await box.run(code)
            import hashlib

            buffers = [m["buffers"] for m in result.messages if m["msg_type"] == "comm_open"]
            assert hashlib.sha256(bytes(buffers[0][0])).hexdigest() == result.text.strip()

    asyncio.run(body())


def test_a_start_request_changes_nothing(tmp_path: Path) -> None:
    """Spec D5: env, cwd and extra arguments of a request change nothing."""

    async def body() -> None:
        request = {
            "env": {
                "BACKINTEL_SANDBOX": "docker",
                "PYTHONPATH": "/evil",
                "LD_PRELOAD": "/evil.so",
                "SECRET_TOKEN": "canary-9f",
                "PATH": "/evil",
            },
            "cwd": str(tmp_path),
            "extra_arguments": ["--IPKernelApp.exec_lines=canary = 1", "--Session.debug=True"],
        }
        async with sandbox(start=request) as box:
            result = await box.run(
                "import os; print('canary' in globals(), os.getcwd(), "
                "any('canary-9f' in v or '/evil' in v for v in os.environ.values()))"
            )
            assert result.text == "False /workspace False\n"

    asyncio.run(body())


def test_two_sandboxes_do_not_see_each_other() -> None:
    async def body() -> None:
        async with sandbox() as one, sandbox() as two:
            await one.run("open('/workspace/mine', 'w').write('1'); open('/dev/shm/mine', 'w')")
            result = await two.run(
                "import os; print(os.listdir('/workspace'), os.listdir('/dev/shm'), "
                "len([p for p in os.listdir('/proc') if p.isdigit()]))"
            )
            assert result.text == "[] [] 2\n"

    asyncio.run(body())


def test_start_up_counts_inside_the_run_deadline() -> None:
    async def body() -> None:
        manager = SandboxKernelManager(
            command_line={"engine": "bwrap", "run_deadline": 0.2, "cell_deadline": 0.2},
            default_profile="analysis",
        )
        with pytest.raises(DeadlineReached, match=r"run deadline of 0\.2 s"):
            await manager.start_kernel()
        provisioner = manager.provisioner
        assert isinstance(provisioner, SandboxProvisioner)
        assert provisioner.receipt is not None
        assert provisioner.receipt["ended"]["reason"] == "RunDeadlineExceeded"
        assert provisioner.receipt["ended"]["class"] == "limit"

    asyncio.run(body())


def test_without_an_image_the_error_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BACKINTEL_HOME", str(tmp_path))

    async def body() -> None:
        manager = SandboxKernelManager(command_line={"engine": "bwrap"}, default_profile="analysis")
        with pytest.raises(ImageMissing, match="backintel sandbox prepare"):
            await manager.start_kernel()

    asyncio.run(body())


def test_a_cancelled_start_leaves_nothing() -> None:
    async def body() -> None:
        phases: asyncio.Queue[str] = asyncio.Queue()
        manager = SandboxKernelManager(
            command_line={"engine": "bwrap"},
            default_profile="analysis",
            on_phase=lambda name, _: phases.put_nowait(name),
        )
        task = asyncio.create_task(manager.start_kernel())
        while await asyncio.wait_for(phases.get(), 30) != "verified":
            pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(body())


def test_signals_of_the_manager_reach_the_kernel() -> None:
    async def body() -> None:
        async with sandbox() as box:
            await box.run(
                "import signal, threading; got = threading.Event()\n"
                "_ = signal.signal(signal.SIGUSR1, lambda *_: got.set())"
            )
            await box.manager.signal_kernel(signal.SIGUSR1)
            assert (await box.run("print(got.wait(10))")).text == "True\n"

    asyncio.run(body())


def test_what_makes_the_start_quick_does_not_show() -> None:
    code = (
        "import gc, sys, jupyter_client\n"
        "assert gc.isenabled()\n"
        "ours = {'attest', 'interrupts', 'kernel', 'lazy', 'limits', 'wire'}\n"
        "assert not ours & set(sys.modules)\n"
        "assert 'jupyter_client.manager' not in sys.modules, 'it is loaded at every start'\n"
        "assert jupyter_client.__version__.count('.') >= 2\n"
        "assert 'KernelManager' in dir(jupyter_client)\n"
        "from jupyter_client import *\n"
        "from jupyter_client import AsyncKernelClient\n"
        "print(type(jupyter_client).__name__, KernelManager.__module__, protocol_version)\n"
        "jupyter_client.absent\n"
    )

    async def body() -> None:
        async with sandbox() as box:
            result = await box.run(code)
            assert result.error.startswith("AttributeError: module"), result.error
            assert result.text == "module jupyter_client.manager 5.4\n"
            assert result.error.startswith("AttributeError: module 'jupyter_client' has no")

    asyncio.run(body())


def test_a_kernel_whose_code_closed_all_pipes_goes_on() -> None:
    code = (
        "import os\n"
        "for name in os.listdir('/proc/self/fd'):\n"
        "    try:\n"
        "        found = os.readlink(f'/proc/self/fd/{name}')\n"
        "    except FileNotFoundError:\n"
        "        continue\n"
        "    if int(name) > 2 and found == pipe:\n"
        "        os.close(int(name))\n"
    )
    find = (
        "import gc\n"
        "kernel = get_ipython().kernel\n"
        "pipe = __import__('os').readlink(f'/proc/self/fd/{kernel.targets}')\n"
    )

    async def body() -> None:
        async with sandbox(cell_deadline=2, on_deadline="interrupt", grace=5) as box:
            assert (await box.run(find + code)).error == ""
            assert (await box.run("while True: pass")).error.startswith("KeyboardInterrupt")
            assert (await box.run("print(1)")).text == "1\n"

    asyncio.run(body())
