"""The supervisor: the host process that owns one session from start to teardown (spec A1, G, I).

It owns the run clock, the guest, the relay, the watchdog, the receipt and the clean-up. It trusts
the provisioner at the other end of its control socket and nothing that comes from the guest. If
the provisioner's process goes away, the session ends; if this process is killed, the engine ends
the guest and the write-ahead record tells a later sweep what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kernel_provisioner.engines.base import CHANNELS, Guest, GuestExit, Sample
from kernel_provisioner.errors import (
    ENDS,
    BackIntelError,
    DeadlineReached,
    ImageInvalid,
    Reason,
    StartFailed,
    WireError,
)
from kernel_provisioner.images.receipt import Image, check_receipt
from kernel_provisioner.processes import open_pidfd
from kernel_provisioner.records import remove_socket_dir, sweep
from kernel_provisioner.session.control import Control
from kernel_provisioner.session.ending import Ending, describe_status
from kernel_provisioner.session.opening import Opening
from kernel_provisioner.session.receipt import Receipt, ended, stated_endpoints
from kernel_provisioner.session.telemetry import Telemetry
from kernel_provisioner.wire import FrameReader

if TYPE_CHECKING:
    from kernel_provisioner.session.bridge import Bridge
    from kernel_provisioner.session.desk import Desk
    from kernel_provisioner.session.monitor import SessionMonitor
    from kernel_provisioner.session.relay import Relay

BOOT_TIMEOUT_S = 60.0
"""Most that one start phase may take; the run deadline may leave less."""
NOTICE_TIMEOUT_S = 2.0
"""How long undelivered error messages may hold up an end."""
EXPORT_TIMEOUT_S = 60.0
DESTROY_TIMEOUT_S = 5.0
LINGER_S = 10.0
"""After an end that nobody asked for: how long clients get answers and exports are possible."""
OWNER_EXIT_S = 1.0
"""How long a killed run may take from the end of its connection to the end of its process."""


class Supervisor:
    """One session. ``run`` returns when nothing of it is left."""

    def __init__(self, control: Control, opening: Opening) -> None:
        start = opening.start
        self._control = control
        self._start_request = start
        self._opening = opening
        self._guest: Guest | None = None
        self._relay: Relay | None = None
        self._telemetry: Telemetry | None = None
        self._receipt = Receipt(start.session, start.kernel_id)
        self._journal = opening.journal
        self._ending: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self._exports: asyncio.Queue[Path | None] = asyncio.Queue()
        self._owner_gone = asyncio.Event()
        self._monitor: SessionMonitor | None = None
        self._desk: Desk | None = None
        self._bridge: Bridge | None = None
        self._shutdown_asked = False
        self._tasks: set[asyncio.Task[None]] = set()

    # -- start ---------------------------------------------------------------------------------

    def _budget(self) -> float:
        return min(BOOT_TIMEOUT_S, max(self._opening.remaining, 0.001))

    async def _phase(self, name: str, elapsed: float | None = None) -> None:
        if elapsed is None:
            elapsed = time.monotonic() - self._start_request.started_at
        self._receipt.timing(name, elapsed)
        await self._control.send("phase", name=name, seconds=round(elapsed, 4))

    async def _tell_opening(self) -> None:
        phases = self._opening.phases
        while phases:
            name = next(iter(phases))
            await self._phase(name, phases.pop(name))

    async def _start(self) -> None:
        """Bring the guest up; afterwards clients are bridged to it. Raises BackIntelError."""
        opening = self._opening
        # Before as well: a start that waits for the copy of a database says how far it is.
        await self._tell_opening()
        try:
            opening.check()
            opening.launch(await self._journal.stage_sources(self._budget))
        finally:
            await self._tell_opening()
        assert opening.facts is not None and opening.image is not None  # noqa: PT018 - it passed
        image = opening.image
        self._describe(opening.facts, image)
        self._guest = await opening.claim()
        self._journal.note(self._guest.leftovers)
        await self._open_relay()
        # The tree is compared with its receipt while the guest boots (spec C4): what boots
        # meanwhile is the interpreter in its sandbox, no user code and no client's message.
        check = asyncio.create_task(asyncio.to_thread(check_receipt, image))
        try:
            attested = await self._guest.wait_attested(self._budget())
            self._receipt.update(attested=dict(attested), limits=dict(self._guest.limits))
            self._journal.note(self._guest.leftovers)
            await self._phase("attested")
            await self._open_endpoints()
            await self._guest.release(self._connection(), self._budget())
            await self._phase("kernel")
            await asyncio.wait_for(check, self._budget())
        finally:
            check.cancel()
        await self._phase("image")
        self._telemetry = Telemetry(
            self._guest, self._start_request.profile.ram_bytes, self._warn_of_memory
        )
        assert self._relay is not None
        self._relay.open()
        await self._phase("ready")

    async def _open_relay(self) -> None:
        """Bind the clients' sockets; they are bridged once the guest is ready."""
        # Imported while the guest boots beside us: 30 ms that a start does not wait for.
        from kernel_provisioner.session.monitor import SessionMonitor
        from kernel_provisioner.session.relay import Relay, RelayBounds

        start = self._start_request
        assert self._guest is not None
        self._monitor = SessionMonitor(
            start.profile,
            start.started_at,
            end=self._end,
            interrupt=self._interrupt,
            late=self._tell_late,
        )
        self._relay = Relay(
            client_paths={
                name: start.socket_dir / f"h-{number}" for number, name in enumerate(CHANNELS, 1)
            },
            guest_paths=self._guest.channels,
            key=start.key.encode(),
            signature_scheme=start.signature_scheme,
            monitor=self._monitor,
            bounds=RelayBounds(),
        )
        self._monitor.attach(self._relay)
        if start.replaced is not None:
            self._monitor.tell_first_cell(
                f"this is a fresh sandbox, for the one before ended ({start.replaced.value}); "
                "its variables and files are gone."
            )
        await self._relay.start()
        self._open_desk()

    async def _open_endpoints(self) -> None:
        """Bridge the guest's listeners to the owner's endpoints, if there are any."""
        endpoints = self._start_request.endpoints
        if endpoints:
            from kernel_provisioner.session.bridge import Bridge

            assert self._guest is not None and self._monitor is not None  # noqa: PT018 - opened
            self._bridge = Bridge(endpoints, self._monitor.tell)
            await self._bridge.start(await self._guest.open_endpoints(self._budget()))
            await self._phase("endpoints")

    def _open_desk(self) -> None:
        from kernel_provisioner.session.desk import Desk
        from kernel_provisioner.session.status import describe

        start = self._start_request
        self._desk = Desk(
            start,
            self._receipt,
            status=lambda: describe(start, self._receipt.data, self._telemetry, self._monitor),
            guest=lambda: self._guest if self._telemetry else None,
            note_export=self._journal.note_export,
        )
        self._desk.open()
        self._control.overhear = self._desk.tell

    def _connection(self) -> dict[str, object]:
        start = self._start_request
        ports = {f"{name}_port": number for number, name in enumerate(CHANNELS, 1)}
        return {"key": start.key, "signature_scheme": start.signature_scheme, **ports}

    def _describe(self, facts: Any, image: Image) -> None:
        start = self._start_request
        self._receipt.update(
            previous=start.previous,
            backend=start.engine,
            backend_requested=start.engine_requested,
            isolation=self._opening.engine.isolation,
            engine={"name": facts.name, "version": facts.version, "digests": dict(facts.digests)},
            image={"id": image.id, "source": image.source, "python": image.python},
            profile=asdict(start.profile),
            sources=[
                {"name": s["name"], "kind": s["kind"], "path": s["path"]} for s in start.sources
            ],
            endpoints=stated_endpoints(start.endpoints),
        )

    # -- events --------------------------------------------------------------------------------

    def _end(self, reason: Reason, *, status: int | None = None, **figures: object) -> None:
        """Decide the end; the first reason wins."""
        if not self._ending.done():
            message = ENDS[reason].text.format(**figures)
            self._ending.set_result(Ending(reason, message, status))

    def _tell_late(self, msg_id: str) -> None:
        seconds = self._start_request.profile.cell_deadline_s
        self._spawn(self._send_late({"op": "deadline", "msg_id": msg_id, "seconds": seconds}))

    async def _send_late(self, message: dict[str, object]) -> None:
        await self._control.send_message(message)

    def _warn_of_memory(self, sample: Sample) -> None:
        """Tell the person, the owner and the receipt that the guest is near its limit, once."""
        if self._ending.done():
            return
        limit = self._start_request.profile.ram_bytes
        facts = {"held_bytes": sample.held_bytes, "limit_bytes": limit}
        self._receipt.update(memory_warning={**facts, "at": time.time()})
        if self._monitor is not None:
            self._monitor.tell(
                f"memory is at {sample.held_bytes / 2**20:.0f} of {limit / 2**20:.0f} MiB; at the "
                f"limit the kernel is killed and its variables are gone. This is said once."
            )
        self._spawn(self._send_warning(facts))

    async def _send_warning(self, facts: dict[str, int]) -> None:
        await self._control.send("memory_warning", **facts)

    def _interrupt(self, msg_id: str) -> None:
        if self._guest is not None:
            self._guest.signal(signal.SIGINT, msg_id)

    async def _read_control(self) -> None:
        while True:
            try:
                message = await self._control.receive()
            except WireError:
                message = None
            if message is None:
                self._owner_left()
                return
            match message.get("op"):
                case "signal":
                    self._client_signal(message.get("signum"))
                case "shutdown":
                    self._shutdown_asked = True
                case "kill":
                    self._end(Reason.SHUTDOWN)
                case "close":
                    self._end(Reason.SHUTDOWN)
                    self._exports.put_nowait(None)
                case "export":
                    self._end(Reason.SHUTDOWN)
                    self._exports.put_nowait(Path(str(message.get("destination"))))

    def _owner_left(self) -> None:
        self._end(Reason.CLIENT_GONE)
        self._owner_gone.set()
        self._exports.put_nowait(None)

    def _client_signal(self, signum: object) -> None:
        if self._guest is None or not isinstance(signum, int):
            return
        if signum in (signal.SIGKILL, signal.SIGTERM):
            self._end(Reason.SHUTDOWN)
        elif signum > 0:
            self._guest.signal(signum)

    async def _watch_guest(self) -> None:
        assert self._guest is not None
        guest_exit = await self._guest.wait()
        self._end_of_guest(guest_exit)

    def _end_of_guest(self, guest_exit: GuestExit) -> None:
        """Find the reason; out of memory only with the kernel's own count of kills (spec G4).

        And only if that rose just now: it may have been a child's, whose end the kernel survived.
        """
        sample = self._telemetry.take() if self._telemetry else None
        status = guest_exit.status
        killed = status in (-signal.SIGKILL, 128 + signal.SIGKILL)
        if killed and sample is not None and self._telemetry and self._telemetry.oom_lately:
            self._end(
                Reason.OUT_OF_MEMORY,
                status=status,
                limit_mib=self._start_request.profile.ram_bytes / 2**20,
                peak_mib=sample.peak_memory_bytes / 2**20,
            )
        elif self._opening.remaining <= 0:
            # The engine's own backstop fired before this stopped process could (spec G3).
            self._end(
                Reason.RUN_DEADLINE,
                status=status,
                seconds=self._start_request.profile.run_deadline_s,
            )
        elif self._shutdown_asked or (self._monitor and self._monitor.shutdown_expected):
            self._end(Reason.SHUTDOWN, status=status)
        elif status is None:
            why = f" ({guest_exit.detail})" if guest_exit.detail else ""
            self._end(Reason.GUEST_LOST, how=f"its process is gone and left no status{why}")
        else:
            self._end(Reason.KERNEL_CRASHED, status=status, how=describe_status(status))

    # -- end -----------------------------------------------------------------------------------

    async def _conclude(self, ending: Ending) -> None:
        """Stop the guest, tell every waiting cell why, answer exports, then clean up."""
        if self._telemetry:
            self._telemetry.take()
        if self._guest is not None:
            self._guest.kill()
        end = ENDS[ending.reason]
        if self._relay is not None:
            await self._unless_owner_gone(
                self._relay.fail_pending(
                    ending.reason.value, ending.message, timeout=NOTICE_TIMEOUT_S
                )
            )
        await self._close_bridge()
        more: dict[str, Any] = {"at": ending.at}
        if ending.status is not None:
            more["status"] = ending.status
        self._receipt.update(ended=ended(ending.reason.value, end.kind, ending.message, **more))
        await self._control.send_message(
            {
                "op": "ended",
                "reason": ending.reason.value,
                "class": end.kind,
                "message": ending.message,
                "exit_status": end.exit_status,
                "status": ending.status,
            }
        )
        await self._linger()

    async def _close_bridge(self) -> None:
        if self._bridge is not None:
            await self._bridge.close()
            uses = self._bridge.uses()
            self._receipt.update(
                endpoints=[{**e, **uses[e["name"]]} for e in self._receipt.data["endpoints"]]
            )

    async def _unless_owner_gone(self, notices: Coroutine[Any, Any, object]) -> None:
        """Deliver notices for as long as the owner is there: without it nobody reads them."""
        delivery = asyncio.ensure_future(notices)
        gone = asyncio.ensure_future(self._owner_gone.wait())
        await asyncio.wait({delivery, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if delivery.done():
            delivery.result()
        else:
            delivery.cancel()
            await asyncio.wait({delivery})

    async def _linger(self) -> None:
        """Serve exports until the owner closes, is gone, or has had time enough."""
        while True:
            try:
                destination = await asyncio.wait_for(self._exports.get(), LINGER_S)
            except TimeoutError:
                return
            if destination is None:
                return
            await self._export(destination)

    async def _export(self, destination: Path) -> None:
        from kernel_provisioner.artifacts.publish import publish
        from kernel_provisioner.artifacts.tarstream import ExportLimits

        try:
            if self._guest is None:
                raise StartFailed("there was no guest to export from.")
            # A publication that is killed leaves its staging beside the destination.
            with contextlib.suppress(OSError):
                self._journal.note_export(destination.parent)
            limits = ExportLimits(max_bytes=self._start_request.profile.artifacts_bytes)
            deadline = time.monotonic() + EXPORT_TIMEOUT_S
            with self._guest.artifacts() as stream:
                artifacts = await asyncio.to_thread(
                    publish, stream, destination, limits, deadline=deadline
                )
        except BackIntelError as error:
            await self._control.send("export_failed", error=error.as_dict())
            return
        self._receipt.update(artifacts=[artifact.as_dict() for artifact in artifacts])
        for artifact in artifacts:
            await self._control.send("artifact", artifact=artifact.as_dict())
        await self._control.send("exported", count=len(artifacts))

    async def _teardown(self) -> None:
        """Remove all; what cannot be removed stays recorded for a sweep and in the receipt."""
        start = self._start_request
        failures: list[str] = []
        if self._desk is not None:
            failures += await self._desk.close()
        await self._close_bridge()
        if self._relay is not None:
            await self._relay.close()
            self._receipt.update(relay=dict(self._relay.stats))
        if self._telemetry is not None and self._telemetry.latest is not None:
            self._receipt.update(
                peak_memory_bytes=self._telemetry.peak_bytes,
                peak_memory_method=self._telemetry.latest.peak_memory_method,
                cpu_seconds=self._telemetry.latest.cpu_seconds,
            )
        if self._monitor is not None:
            self._receipt.update(cells=self._monitor.cell_counts())
        if self._opening.launched is not None:
            self._opening.launched.abandon()
        if self._guest is not None:
            failures += await self._guest.destroy(DESTROY_TIMEOUT_S)
        else:
            failures += await asyncio.to_thread(self._journal.remove_unclaimed)
        failures += self._journal.remove_staging()
        failures += await self._forget_run()
        failures += remove_socket_dir(start.socket_dir)
        self._receipt.update(leftovers=failures)
        unsaved = None
        try:
            self._receipt.write(start.dirs.receipts)
        except OSError as error:
            print(f"backintel: no receipt written ({error.strerror})", file=sys.stderr)
            unsaved = self._receipt.data
        if not failures:
            # After the receipt: killed in between, the record makes a sweep look for one.
            self._journal.close()
        # What could not be stored is at least told.
        if not await self._control.send("gone", unsaved=unsaved):
            await self._control.send("gone", unsaved=None)

    async def _forget_run(self) -> list[str]:
        """Remove what a run left that was killed; one that lives has its directory locked."""
        directory = self._start_request.run_dir
        if directory is None:
            return []
        from kernel_provisioner.outdir import remove_abandoned

        if self._owner_gone.is_set():
            # Its control socket may be closed a moment before its lock is let go.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(OWNER_EXIT_S):
                    while os.getppid() == self._control.owner:
                        await asyncio.sleep(0.005)
        return await asyncio.to_thread(remove_abandoned, directory)

    # -- life ----------------------------------------------------------------------------------

    def _spawn(self, job: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(job)
        self._tasks.add(task)
        task.add_done_callback(self._job_done)
        return task

    def _job_done(self, task: asyncio.Task[None]) -> None:
        """End the session when a job of ours failed: nobody would watch the guest any more."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(Reason.ENGINE_FAILED, how=f"its supervisor failed, {type(error).__name__}")

    async def run(self) -> None:
        """Start, serve, end, clean up."""
        self._watch_owner()
        self._spawn(self._read_control())
        starting = asyncio.create_task(self._start())
        waiting: set[asyncio.Future[Any]] = {starting, self._ending}
        await asyncio.wait(
            waiting,
            timeout=max(self._opening.remaining, 0),
            return_when=asyncio.FIRST_COMPLETED,
        )
        try:
            failure = await self._settle_start(starting)
            if failure is not None:
                await self._fail(failure)
            else:
                await self._serve()
        finally:
            for task in self._tasks:
                task.cancel()
            await self._teardown()

    async def _settle_start(self, starting: asyncio.Task[None]) -> BackIntelError | None:
        """Return why the start failed, or None if it did not."""
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            if self._ending.done():
                return StartFailed(
                    self._ending.result().message, phase="start", remedy="start the kernel again."
                )
            run_deadline = self._start_request.profile.run_deadline_s
            return DeadlineReached(
                f"the run deadline of {run_deadline:g} s passed before the sandbox was ready.",
                phase="start",
                remedy="give the run more time.",
            )
        error = starting.exception()
        if error is None or isinstance(error, BackIntelError):
            return error
        if isinstance(error, TimeoutError):
            return StartFailed("the guest did not answer in time.", phase="boot")
        if isinstance(error, OSError):
            where = "" if error.filename is None else f" ({error.filename})"
            return StartFailed(f"{error.strerror or error}{where}.", phase="start")
        raise error

    async def _fail(self, failure: BackIntelError) -> None:
        if self._guest is not None:
            self._guest.kill()
        # A start that was given up because its owner left is no failure of the engine.
        if self._ending.done():
            reason = self._ending.result().reason
        elif isinstance(failure, DeadlineReached):
            reason = Reason.RUN_DEADLINE
        elif isinstance(failure, ImageInvalid):
            reason = Reason.IMAGE_INVALID
        else:
            reason = Reason.ENGINE_FAILED
        self._receipt.update(
            ended=ended(reason.value, ENDS[reason].kind, str(failure), code=failure.code)
        )
        await self._control.send("failed", error=failure.as_dict())

    async def _serve(self) -> None:
        assert self._telemetry is not None
        self._spawn(self._watch_guest())
        self._spawn(self._telemetry.run())
        assert self._monitor is not None
        self._monitor.arm()
        await self._control.send("ready", timings=self._receipt.data["timings_ms"])
        # Another session's remains are removed off the start-up path.
        self._spawn(self._sweep())
        await self._conclude(await self._ending)

    async def _sweep(self) -> None:
        await asyncio.to_thread(sweep, self._start_request.dirs)

    def _watch_owner(self) -> None:
        """End when the owner's process is gone, even if a fork of it kept the socket open."""
        loop = asyncio.get_running_loop()
        fd = open_pidfd(self._control.owner)
        if fd is not None:
            watched = fd

            def gone() -> None:
                loop.remove_reader(watched)
                self._owner_left()

            loop.add_reader(watched, gone)
        if os.getppid() != self._control.owner:
            # It left before it was watched; its number may be another's by now.
            self._owner_left()
        loop.add_signal_handler(signal.SIGTERM, self._end, Reason.SHUTDOWN)


def serve(
    sock: socket.socket,
    reader: FrameReader,
    messages: list[dict[str, object]],
    opening: Opening,
) -> NoReturn:
    """Serve one opened session over its control socket, whose ``messages`` came already."""

    async def run() -> None:
        await Supervisor(Control(sock, reader, messages), opening).run()
        # A thread may still copy a database for a start that was given up; nobody waits for it.
        sys.stderr.flush()
        os._exit(0)

    asyncio.run(run())
    raise AssertionError  # it ends in _exit
