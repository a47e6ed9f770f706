"""Drive a notebook's cells through nbclient, one by one, in a sandbox that runs (spec J3, G4).

One by one, because the run must know which cell the sandbox ended in, and because nbclient's own
loop would take over the signals. Every message comes from the guest, which is not trusted: one
that nbclient, jupyter_client or nbformat cannot digest is the notebook's failure and nobody
else's, and that a limit was hit is believed only from the provisioner, never from a name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from kernel_provisioner import notebook as notebooks
from kernel_provisioner.errors import BackIntelError, Reason
from kernel_provisioner.runmodel import MALFORMED, Progress, RunResult

_END_NEWS_S = 3.0
_BACKSTOP_S = 60.0
_MALFORMED_TEXT = (
    "The cell, or a library that it uses, sent a message that is no valid Jupyter message. "
    "Outputs that came after it are missing, and the run was ended."
)


class Incomplete(Exception):
    """A cell failed or the sandbox is gone; the rest is not run."""

    def __init__(self, ename: str, evalue: str, *, ours: bool = False) -> None:
        super().__init__(f"{ename}: {evalue}")
        self.ename = ename
        self.evalue = evalue
        self.ours = ours


class Driver:
    """Sends the cells of one run and notes in ``result`` how far it came."""

    def __init__(
        self,
        notebook: Any,
        manager: Any,
        result: RunResult,
        progress: Progress,
        stopping: Callable[[], bool],
    ) -> None:
        self.code = notebooks.code_cells(notebook)
        self.sent = 0
        self._notebook = notebook
        self._manager = manager
        self._result = result
        self._progress = progress
        self._stopping = stopping

    async def drive(self, log: logging.Logger) -> None:
        """Start the sandbox and run all cells; the session stays. Raises Incomplete.

        Raises BackIntelError if the sandbox does not start.
        """
        from nbclient import NotebookClient

        await self._manager.start_kernel()
        provisioner = self._manager.provisioner
        self._result.session = provisioner.session_id
        # The watchdog ends the session at its run deadline; this is for a hanging supervisor.
        longest_s = provisioner.settings.profile.run_deadline_s + _BACKSTOP_S
        client: Any = NotebookClient(
            self._notebook,
            km=self._manager,
            timeout=None,
            # By default nbclient drops what of a cell's output takes over 4 s after its reply.
            iopub_timeout=math.ceil(longest_s),
            raise_on_iopub_timeout=True,
            allow_errors=False,
            log=log,
        )
        try:
            async with asyncio.timeout(longest_s):
                try:
                    await self._connect(client)
                    await self._cells(client)
                finally:
                    if client.kc is not None:
                        client.kc.stop_channels()
        except TimeoutError:
            raise Incomplete(Reason.GUEST_LOST, "it outlived its run deadline", ours=True) from None

    async def _connect(self, client: Any) -> None:
        try:
            await client.async_start_new_kernel_client()
            message = await client.async_wait_for_reply(client.kc.kernel_info())
        except Exception as error:
            if _is_ours(error):
                raise
            # nbclient's RuntimeError for a kernel that died, or a first reply that is none. No
            # code of the notebook has run.
            await self._news_of_end()
            text = "its kernel did not answer as a Jupyter kernel does."
            raise Incomplete(Reason.GUEST_LOST, text, ours=True) from None
        content = message["content"] if message else {}
        if isinstance(content.get("language_info"), dict):
            self._notebook.metadata["language_info"] = content["language_info"]

    async def _cells(self, client: Any) -> None:
        total = len(self.code)
        for number, index in enumerate(self.code, start=1):
            cell = self._notebook.cells[index]
            if notebooks.has_tag(cell, notebooks.SKIP_TAG):
                self._progress.cell_skipped(number, total, cell.source)
                self._result.cells_run += 1
                continue
            self._progress.cell_started(number, total, cell.source)
            began = time.monotonic()
            state = "failed"
            try:
                state = await self._cell(client, cell, index)
            except Incomplete:
                self._result.failed_cell = number
                raise
            except asyncio.CancelledError:
                state = "stopped"
                raise
            finally:
                self._progress.cell_ended(number, total, time.monotonic() - began, state)
            self._result.cells_run += 1
        self._result.complete = total > 0

    async def _cell(self, client: Any, cell: Any, index: int) -> str:
        """Run one cell; return its state. Raises Incomplete if the run cannot go on."""
        self.sent += 1
        failure = await self._execute(client, cell, index)
        errors = [output.ename for output in cell.outputs if output.output_type == "error"]
        if failure is not None or (errors and errors[-1] in set(Reason)):
            # The sandbox's own errors reach the cell before the provisioner hears of the end.
            if failure is None or failure.ename in {*Reason, MALFORMED}:
                await self._news_of_end()
            if failure is None and await self._end() is not None:
                failure = Incomplete(errors[-1], "")
        if failure is not None:
            raise failure
        return "raised" if errors else "done"

    async def _execute(self, client: Any, cell: Any, index: int) -> Incomplete | None:
        """Send one cell and take in what it brings; return why the run cannot go on."""
        from nbclient.exceptions import CellExecutionError, DeadKernelError

        try:
            await client.async_execute_cell(cell, index)
        except CellExecutionError as error:
            return Incomplete(_text(error.ename, "Error"), _text(error.evalue, ""))
        except DeadKernelError:
            # nbclient says so of its own cancellation, too.
            if self._stopping():
                raise asyncio.CancelledError from None
            return Incomplete(Reason.GUEST_LOST, "the kernel died", ours=True)
        except Exception as error:
            if _is_ours(error):
                raise
            # Missing keys, wrong types, no JSON, endless nesting, a broken signature, ...: between
            # sending a cell and its reply, messages are all that nbclient has to trip over.
            return Incomplete(MALFORMED, _MALFORMED_TEXT)
        return None

    async def _end(self) -> dict[str, Any] | None:
        """Return the supervisor's word on an end that nobody asked for."""
        provisioner = self._manager.provisioner
        if provisioner is None or await provisioner.poll() is None:
            return None
        ended: dict[str, Any] | None = provisioner.ended
        return ended if ended and ended.get("reason") != Reason.SHUTDOWN else None

    async def _news_of_end(self) -> None:
        """Give the supervisor's word on an end a moment to arrive."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_NEWS_S):
                while await self._end() is None:
                    await asyncio.sleep(0.02)
        ended = await self._end()
        if ended is not None:
            self._result.ended = {
                "reason": ended.get("reason"),
                "class": ended.get("class"),
                "message": ended.get("message"),
            }


def _is_ours(error: Exception) -> bool:
    """Whether an error is this side's own trouble, which no message can provoke."""
    from zmq import ZMQError

    return isinstance(error, BackIntelError | MemoryError | OSError | ZMQError)


def _text(value: object, default: str) -> str:
    """Return what should be text in a reply that nobody validated."""
    return value if isinstance(value, str) and value else default
