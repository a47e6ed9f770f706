"""Run a notebook headlessly in a sandbox of its own and bring out what it made (spec J3).

Drives nbclient through the same provisioner that JupyterLab uses. The cells are driven one by one,
because the run must know which cell the sandbox ended in, and because nbclient's own loop would
take over the signals. The guest is not trusted: that a limit was hit is believed only from the
provisioner, never from the name of an exception. Artifacts are published only on completion.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Coroutine, Iterator
from typing import Any

from kernel_provisioner import notebook as notebooks
from kernel_provisioner import outdir, requires
from kernel_provisioner.config import resolve_settings
from kernel_provisioner.engines.registry import get_engine
from kernel_provisioner.errors import (
    EXIT_INTERRUPTED,
    EXIT_NOTEBOOK_FAILED,
    EXIT_TERMINATED,
    BackIntelError,
    ExportRefused,
    Reason,
)
from kernel_provisioner.images.receipt import load_image
from kernel_provisioner.paths import state_dirs
from kernel_provisioner.runmodel import Progress, RunRequest, RunResult, judge

DEFAULT_PROFILE = "analysis"
_SHUTDOWN_S = 30.0
_END_NEWS_S = 3.0
_BACKSTOP_S = 60.0
_STAGED = ".unchecked"


class _Stopped(Exception):
    """The owner asked for the end."""


class _Incomplete(Exception):
    """A cell failed or the sandbox is gone; the rest is not run."""

    def __init__(self, ename: str, evalue: str, *, ours: bool = False) -> None:
        super().__init__(f"{ename}: {evalue}")
        self.ename = ename
        self.evalue = evalue
        self.ours = ours


def run(request: RunRequest, progress: Progress) -> RunResult:
    """Run a notebook and return how it went. Blocks; to be called from the main thread.

    Raises BackIntelError for what is wrong before a session exists (notebook, settings, output
    directory, image, engine); nothing is left in the output directory then.
    """
    return asyncio.run(_Run(request, progress).execute())


class _Run:
    """One run, from reading the notebook to the last file."""

    def __init__(self, request: RunRequest, progress: Progress) -> None:
        self.request = request
        self.progress = progress
        self._stop = asyncio.Event()
        self._stop_status = EXIT_INTERRUPTED
        self._sent = 0

    async def execute(self) -> RunResult:
        """Read, check, run, save."""
        began = time.monotonic()
        data = notebooks.read_bytes(self.request.notebook)
        self.digest = hashlib.sha256(data).hexdigest()
        stem = self.request.notebook.name.removesuffix(".ipynb")
        self.notebook = notebooks.parse(data, self.request.notebook.name)
        self.required = notebooks.requirements(self.notebook.metadata)
        requires.check_schemas(self.required)
        notebooks.inject(self.notebook, self.request.parameters)
        self.code = notebooks.code_cells(self.notebook)
        # The provisioner does both again; here a mistake is told before anything exists.
        settings = resolve_settings(
            command_line=self.request.settings,
            environ=os.environ,
            kernelspec={},
            default_profile=DEFAULT_PROFILE,
        )
        load_image(state_dirs())
        isolation = get_engine(settings.engine).isolation
        self.progress.note(f"engine {settings.engine} ({isolation})")
        out = outdir.claim(self.request.out or outdir.default_path(stem, time.time()))
        self.result = RunResult(out.path, cells_total=len(self.code))
        self.result.engine = {"requested": settings.engine_requested, "used": settings.engine}
        try:
            with self._signals():
                await self._session(out, f"{stem}.ipynb")
        finally:
            out.release()
        self.result.seconds = time.monotonic() - began
        return self.result

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn SIGINT and SIGTERM into an orderly end, however often they come."""
        loop = asyncio.get_running_loop()

        def stop(status: int) -> None:
            if self._stop.is_set():
                self.progress.note("already ending; the clean-up is not skipped")
                return
            self._stop_status = status
            self._stop.set()
            self.progress.note("ending the sandbox and saving the notebook")

        loop.add_signal_handler(signal.SIGINT, stop, EXIT_INTERRUPTED)
        loop.add_signal_handler(signal.SIGTERM, stop, EXIT_TERMINATED)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            loop.remove_signal_handler(signal.SIGTERM)

    # -- the session ---------------------------------------------------------------------------

    async def _session(self, out: outdir.OutDir, name: str) -> None:
        from kernel_provisioner.provisioner import SandboxKernelManager

        # jupyter_client and nbclient log what this run reports itself.
        log = logging.getLogger("backintel.run")
        log.addHandler(logging.NullHandler())
        log.propagate = False
        self.manager: Any = SandboxKernelManager(
            command_line=dict(self.request.settings),
            default_profile=DEFAULT_PROFILE,
            on_phase=self._phase,
            log=log,
        )
        incomplete: _Incomplete | None = None
        failure: BackIntelError | None = None
        try:
            await self._until_stopped(self._drive(log))
            if self.result.complete:
                await self._until_stopped(self._publish(out))
        except _Stopped:
            self.result.exit_status = self._stop_status
            text = "the run was ended by a signal; the notebook holds the outputs until then."
            self.result.error = {"code": "stopped", "message": text, "remedy": ""}
        except _Incomplete as error:
            incomplete = error
        except BackIntelError as error:
            failure = error
        finally:
            await self._shut_down()
            shutil.rmtree(out.path / _STAGED, ignore_errors=True)
        receipt = self._receipt()
        if failure is not None:
            if receipt is None and self.result.session is None:
                raise failure
            self.result.exit_status = failure.exit_status
            self.result.error = failure.as_dict()
        elif incomplete is not None:
            self._explain(incomplete, receipt)
        elif not self.code and not self._stop.is_set():
            self.result.exit_status = EXIT_NOTEBOOK_FAILED
            text = "the notebook has no code cells, so nothing ran and nothing was published."
            self.result.error = {"code": "no_code_cells", "message": text, "remedy": ""}
        self._save(out, name, receipt)

    def _phase(self, name: str, seconds: float) -> None:
        self.result.phases_s[name] = round(seconds, 4)
        self.progress.phase(name, seconds)

    async def _until_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Await ``work``; cancel it and raise _Stopped once the owner asks for the end."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if self._stop.is_set():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise _Stopped
        await task

    async def _drive(self, log: logging.Logger) -> None:
        from nbclient import NotebookClient

        await self.manager.start_kernel()
        provisioner = self.manager.provisioner
        self.result.session = provisioner.session_id
        client = NotebookClient(
            self.notebook, km=self.manager, timeout=None, allow_errors=False, log=log
        )
        try:
            # The watchdog ends the session at its run deadline; this is for a hanging supervisor.
            async with asyncio.timeout(provisioner.settings.profile.run_deadline_s + _BACKSTOP_S):
                await client.async_start_new_kernel_client()
                channels: Any = client.kc
                try:
                    await self._language_info(client)
                    await self._cells(client)
                finally:
                    channels.stop_channels()
        except TimeoutError:
            raise _Incomplete(
                Reason.GUEST_LOST, "it outlived its run deadline", ours=True
            ) from None
        except RuntimeError as error:
            # nbclient's word for a kernel that died outside a cell.
            await self._news_of_end()
            raise _Incomplete(Reason.GUEST_LOST, str(error)[:200], ours=True) from None

    async def _language_info(self, client: Any) -> None:
        message = await client.async_wait_for_reply(client.kc.kernel_info())
        content = message["content"] if message else {}
        if isinstance(content.get("language_info"), dict):
            self.notebook.metadata["language_info"] = content["language_info"]

    async def _cells(self, client: Any) -> None:
        total = len(self.code)
        for number, index in enumerate(self.code, start=1):
            cell = self.notebook.cells[index]
            if notebooks.has_tag(cell, notebooks.SKIP_TAG):
                self.progress.cell_skipped(number, total, cell.source)
                self.result.cells_run += 1
                continue
            self.progress.cell_started(number, total, cell.source)
            began = time.monotonic()
            state = "failed"
            try:
                state = await self._cell(client, cell, index)
            except _Incomplete:
                self.result.failed_cell = number
                raise
            except asyncio.CancelledError:
                state = "stopped"
                raise
            finally:
                self.progress.cell_ended(number, total, time.monotonic() - began, state)
            self.result.cells_run += 1
        self.result.complete = total > 0

    async def _cell(self, client: Any, cell: Any, index: int) -> str:
        """Run one cell; return its state. Raises _Incomplete if the run cannot go on."""
        from nbclient.exceptions import CellExecutionError, DeadKernelError

        failure: _Incomplete | None = None
        self._sent += 1
        try:
            await client.async_execute_cell(cell, index)
        except CellExecutionError as error:
            failure = _Incomplete(error.ename, error.evalue)
        except DeadKernelError:
            # nbclient says so of its own cancellation, too.
            if self._stop.is_set():
                raise asyncio.CancelledError from None
            failure = _Incomplete(Reason.GUEST_LOST, "the kernel died", ours=True)
        errors = [output.ename for output in cell.outputs if output.output_type == "error"]
        if failure is not None or (errors and errors[-1] in set(Reason)):
            # The sandbox's own errors reach the cell before the provisioner hears of the end.
            if failure is None or failure.ename in set(Reason):
                await self._news_of_end()
            if failure is None and await self._end() is not None:
                failure = _Incomplete(errors[-1], "")
        if failure is not None:
            raise failure
        return "raised" if errors else "done"

    async def _end(self) -> dict[str, Any] | None:
        """Return the supervisor's word on an end that nobody asked for."""
        if self.manager.provisioner is None or await self.manager.provisioner.poll() is None:
            return None
        ended: dict[str, Any] | None = self.manager.provisioner.ended
        return ended if ended and ended.get("reason") != Reason.SHUTDOWN else None

    async def _news_of_end(self) -> None:
        """Give the supervisor's word on an end a moment to arrive."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_NEWS_S):
                while await self._end() is None:
                    await asyncio.sleep(0.02)
        ended = await self._end()
        if ended is not None:
            self.result.ended = {
                "reason": ended.get("reason"),
                "class": ended.get("class"),
                "message": ended.get("message"),
            }

    # -- afterwards ----------------------------------------------------------------------------

    async def _publish(self, out: outdir.OutDir) -> None:
        """Export beside the place, check what the notebook requires, then move into place."""
        staged = out.path / _STAGED / "artifacts"
        staged.parent.mkdir(mode=0o700)
        try:
            self.result.artifacts = await self.manager.provisioner.export(staged)
        except TimeoutError:
            raise ExportRefused("the artifacts did not arrive in time.") from None
        await requires.check_artifacts(staged, self.required)
        staged.rename(out.path / "artifacts")
        self.result.published = True

    async def _shut_down(self) -> None:
        """End the session and free all of it; nothing here is skipped by a signal."""
        with contextlib.suppress(TimeoutError, RuntimeError):
            async with asyncio.timeout(_SHUTDOWN_S):
                if self.manager.has_kernel:
                    await self.manager.shutdown_kernel(now=True)
        if self.manager.provisioner is not None:
            # Idempotent: needed where the kernel was already dead, so that nobody shut it down.
            await self.manager.provisioner.cleanup()
        await self.manager.cleanup_resources()

    def _receipt(self) -> dict[str, Any] | None:
        provisioner = self.manager.provisioner
        if provisioner is None or provisioner.receipt is None:
            return None
        self.result.session = provisioner.session_id
        return dict(provisioner.receipt)

    def _explain(self, failure: _Incomplete, receipt: dict[str, Any] | None) -> None:
        profile = self.manager.provisioner.settings.profile
        counts = (receipt or {}).get("cells", {})
        verdict = judge(
            failure.ename,
            failure.evalue,
            ours=failure.ours,
            ended=self.result.ended,
            over_cells=profile.cells is not None and self._sent > profile.cells,
            watchdog_interrupts=int(counts.get("interrupted", 0)),
        )
        self.result.exit_status = verdict.exit_status
        self.result.error = {"code": verdict.code, "message": verdict.text[:2000], "remedy": ""}
        if self.result.failed_cell is not None:
            # For the case that the relay could not.
            cell = self.notebook.cells[self.code[self.result.failed_cell - 1]]
            notebooks.show_error(cell, verdict.code, verdict.text)

    def _save(self, out: outdir.OutDir, name: str, receipt: dict[str, Any] | None) -> None:
        """Write notebook and receipt; the receipt says what became of the run."""
        result = self.result
        executed = notebooks.serialize(self.notebook)
        result.notebook = out.write(name, executed)
        if receipt is None:
            return
        if not result.published:
            receipt["artifacts"] = []
        receipt["run"] = {
            "notebook": name,
            "notebook_sha256": self.digest,
            "executed_sha256": hashlib.sha256(executed).hexdigest(),
            "parameters": sorted(self.request.parameters),
            "requires": [item.artifact for item in self.required],
            "cells": {
                "total": result.cells_total,
                "run": result.cells_run,
                "failed": result.failed_cell,
            },
            "complete": result.complete,
            "published": result.published,
            "exit_status": result.exit_status,
            "error": result.error,
        }
        result.receipt = out.write("receipt.json", (json.dumps(receipt, indent=1) + "\n").encode())
