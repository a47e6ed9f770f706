"""Run a notebook headlessly in a sandbox of its own and bring out what it made (spec J3).

Goes through the same provisioner that JupyterLab uses. Whatever ends a run, be it the guest, the
owner or a defect of this program, notebook and receipt are written before it is told. Artifacts
are published only on completion. The guest is not trusted; the owner's words are.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from typing import Any

from kernel_provisioner import executed, outdir, requires
from kernel_provisioner import notebook as notebooks
from kernel_provisioner.config import resolve_settings
from kernel_provisioner.drive import Driver, Incomplete
from kernel_provisioner.engines.registry import get_engine
from kernel_provisioner.errors import (
    EXIT_DONE,
    EXIT_INFRASTRUCTURE,
    EXIT_INTERRUPTED,
    EXIT_NOTEBOOK_FAILED,
    EXIT_TERMINATED,
    BackIntelError,
    ExportRefused,
    OutputRefused,
)
from kernel_provisioner.images.receipt import load_image
from kernel_provisioner.paths import state_dirs
from kernel_provisioner.plaintext import printable
from kernel_provisioner.runmodel import EXIT_HANGUP, Progress, RunRequest, RunResult, judge

DEFAULT_PROFILE = "analysis"
_SHUTDOWN_S = 30.0
_RECEIPT = "receipt.json"
_STATUSES = {
    signal.SIGINT: EXIT_INTERRUPTED,
    signal.SIGTERM: EXIT_TERMINATED,
    signal.SIGHUP: EXIT_HANGUP,
}


class _Stopped(Exception):
    """The owner asked for the end."""


def run(request: RunRequest, progress: Progress) -> RunResult:
    """Run a notebook and return how it went. Blocks; to be called from the main thread.

    Raises BackIntelError for what is wrong before a session exists (notebook, settings, output
    directory, image, engine); nothing is left in the output directory then. Any other exception is
    a defect of this program; notebook and receipt are written before it is raised.
    """
    return asyncio.run(_Run(request, progress).execute())


class _Run:
    """One run, from reading the notebook to the last file."""

    def __init__(self, request: RunRequest, progress: Progress) -> None:
        self.request = request
        self.progress = progress
        self._stop = asyncio.Event()
        self._stop_status = EXIT_INTERRUPTED

    async def execute(self) -> RunResult:
        """Read, check, run, save."""
        began = time.monotonic()
        # A task of nbclient that nobody awaits any more holds a stranger's text; by default
        # asyncio would print it with all terminal escapes.
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        data = notebooks.read_bytes(self.request.notebook)
        self.digest = hashlib.sha256(data).hexdigest()
        stem = self.request.notebook.name.removesuffix(".ipynb")
        self.notebook = notebooks.parse(data, self.request.notebook.name)
        self.required = notebooks.requirements(self.notebook.metadata)
        requires.check_schemas(self.required)
        notebooks.inject(self.notebook, self.request.parameters)
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
        with self._signals():
            out = outdir.claim(self.request.out or outdir.default_path(stem, time.time()))
            self.result = RunResult(out.path, cells_total=len(notebooks.code_cells(self.notebook)))
            self.result.engine = {"requested": settings.engine_requested, "used": settings.engine}
            try:
                out.require_room_for(f"{stem}.ipynb")
                out.require_room_for(_RECEIPT)
                await self._session(out, f"{stem}.ipynb")
            finally:
                out.release()
        self.result.seconds = time.monotonic() - began
        return self.result

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn SIGINT, SIGTERM and SIGHUP into an orderly end, however often they come."""
        loop = asyncio.get_running_loop()

        def stop(signum: signal.Signals) -> None:
            if self._stop.is_set():
                self.progress.note("already ending; the clean-up is not skipped")
                return
            self._stop_status = _STATUSES[signum]
            self._stop.set()
            self.progress.ending()

        before = {signum: signal.getsignal(signum) for signum in _STATUSES}
        if before[signal.SIGHUP] is signal.SIG_IGN:
            # nohup's word that the run outlives its terminal.
            del before[signal.SIGHUP]
        for signum in before:
            loop.add_signal_handler(signum, stop, signum)
        try:
            yield
        finally:
            for signum, handler in before.items():
                loop.remove_signal_handler(signum)
                # Not the default, which would kill: files are still given back after this.
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)

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
            run_dir=out.path,
            log=log,
        )
        self.driver = Driver(
            self.notebook, self.manager, self.result, self.progress, self._stop.is_set
        )
        incomplete: Incomplete | None = None
        failure: Exception | None = None
        self.progress.starting()
        try:
            await self._until_stopped(self.driver.drive(log))
            if self.result.complete:
                await self._until_stopped(self._publish(out))
        except _Stopped:
            text = "the run was ended by a signal; the notebook holds the outputs until then."
            self._fault(self._stop_status, "stopped", text)
        except Incomplete as error:
            incomplete = error
        except Exception as error:
            failure = error
        finally:
            try:
                await self._shut_down()
            except Exception as error:
                failure = failure or error
            self.progress.over()
            out.discard_staged()
        receipt = self._receipt()
        if failure is not None:
            if receipt is None and self.result.session is None:
                raise failure
            self._explain_failure(failure)
        elif incomplete is not None:
            self._explain(incomplete, receipt)
        elif not self.driver.code and not self._stop.is_set():
            text = "the notebook has no code cells, so nothing ran and nothing was published."
            self._fault(EXIT_NOTEBOOK_FAILED, "no_code_cells", text)
        self._save(out, name, receipt)
        if failure is not None and not isinstance(failure, BackIntelError):
            self.progress.note(f"what there is was saved in {out.path}")
            raise failure

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

    # -- afterwards ----------------------------------------------------------------------------

    async def _publish(self, out: outdir.OutDir) -> None:
        """Export beside the place, check what the notebook requires, then move into place."""
        staged = out.path / outdir.STAGED / "artifacts"
        out.require_claim()
        with _as_refusal("staged"):
            staged.parent.mkdir(mode=0o700)
        try:
            self.result.artifacts = await self.manager.provisioner.export(staged)
        except TimeoutError:
            raise ExportRefused("the artifacts did not arrive in time.") from None
        await requires.check_artifacts(staged, self.required)
        out.require_claim()
        with _as_refusal("moved into place"):
            staged.rename(out.path / "artifacts")
        self.result.published = True

    async def _shut_down(self) -> None:
        """End the session and free all of it; nothing here is skipped by a signal or a failure."""
        async with contextlib.AsyncExitStack() as steps:
            steps.push_async_callback(self.manager.cleanup_resources)
            if self.manager.provisioner is not None:
                # Idempotent: needed where the kernel was already dead, so that nobody shut it down.
                steps.push_async_callback(self.manager.provisioner.cleanup)
            with contextlib.suppress(TimeoutError, RuntimeError):
                async with asyncio.timeout(_SHUTDOWN_S):
                    if self.manager.has_kernel:
                        await self.manager.shutdown_kernel(now=True)

    def _receipt(self) -> dict[str, Any] | None:
        provisioner = self.manager.provisioner
        if provisioner is None or provisioner.receipt is None:
            return None
        self.result.session = provisioner.session_id
        return dict(provisioner.receipt)

    def _fault(self, status: int, code: str, message: str, remedy: str = "") -> None:
        """Note how the run failed; what a terminal must not get stays out of the receipt, too."""
        self.result.exit_status = status
        self.result.error = {
            "code": printable(code, 200),
            "message": printable(message),
            "remedy": printable(remedy),
        }

    def _explain_failure(self, failure: Exception) -> None:
        if isinstance(failure, BackIntelError):
            # With the phase, where there is one.
            message = f"{failure.phase}: {failure.message}" if failure.phase else failure.message
            self._fault(failure.exit_status, failure.code, message, failure.remedy)
        else:
            text = (
                f"this program failed ({type(failure).__name__}); it is not the notebook's fault."
            )
            self._fault(EXIT_INFRASTRUCTURE, "internal", text, "please report it.")

    def _explain(self, failure: Incomplete, receipt: dict[str, Any] | None) -> None:
        profile = self.manager.provisioner.settings.profile
        counts = (receipt or {}).get("cells", {})
        verdict = judge(
            failure.ename,
            failure.evalue,
            ours=failure.ours,
            ended=self.result.ended,
            over_cells=profile.cells is not None and self.driver.sent > profile.cells,
            watchdog_interrupts=int(counts.get("interrupted", 0)),
            output_limited=int(counts.get("output_limited", 0)),
        )
        self._fault(verdict.exit_status, verdict.code, verdict.text)
        if self.result.failed_cell is not None:
            # For the case that the relay could not.
            cell = self.notebook.cells[self.driver.code[self.result.failed_cell - 1]]
            executed.show_error(cell, verdict.code, verdict.text)

    def _save(self, out: outdir.OutDir, name: str, receipt: dict[str, Any] | None) -> None:
        """Write notebook and receipt, each whatever becomes of the other.

        The receipt says what became of the run, the notebook's fate included.
        """
        result = self.result
        content = b""
        try:
            content = executed.serialize(self.notebook)
            result.notebook = out.write(name, content)
        except OutputRefused as error:
            self._not_saved(error)
        except Exception as error:
            # Whatever hostile content still provokes: the receipt is worth more than the reason.
            kind = type(error).__name__
            self._not_saved(OutputRefused(f"no notebook could be made of the outputs ({kind})."))
        if receipt is None:
            self._not_saved(OutputRefused("the session left no receipt."))
            return
        if not result.published:
            receipt["artifacts"] = []
        receipt["run"] = {
            "notebook": name,
            "notebook_sha256": self.digest,
            "executed_sha256": hashlib.sha256(content).hexdigest() if result.notebook else None,
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
        try:
            data = (json.dumps(receipt, indent=1) + "\n").encode()
            result.receipt = out.write(_RECEIPT, data)
        except OutputRefused as error:
            self._not_saved(error)

    def _not_saved(self, error: OutputRefused) -> None:
        """Tell what is missing; it does not hide why the run failed, but makes it no success."""
        if self.result.error is None or self.result.exit_status == EXIT_DONE:
            self._fault(EXIT_INFRASTRUCTURE, "not_saved", error.message, error.remedy)
        else:
            message = f"{self.result.error['message']} Not saved: {error.message}"
            self.result.error |= {"message": printable(message, 4000)}


@contextlib.contextmanager
def _as_refusal(what: str) -> Iterator[None]:
    """Tell trouble with the output directory as what it means: nothing is published."""
    try:
        yield
    except OSError as error:
        raise ExportRefused(f"the artifacts cannot be {what} ({error.strerror}).") from None
