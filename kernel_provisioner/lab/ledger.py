"""What the extension knows of the sandboxes that its server started: the last 256 kernels.

Filled by the provisioner as an observer and, while a session runs, by the events that its
supervisor pushes. So it can tell why a sandbox ended when kernel and supervisor are gone. Only
kernels of the server's own kernel manager get in. Everything happens on the server's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jupyter_events import EventLogger

from kernel_provisioner.engines.registry import get_engine
from kernel_provisioner.errors import NotFound, NotRunning, WireError
from kernel_provisioner.lab import metrics
from kernel_provisioner.lab.describe import ended_as_told, from_ledger
from kernel_provisioner.paths import StateDirs, state_dirs
from kernel_provisioner.provisioner import SandboxProvisioner
from kernel_provisioner.session.ask import events
from kernel_provisioner.session.receipt import stated_endpoints

SCHEMA = "https://backintel-sandbox.invalid/events/session"
MAX_KERNELS = 256
MAX_SESSIONS = 64
"""Sessions of one kernel whose receipts can be asked for: that many restarts."""
_MAX_LABEL = 1024
_MAX_RECEIPT = 16 * 1024 * 1024


@dataclass(slots=True)
class Entry:
    """One kernel: its latest session, and the ids of those before it."""

    kernel_id: str
    session: str
    previous: str | None
    engine: str
    isolation: str
    limits: dict[str, Any]
    sources: list[dict[str, str]]
    endpoints: list[dict[str, Any]]
    notebook: str | None
    state: str = "starting"
    """starting, running or ended"""
    phases: dict[str, float] = field(default_factory=dict)
    ended: dict[str, Any] | None = None
    sessions: list[str] = field(default_factory=list)
    unsaved: dict[str, Any] | None = None
    """A receipt that could not be stored on the host: all that there is of it."""


class Ledger:
    """Knows the kernels of one server."""

    def __init__(self, kernel_manager: Any, event_logger: EventLogger, root: Path | None) -> None:
        self._kernel_manager = kernel_manager
        self._events = event_logger
        self._root = root
        self._dirs: StateDirs = state_dirs()
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def get(self, kernel_id: str) -> Entry | None:
        """Return what is known of a kernel."""
        return self._entries.get(kernel_id)

    def provisioner(self, kernel_id: str) -> SandboxProvisioner | None:
        """Return the provisioner of a kernel that the manager has now, if it is one of ours."""
        if kernel_id not in self._kernel_manager:
            return None
        found = getattr(self._kernel_manager.get_kernel(kernel_id), "provisioner", None)
        return found if isinstance(found, SandboxProvisioner) else None

    def running(self) -> list[tuple[str, str]]:
        """Return engine and state (starting, idle, busy) of each session that is not over."""
        found = []
        for entry in self._entries.values():
            if entry.state == "ended":
                continue
            state = entry.state
            if state == "running":
                known = entry.kernel_id in self._kernel_manager
                kernel = self._kernel_manager.get_kernel(entry.kernel_id) if known else None
                state = "busy" if getattr(kernel, "execution_state", "") == "busy" else "idle"
            found.append((entry.engine, state))
        return found

    # -- from the provisioner ------------------------------------------------------------------

    def observe(
        self, provisioner: SandboxProvisioner, event: str, facts: Mapping[str, Any]
    ) -> None:
        """See observers.Observer."""
        kernel = provisioner.parent
        if getattr(kernel, "parent", None) is not self._kernel_manager:
            return
        entry = self._entry(provisioner)
        match event:
            case "phase":
                entry.phases[facts["phase"]] = facts["seconds"]
                self._emit(entry, "phase", **facts)
            case "ready":
                entry.state = "running"
                metrics.started(entry.engine, facts["seconds"])
                self._emit(entry, "ready", **facts)
                if provisioner.desk is not None:
                    self._listen(entry, provisioner, provisioner.desk)
            case "failed":
                self._failed(entry, facts)
            case "gone":
                self._gone(entry, provisioner)

    def _entry(self, provisioner: SandboxProvisioner) -> Entry:
        kernel_id = str(provisioner.kernel_id)
        known = self._entries.get(kernel_id)
        session = str(provisioner.session_id)
        if known is not None and known.session == session:
            return known
        settings = provisioner.settings
        assert settings is not None  # resolved before anything is told
        entry = Entry(
            kernel_id=kernel_id,
            session=session,
            previous=known.session if known else None,
            engine=settings.engine,
            isolation=get_engine(settings.engine).isolation,
            limits=asdict(settings.profile),
            sources=[
                {"name": source.name, "path": str(source.path), "kind": source.kind}
                for source in settings.sources
            ],
            endpoints=stated_endpoints(settings.endpoints),
            notebook=self._label(provisioner.notebook),
            sessions=[*(known.sessions if known else []), session][-MAX_SESSIONS:],
        )
        self._entries[kernel_id] = entry
        self._entries.move_to_end(kernel_id)
        for old in list(self._entries):
            if len(self._entries) <= MAX_KERNELS:
                break
            if self._entries[old].state == "ended":
                del self._entries[old]
        return entry

    def _label(self, notebook: str | None) -> str | None:
        """Return a notebook's path as pages know it: relative to the server's root."""
        if not notebook or self._root is None:
            return None
        with contextlib.suppress(ValueError, OSError):
            path = Path(notebook)
            relative = (path.parent.resolve() / path.name).relative_to(self._root)
            return relative.as_posix()[:_MAX_LABEL]
        return None

    def _failed(self, entry: Entry, error: Mapping[str, Any]) -> None:
        told = {name: error[name] for name in ("code", "message", "remedy")}
        kind = "limit" if error["code"] == "run_deadline" else "infrastructure"
        entry.state = "ended"
        entry.ended = {"reason": "StartFailed", "class": kind, **told}
        metrics.ended("StartFailed")
        self._emit(entry, "failed", **told)

    def _gone(self, entry: Entry, provisioner: SandboxProvisioner) -> None:
        receipt = provisioner.receipt
        if receipt is not None and receipt.get("session") == entry.session:
            peak = receipt.get("peak_memory_bytes")
            if peak is not None:
                metrics.peaked(entry.engine, peak)
            if not self._stored(entry.session).exists():
                entry.unsaved = receipt
        if provisioner.ended is not None:
            self._ended(entry, provisioner.ended)

    # -- from the supervisor -------------------------------------------------------------------

    def _listen(self, entry: Entry, provisioner: SandboxProvisioner, desk: Path) -> None:
        task = asyncio.get_running_loop().create_task(self._hear(entry, provisioner, desk))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _hear(self, entry: Entry, provisioner: SandboxProvisioner, desk: Path) -> None:
        with contextlib.suppress(OSError, WireError):
            async for message in events(desk):
                self._heard(entry, message)
        # A supervisor that was killed said nothing; the provisioner's own socket shows that.
        if entry.ended is None and provisioner.session_id == entry.session:
            await provisioner.poll()
            if provisioner.ended is not None and provisioner.session_id == entry.session:
                self._ended(entry, provisioner.ended)

    def _heard(self, entry: Entry, message: Mapping[str, Any]) -> None:
        match message.get("op"):
            case "deadline":
                metrics.late("cell")
                self._emit(
                    entry, "deadline", seconds=message["seconds"], msg_id=message["msg_id"][:256]
                )
            case "memory_warning":
                self._emit(
                    entry,
                    "memory",
                    used_bytes=message["held_bytes"],
                    limit_bytes=message["limit_bytes"],
                )
            case "exported":
                figures = {name: message[name] for name in ("count", "bytes") if name in message}
                self._emit(entry, "exported", **figures)
            case "ended":
                self._ended(entry, message)

    def _ended(self, entry: Entry, message: Mapping[str, Any]) -> None:
        """Tell the end once; it is heard of from two sides."""
        if entry.ended is not None:
            return
        entry.state = "ended"
        entry.ended = ended_as_told(message)
        reason = entry.ended["reason"]
        metrics.ended(reason)
        if reason == "RunDeadlineExceeded":
            metrics.late("run")
        told = {name: entry.ended[name] for name in ("reason", "class", "message", "remedy")}
        self._emit(entry, "ended", **told)

    def _emit(self, entry: Entry, event: str, **facts: Any) -> None:
        self._events.emit(
            schema_id=SCHEMA,
            data={
                "event": event,
                "kernel_id": entry.kernel_id,
                "session": entry.session,
                "notebook": entry.notebook,
                **facts,
            },
        )

    # -- for the handlers ----------------------------------------------------------------------

    def status(self, entry: Entry) -> dict[str, Any]:
        """Return the status of a kernel whose supervisor does not answer any more, or not yet."""
        return from_ledger(entry)

    async def receipt(self, entry: Entry, session: str) -> dict[str, Any]:
        """Return a stored receipt. Raises NotFound, NotRunning if there is none yet."""
        if session not in entry.sessions:
            raise NotFound(f"kernel {entry.kernel_id} had no session {session}.")
        if entry.unsaved is not None and entry.unsaved.get("session") == session:
            return entry.unsaved
        try:
            text = await asyncio.to_thread(_read, self._stored(session))
            found: dict[str, Any] = json.loads(text)
        except FileNotFoundError:
            raise NotRunning(
                "the session has no receipt yet: it is being started or torn down.",
                remedy="ask again.",
            ) from None
        except (OSError, ValueError):
            raise NotFound("the session's receipt cannot be read.") from None
        return found

    def _stored(self, session: str) -> Path:
        return self._dirs.receipts / f"{session}.json"


def _read(path: Path) -> str:
    with path.open() as file:
        return file.read(_MAX_RECEIPT)
