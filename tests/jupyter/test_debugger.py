"""The debugger works in a sandbox, and a stop at a breakpoint is no way around a deadline.

Spec G2: only a wait for ``input()`` pauses a cell's clock; at a breakpoint it goes on (cases 28).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from sandboxes import Sandbox, sandbox

pytestmark = [pytest.mark.sandbox, pytest.mark.filterwarnings("default")]

CELL = "a = 40\nb = a + 1\nc = b + 1\nprint(c)\n"


class Debugging:
    """A front end with a debugger: what JupyterLab's sends, over the control channel."""

    def __init__(self, box: Sandbox) -> None:
        self.box = box
        self.messages: list[dict[str, Any]] = []
        self._number = 0

    async def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send one request of the debug adapter protocol; return its successful answer."""
        self._number += 1
        client = self.box.client
        content = {"type": "request", "seq": self._number}
        request = client.session.msg(
            "debug_request", content | {"command": command, "arguments": arguments}
        )
        client.control_channel.send(request)
        while True:
            reply = await client.get_control_msg(timeout=30)
            if reply["parent_header"].get("msg_id") == request["header"]["msg_id"]:
                assert reply["content"]["success"], reply["content"]
                answer: dict[str, Any] = reply["content"]
                return answer

    async def attach(self, line: int) -> None:
        """Start the debugger with one breakpoint in CELL."""
        await self.ask(
            "initialize", clientID="test", adapterID="", pathFormat="path", linesStartAt1=True
        )
        await self.ask("attach")
        path = (await self.ask("dumpCell", code=CELL))["body"]["sourcePath"]
        found = await self.ask(
            "setBreakpoints",
            source={"path": path},
            breakpoints=[{"line": line}],
            sourceModified=False,
        )
        assert found["body"]["breakpoints"][0]["verified"]
        await self.ask("configurationDone")

    async def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Read iopub up to a message; events of the debugger belong to no cell."""
        async with asyncio.timeout(40):
            while True:
                message: dict[str, Any] = await self.box.client.get_iopub_msg()
                self.messages.append(message)
                if wanted(message):
                    return message

    async def stop_at(self, line: int) -> tuple[str, int]:
        """Run CELL up to the breakpoint; return its msg_id and the stopped thread's number."""
        await self.attach(line)
        cell = self.box.client.execute(CELL)
        stopped = await self.until(
            lambda m: m["msg_type"] == "debug_event" and m["content"]["event"] == "stopped"
        )
        body = stopped["content"]["body"]
        assert body["reason"] == "breakpoint"
        return cell, body["threadId"]

    async def end_of(self, cell: str) -> dict[str, Any]:
        """Read up to the cell's idle and return its reply."""
        await self.until(
            lambda m: (
                m["msg_type"] == "status"
                and m["content"]["execution_state"] == "idle"
                and m["parent_header"].get("msg_id") == cell
            )
        )
        while True:
            reply: dict[str, Any] = await self.box.client.get_shell_msg(timeout=30)
            if reply["parent_header"]["msg_id"] == cell:
                return reply

    def shown(self, kind: str, member: str) -> str:
        """What messages of one kind showed."""
        found = [m["content"][member] for m in self.messages if m["msg_type"] == kind]
        return "".join(found)


def test_a_cell_stops_at_a_breakpoint_is_inspected_and_goes_on() -> None:
    """libkrun#510: the debugger, which connects over loopback, works."""

    async def body() -> None:
        async with sandbox() as box:
            debugging = Debugging(box)
            cell, thread = await debugging.stop_at(3)
            frames = (await debugging.ask("stackTrace", threadId=thread))["body"]["stackFrames"]
            assert frames[0]["line"] == 3
            scopes = (await debugging.ask("scopes", frameId=frames[0]["id"]))["body"]["scopes"]
            reference = scopes[0]["variablesReference"]
            found = await debugging.ask("variables", variablesReference=reference)
            values = {item["name"]: item["value"] for item in found["body"]["variables"]}
            assert (values["a"], values["b"]) == ("40", "41")
            await debugging.ask("continue", threadId=thread)
            assert (await debugging.end_of(cell))["content"]["status"] == "ok"
            assert debugging.shown("stream", "text") == "42\n"

    asyncio.run(body())


def test_an_interrupt_ends_a_stopped_cell_and_keeps_variables() -> None:
    async def body() -> None:
        async with sandbox() as box:
            debugging = Debugging(box)
            cell, _ = await debugging.stop_at(2)
            await box.manager.interrupt_kernel()
            reply = await debugging.end_of(cell)
            assert reply["content"]["ename"] == "KeyboardInterrupt"
            assert (await box.run("print(a)")).text == "40\n"

    asyncio.run(body())


def test_a_deadline_interrupts_a_cell_that_stands_at_a_breakpoint() -> None:
    async def body() -> None:
        async with sandbox(cell_deadline=10, on_deadline="interrupt", grace=20) as box:
            debugging = Debugging(box)
            cell, _ = await debugging.stop_at(2)
            reply = await debugging.end_of(cell)
            assert reply["content"]["ename"] == "KeyboardInterrupt"
            assert "CellDeadlineExceeded: the cell ran" in debugging.shown("stream", "text")
            assert (await box.run("print(a)")).text == "40\n"

    asyncio.run(body())


def test_a_deadline_ends_a_guest_whose_cell_stands_at_a_breakpoint() -> None:
    async def body() -> None:
        async with sandbox(cell_deadline=10, on_deadline="cancel") as box:
            debugging = Debugging(box)
            cell, _ = await debugging.stop_at(2)
            stopped = time.monotonic()
            reply = await debugging.end_of(cell)
            assert time.monotonic() - stopped < 10 + 5
            assert reply["content"]["ename"] == "CellDeadlineExceeded"
            assert debugging.shown("error", "ename") == "CellDeadlineExceeded"
            async with asyncio.timeout(15):
                await box.provisioner.wait()
            assert box.provisioner.ended is not None
            assert box.provisioner.ended["reason"] == "CellDeadlineExceeded"

    asyncio.run(body())
