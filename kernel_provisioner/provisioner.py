"""The jupyter_client provisioner (spec A1): thin, in the Jupyter server's process.

It resolves the owner's settings, starts one supervisor process per guest, waits until the guest is
ready, hands out connection info (``transport: ipc``), and maps jupyter_client's verbs onto the
supervisor's control socket. Nothing of a kernel-start request reaches the guest: its ``env``,
``cwd`` and arguments change nothing (spec D5).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from jupyter_client.connect import KernelConnectionInfo
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.provisioner_base import KernelProvisionerBase
from traitlets import Any as AnyTrait
from traitlets import Dict, TraitError, Unicode

from kernel_provisioner import observers, wire
from kernel_provisioner.autorestart import Autorestart
from kernel_provisioner.config import Settings, resolve_settings
from kernel_provisioner.engines.base import CHANNELS
from kernel_provisioner.errors import (
    BackIntelError,
    DeadlineReached,
    ExportRefused,
    Reason,
    StartFailed,
    error_from_dict,
)
from kernel_provisioner.paths import StateDirs, state_dirs
from kernel_provisioner.pending import unlist_start
from kernel_provisioner.routing import check_argv, check_encryption
from kernel_provisioner.supervision import Supervision, in_thread

PHASE_TIMEOUT_S = 70.0
"""Longest silence of a starting supervisor, whose own phases take at most 60 s each; once more for
each database that it copies."""
START_SLACK_S = 5.0
"""Beyond the run deadline: how long the supervisor may take to report that it was reached."""
KILL_TIMEOUT_S = 4.0
"""How long a kill may take, waiting cells told included: jupyter_client waits 5 s afterwards."""
EXPORT_TIMEOUT_S = 90.0

_GIVEN_UP = StartFailed("the start was given up.", phase="start", remedy="start again.")


class SandboxKernelManager(AsyncKernelManager):
    """A kernel manager that carries its own kernelspec and the words of a command line.

    ``command_line`` has the highest precedence of all settings (spec D5); a kernel-start request
    cannot set it.
    """

    command_line: Mapping[str, Any]
    on_phase: Callable[[str, float], None] | None
    run_dir: Path | None
    """The directory that this process claimed for a run."""

    def __init__(
        self,
        *,
        command_line: Mapping[str, Any],
        default_profile: str,
        on_phase: Callable[[str, float], None] | None = None,
        run_dir: Path | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.command_line = command_line
        self.default_profile = default_profile
        self.on_phase = on_phase
        self.run_dir = run_dir
        self._kernel_spec = KernelSpec(
            argv=["python3", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            display_name="BackIntel sandbox",
            language="python",
            interrupt_mode="signal",
            metadata={
                "kernel_provisioner": {
                    "provisioner_name": "backintel-provisioner",
                    "config": {},
                }
            },
        )


class _EndpointTable(Dict):
    """Refuses what is no table without repeating it: it may hold a password."""

    def error(self, *_: object, **__: object) -> NoReturn:
        """Called with what was given. Raises TraitError."""
        raise TraitError("endpoints: a table of name = HOST:PORT is needed.")


class SandboxProvisioner(KernelProvisionerBase):
    """Starts and holds one sandbox session at a time for a kernel manager."""

    engine = Unicode(None, allow_none=True, help="Engine: smolvm or bwrap.").tag(config=True)
    profile = AnyTrait(None, allow_none=True, help="Name of the profile.").tag(config=True)
    sources = Dict(help="Read-only sources: name -> absolute path.").tag(config=True)
    endpoints = _EndpointTable(help="TCP services to reach: name -> HOST:PORT.").tag(config=True)
    cell_deadline = AnyTrait(None, allow_none=True, help="Seconds a cell may run.").tag(config=True)
    run_deadline = AnyTrait(None, allow_none=True, help="Seconds a session may run.").tag(
        config=True
    )
    on_deadline = Unicode(
        None, allow_none=True, help="At a cell deadline: interrupt or cancel."
    ).tag(config=True)
    after_end = Unicode(
        None, allow_none=True, help="After an end: restart (a fresh guest) or stay (dead)."
    ).tag(config=True)
    grace = AnyTrait(None, allow_none=True, help="Seconds between interrupt and cancel.").tag(
        config=True
    )

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.settings: Settings | None = None
        self.session_id: str | None = None
        self.timings: dict[str, float] = {}
        self.receipt: dict[str, Any] | None = None
        self.notebook: str | None = None
        self._dirs: StateDirs = state_dirs()
        self._socket_dir: Path | None = None
        self._supervision: Supervision | None = None
        self._has_process = False
        self._clock_started: float | None = None
        self._fresh_clock = True
        self._automatic = False
        self._replaced: str | None = None
        self._autorestart = Autorestart(self.parent)
        self.phase_timeout_s = PHASE_TIMEOUT_S

    # -- contract of jupyter_client ------------------------------------------------------------

    @property
    def desk(self) -> Path | None:
        """The directory whose desk answers for the running session (``session/ask.py``)."""
        return self._socket_dir if self._has_process and self._process is not None else None

    @property
    def ended(self) -> dict[str, Any] | None:
        """How the guest ended (``reason``, ``class``, ``message``), None while it lives."""
        return self._supervision.ended if self._supervision else None

    @property
    def memory_warning(self) -> dict[str, Any] | None:
        """``held_bytes`` and ``limit_bytes`` once the guest came near its memory limit."""
        return self._supervision.memory_warning if self._supervision else None

    @property
    def _process(self) -> subprocess.Popen[bytes] | None:
        return self._supervision.process if self._supervision else None

    @property
    def has_process(self) -> bool:
        """Whether a guest was launched and not yet waited for."""
        return self._has_process

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Stamp the run clock and resolve the settings. Raises BackIntelError."""
        unlist_start(getattr(self.parent, "parent", None), self.kernel_id)
        now = time.monotonic()
        # An autorestart after a crash does not extend the run deadline (spec A1): only a start or
        # a restart that a person asked for begins a new run.
        self._automatic = not self._fresh_clock and self._autorestart.possible
        if not self._automatic or self._clock_started is None:
            self._clock_started = now
        self._fresh_clock = False
        encryption = kwargs.pop(
            "transport_encryption", getattr(self.parent, "transport_encryption", "")
        )
        try:
            check_argv(self.kernel_spec.display_name, self.kernel_spec.argv)
            check_encryption(encryption)
            self.settings = await in_thread(self._resolve)
        except BaseException as error:
            self._failed_to_start(error)
            raise
        kwargs.pop("extra_arguments", None)
        return await super().pre_launch(cmd=["backintel-guest"], **kwargs)

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> KernelConnectionInfo:
        """Start supervisor and guest; return once the guest is ready. Raises BackIntelError.

        If it raises or is cancelled, nothing of the session is left: jupyter_client calls no
        ``cleanup`` then.
        """
        assert self.settings is not None
        previous = self.session_id
        self.session_id = secrets.token_hex(8)
        if self._socket_dir is None:
            self._socket_dir = self._dirs.runtime / secrets.token_hex(8)
        if not self._automatic:
            self._replaced = None
        elif self.ended is not None:  # else an automatic start failed, and this is the next
            self._replaced = self.ended["reason"]
        self._supervision = None
        self.receipt = None
        self.timings = {}
        # For people only: Jupyter's word for which notebook asks. Nothing follows from it.
        self.notebook = (kwargs.get("env") or {}).get("JPY_SESSION_NAME")
        try:
            self._supervision = Supervision(self.log)
            await self._supervision.start(self._request(previous))
            await self._wait_ready(self._supervision)
        except BaseException as error:
            await self._abandon()
            self._supervision = None  # no guest came up: its supervisor's end is none of one
            self._failed_to_start(error)
            told = error if isinstance(error, BackIntelError) else _GIVEN_UP
            observers.tell(self, "failed", told.as_dict())
            raise
        self._autorestart.started(automatic=self._automatic)
        self._has_process = True
        self.connection_info = self._connection_info()
        return self.connection_info

    async def post_launch(self, **kwargs: Any) -> None:
        """Called last in a start or restart: only now may a client ask for the next one."""
        await super().post_launch(**kwargs)
        observers.tell(self, "ready", {"seconds": self.timings.get("ready", 0.0)})

    async def poll(self) -> int | None:
        """None while the guest lives, else its exit status (1 where it left none)."""
        if self._supervision is None or self._process is None:
            return 0
        self._supervision.drain()
        if self.ended is None:
            return None
        if self.settings is not None:
            reason = Reason(self.ended["reason"])
            self._autorestart.guest_ended(reason, self.settings.profile.after_end)
        status = self.ended.get("status")
        return status if isinstance(status, int) else int(self.ended.get("exit_status", 1))

    async def wait(self) -> int | None:
        """Wait until the guest is gone."""
        while (status := await self.poll()) is None:
            await asyncio.sleep(0.02)
        self._has_process = False
        return status

    async def send_signal(self, signum: int) -> None:
        """Send a signal to the kernel's process group in the guest. Never raises."""
        # Signal 0 is jupyter_client's question whether the process exists.
        if signum:
            await self._tell("signal", signum=int(signum))

    async def kill(self, restart: bool = False) -> None:
        """Kill the guest; if the supervisor hangs, kill that, and the guest dies with it."""
        if await self.poll() is None:
            # A restarter acts on dead guests only: somebody asked for this one's end.
            self._fresh_clock = True
        await self._tell("kill")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILL_TIMEOUT_S):
                while await self.poll() is None:
                    await asyncio.sleep(0.01)
                return
        if self._supervision is not None:
            self._supervision.kill()

    async def terminate(self, restart: bool = False) -> None:
        """End the guest; there is nothing gentler left to try when this is called."""
        await self._tell("kill")

    async def shutdown_requested(self, restart: bool = False) -> None:
        """Note that a person asked for the end: it is then no crash, and a restart is a new run."""
        self._fresh_clock = True
        await self._tell("shutdown")

    async def cleanup(self, restart: bool = False) -> None:
        """Tear the session down; idempotent. Afterwards ``receipt`` holds the session's receipt."""
        if self._process is not None:
            await self._close()
            observers.tell(self, "gone", {})
        self._has_process = False
        if not restart:
            self._socket_dir = None

    def get_shutdown_wait_time(self, recommended: float = 5.0) -> float:
        """Give the guest's kernel the recommended time."""
        return recommended

    def get_stable_start_time(self, recommended: float = 10.0) -> float:
        """A guest that boots slower than a process must not look unstable (jupyter_client#715)."""
        return recommended + 10.0

    async def get_provisioner_info(self) -> dict[str, Any]:
        """A session cannot be taken over by another server process: it ends with its owner."""
        return {**await super().get_provisioner_info(), "session": self.session_id}

    def resolve_path(self, path: str) -> str | None:
        """Paths of the guest mean nothing on the host."""
        return None

    # -- for the runner ------------------------------------------------------------------------

    async def export(self, destination: Path) -> list[dict[str, Any]]:
        """End the guest and publish its artifacts into ``destination``.

        Returns name, size (bytes) and sha256 of each. Raises ExportRefused (nothing is published)
        and StartFailed if there is no session.
        """
        supervision = self._supervision
        if supervision is None or supervision.process is None:
            raise StartFailed("there is no session to export from.")
        await supervision.tell("export", destination=str(destination))
        artifacts: list[dict[str, Any]] = []
        async with asyncio.timeout(EXPORT_TIMEOUT_S):
            while True:
                message = await supervision.next_message()
                match message.get("op"):
                    case "artifact":
                        artifacts.append(message["artifact"])
                    case "exported":
                        return artifacts
                    case "export_failed":
                        raise error_from_dict(message["error"])
                    case "gone":
                        raise ExportRefused("the session ended before its artifacts were read.")

    # -- settings ------------------------------------------------------------------------------

    def plan(self) -> Settings:
        """Return what a start would use now. Raises what it would be refused with."""
        return self._resolve()

    def _resolve(self) -> Settings:
        manager = self.parent if isinstance(self.parent, SandboxKernelManager) else None
        # Traits hold kernelspec over traitlets configuration, as spec D5 orders them:
        # jupyter_client passes the kernelspec's ``config`` as trait initialisers. The raw words
        # come along so that an unknown key is refused and not dropped.
        raw = self.kernel_spec.metadata.get("kernel_provisioner", {}).get("config", {})
        spec = {
            "engine": self.engine,
            "profile": self.profile,
            "sources": self.sources or None,
            "endpoints": self.endpoints or None,
            "cell_deadline": self.cell_deadline,
            "run_deadline": self.run_deadline,
            "on_deadline": self.on_deadline,
            "after_end": self.after_end,
            "grace": self.grace,
        }
        return resolve_settings(
            command_line=manager.command_line if manager else {},
            environ=os.environ,
            kernelspec={**raw, **{k: v for k, v in spec.items() if v is not None}},
            default_profile=manager.default_profile if manager else "interactive",
        )

    # -- supervisor ----------------------------------------------------------------------------

    def _request(self, previous: str | None) -> dict[str, Any]:
        assert self.settings is not None
        manager: Any = self.parent
        run_dir = getattr(manager, "run_dir", None)
        return {
            "v": wire.VERSION,
            "op": "start",
            "session": self.session_id,
            "kernel_id": self.kernel_id or "",
            "previous": previous,
            "replaced": self._replaced,
            "engine": self.settings.engine,
            "engine_requested": self.settings.engine_requested,
            "profile": asdict(self.settings.profile),
            "sources": [
                {"name": s.name, "path": str(s.path), "kind": s.kind} for s in self.settings.sources
            ],
            "endpoints": [asdict(endpoint) for endpoint in self.settings.endpoints],
            "environment": dict(self.settings.environment),
            "key": manager.session.key.decode(),
            "signature_scheme": manager.session.signature_scheme,
            "socket_dir": str(self._socket_dir),
            "dirs": {
                "data": str(self._dirs.data),
                "state": str(self._dirs.state),
                "runtime": str(self._dirs.runtime),
            },
            "started_at": self._clock_started,
            "run_dir": None if run_dir is None else str(run_dir),
        }

    async def _wait_ready(self, supervision: Supervision) -> None:
        assert self.settings is not None
        assert self._clock_started is not None
        run_deadline = self.settings.profile.run_deadline_s
        left = self._clock_started + run_deadline - time.monotonic() + START_SLACK_S
        copies = sum(source.kind == "sqlite" for source in self.settings.sources)
        try:
            async with asyncio.timeout(max(left, START_SLACK_S)):
                while True:
                    silence_s = self.phase_timeout_s * (1 + copies)
                    message = await self._heard_within(supervision, silence_s)
                    match message.get("op"):
                        case "phase":
                            self._phase(message)
                        case "ready":
                            return
                        case "failed":
                            raise error_from_dict(message["error"])
                        case "gone":
                            raise StartFailed("the supervisor ended.", phase="start")
        except TimeoutError:
            raise DeadlineReached(
                f"the run deadline of {run_deadline:g} s passed before the sandbox was ready.",
                phase="start",
                remedy="give the run more time.",
            ) from None

    async def _heard_within(self, supervision: Supervision, seconds: float) -> dict[str, Any]:
        """Return the starting supervisor's next message. Raises StartFailed if none comes."""
        try:
            # Not asyncio.timeout: the run deadline's must not be taken for this one.
            return await asyncio.wait_for(supervision.next_message(), seconds)
        except TimeoutError:
            last = next(reversed(self.timings), "start")
            raise StartFailed(
                f"the supervisor said nothing for {seconds:g} s (last phase: {last}).",
                phase="start",
                remedy="look whether it is stopped; start the kernel again.",
            ) from None

    def _phase(self, message: Mapping[str, Any]) -> None:
        name, seconds = str(message["name"]), float(message["seconds"])
        self.timings[name] = seconds
        on_phase = getattr(self.parent, "on_phase", None)
        if on_phase is not None:
            on_phase(name, seconds)
        observers.tell(self, "phase", {"phase": name, "seconds": seconds})

    def _connection_info(self) -> KernelConnectionInfo:
        manager: Any = self.parent
        shell, iopub, stdin, control, heartbeat = range(1, len(CHANNELS) + 1)
        return {
            "transport": "ipc",
            "ip": f"{self._socket_dir}/h",
            "key": manager.session.key,
            "signature_scheme": manager.session.signature_scheme,
            "shell_port": shell,
            "iopub_port": iopub,
            "stdin_port": stdin,
            "control_port": control,
            "hb_port": heartbeat,
        }

    # -- end -----------------------------------------------------------------------------------

    async def _abandon(self) -> None:
        """Free all after a failed or cancelled launch, also while being cancelled."""
        closing = asyncio.ensure_future(self._close())
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(closing)
        while not closing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(closing)

    def _failed_to_start(self, error: BaseException) -> None:
        if self._automatic:
            self._autorestart.start_failed(error)

    async def _tell(self, op: str, **fields: object) -> None:
        if self._supervision is not None:
            await self._supervision.tell(op, **fields)

    async def _close(self) -> None:
        supervision = self._supervision
        if supervision is None or supervision.process is None:
            return
        await supervision.close(self._dirs)
        self.receipt = supervision.unsaved
        with contextlib.suppress(OSError, ValueError):
            path = self._dirs.receipts / f"{self.session_id}.json"
            self.receipt = json.loads(path.read_text())
