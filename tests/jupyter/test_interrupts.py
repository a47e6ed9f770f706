"""Where an interrupt meets a cell: wherever that is, it ends the cell or comes after it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from jupyter_client.session import Session
from sandboxes import Sandbox, sandbox
from test_session import started

pytestmark = [pytest.mark.sandbox, pytest.mark.filterwarnings("default")]

MEET = """
import os, signal
shell = get_ipython()
armed = []
def meet(*_):
    if armed:
        armed.pop()
        os.kill(os.getpid(), signal.SIGINT)
class Compiler(type(shell.compile)):
    def __call__(self, tree, name, mode):
        if mode == 'single':
            meet()
        return super().__call__(tree, name, mode)
def transform(lines):
    meet()
    return lines
"""
"""Sends the kernel one interrupt where it is hooked in, once that is armed."""
HOOKS = {
    "while the cell is read": "shell.input_transformers_cleanup.append(transform)",
    "in what is called before it": "shell.events.register('pre_run_cell', meet)",
    "between its statements": "shell.compile.__class__ = Compiler",
    "in what is called after it": "shell.events.register('post_run_cell', meet)",
}


@pytest.mark.parametrize("awaits", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("where", HOOKS)
def test_an_interrupt_ends_its_cell_wherever_it_meets_it(where: str, awaits: bool) -> None:
    """enterprise_gateway#686: none is lost before a cell's code or between two statements."""
    early = HOOKS[where].startswith(("shell.input", "shell.events.register('pre"))
    late = "after" in where

    async def body() -> None:
        async with sandbox() as box:
            assert (await box.run(MEET)).error == ""
            arm = "armed.append(1)"
            # The last that this cell does, so that it is spared itself.
            hook = f"x = 1\n{HOOKS[where]}\n{'' if late else arm};"
            assert (await box.run(hook)).error == ""
            last = f"await asyncio.sleep({0 if late else 50})" if awaits else "None"
            result = await box.run(f"import asyncio\nx = 2\n{arm if late else ''}\n{last}")
            status = result.reply["content"]["status"]
            if late:
                assert status == "ok"
            else:
                assert status == "error"
                assert result.error.startswith(("KeyboardInterrupt", "CancelledError"))
            assert (await box.run("print(x, armed)")).text == f"{1 if early else 2} []\n"

    asyncio.run(body())


def test_a_cell_that_computes_in_a_coroutine_is_interrupted() -> None:
    """ipykernel cancels it by the event loop, which such a cell never lets go on."""

    async def body() -> None:
        async with sandbox() as box:
            code = (
                "import asyncio\nx = 41\nawait asyncio.sleep(0)\nprint('com' + 'putes', flush=True)"
            )
            cell = await started(box, f"{code}\nwhile True: pass", "computes")
            await box.manager.interrupt_kernel()
            assert (await cell).error.startswith("KeyboardInterrupt")
            assert (await box.run("await asyncio.sleep(0)\nprint(x + 1)")).text == "42\n"

    asyncio.run(body())


@pytest.mark.parametrize("by", ["a person", "its deadline"])
@pytest.mark.parametrize("beside", ["", "complete_request", "execute_request"])
def test_a_cell_that_awaits_is_interrupted_at_once(by: str, beside: str) -> None:
    """Also in one long sleep, which wakes no event loop, and after a request to a subshell."""
    settings: dict[str, Any] = {"cell_deadline": 3, "grace": 30} if by == "its deadline" else {}

    async def body() -> None:
        async with sandbox(on_deadline="interrupt", **settings) as box:
            code = (
                "import asyncio\nx = 41\nprint('a' + 'waits', flush=True)\nawait asyncio.sleep(100)"
            )
            cell = await started(box, code, "awaits")
            if beside:
                await ask_subshell(box, beside)
            begun = time.monotonic()
            if not settings:
                await box.manager.interrupt_kernel()
            result = await cell
            assert result.reply["content"]["status"] == "error"
            assert result.error.startswith("CancelledError")
            # It took 12 s and more of such a sleep until something else woke the loop.
            assert time.monotonic() - begun < 8
            assert (await box.run("print(x + 1)")).text == "42\n"

    asyncio.run(body())


async def ask_subshell(box: Sandbox, kind: str) -> None:
    """Have a new subshell answer a request of another client beside the main shell's cell."""
    contents = {
        "complete_request": {"code": "x", "cursor_pos": 1},
        "execute_request": {"code": "y = 1", "silent": True, "allow_stdin": False},
    }
    client = box.manager.client()
    # The manager gives its own, whose sockets would be taken for those of the first client.
    client.session = Session(key=client.session.key)
    client.start_channels(hb=False)
    try:
        client.control_channel.send(client.session.msg("create_subshell_request"))
        created = await client.get_control_msg(timeout=30)
        request = client.session.msg(kind, contents[kind])
        request["header"]["subshell_id"] = created["content"]["subshell_id"]
        client.shell_channel.send(request)
        reply = await client.get_shell_msg(timeout=30)
        assert reply["content"]["status"] == "ok"
    finally:
        client.stop_channels()
