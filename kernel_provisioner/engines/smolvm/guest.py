"""One running microVM, held from the host: two processes, the agent's connection, two directories.

The attestation is believed because it is read before any user code runs. ``kill`` first asks the
agent, so that artifacts can still be read, and ends the machine itself if no answer comes at once;
``destroy`` asks nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from kernel_provisioner.engines.base import (
    EndpointListener,
    GuestExit,
    GuestSpec,
    Hold,
    Leftovers,
    Listed,
    ProcessIdentity,
    Sample,
)
from kernel_provisioner.engines.bwrap import linux, waiting
from kernel_provisioner.engines.bwrap.output import OutputTail
from kernel_provisioner.engines.leftovers import remove_directory
from kernel_provisioner.engines.smolvm import (
    attestation,
    command,
    connection,
    failures,
    live,
    monitor,
)
from kernel_provisioner.engines.smolvm.workspace import Places
from kernel_provisioner.errors import AttestationFailed, BackIntelError, StartFailed
from kernel_provisioner.plaintext import quoted

KILL_ANSWER_S = 1.0
"""How long the agent has to end the kernel before the machine is ended instead."""
_GONE_S = 2.0
_METHOD = (
    "the guest kernel's MemTotal - MemAvailable, highest sample of each second; MemTotal once it "
    "killed for memory"
)


@dataclass(slots=True)
class Held:
    """What the engine hands over of a started machine; the guest closes the descriptors."""

    spec: GuestSpec
    places: Places
    user: int
    plan: Mapping[str, Any]
    read_only: frozenset[str]
    monitor: ProcessIdentity
    """The keeper: our child. ``smol-vmm machine run`` is its child, the machine its grandchild."""
    monitor_fd: int
    output: OutputTail
    open_files: int
    listeners: Mapping[str, socket.socket] = field(default_factory=dict)
    """The host's sockets of the endpoints, by name, until they are handed over."""
    machine: ProcessIdentity | None = field(default=None)
    machine_fd: int = field(default=-1)
    closed: bool = field(default=False)


class SmolvmGuest:
    """See engines.base.Guest. Made by SmolvmEngine.start on the running event loop."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._control: connection.Control | None = None
        self._last = Sample(0, 0, 0, _METHOD, 0.0, 0, 0)
        self._limits: dict[str, object] = {"open_files": held.open_files, "monitor_uid": held.user}
        self._released = False
        self._printed = ""
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._exit: asyncio.Future[GuestExit] = self._loop.create_future()
        self._reaped: asyncio.Future[None] = self._loop.create_future()
        self._still = live.Standstill(self._send, self._reaped)
        self._loop.add_reader(held.monitor_fd, self._reap)

    @property
    def channels(self) -> Mapping[str, Path]:
        """Host sockets by channel; the monitor binds them while it boots."""
        return self._held.places.channels

    @property
    def limits(self) -> Mapping[str, object]:
        """What was read back of the monitor and of the machine."""
        return self._limits

    @property
    def leftovers(self) -> Leftovers:
        """What a sweep has to end and remove if the supervisor is killed."""
        held = self._held
        machine = () if held.machine is None else (held.machine,)
        return Leftovers((held.monitor, *machine), (), (held.places.directory, held.places.sockets))

    # -- start ---------------------------------------------------------------------------------

    async def wait_attested(self, timeout: float) -> Mapping[str, object]:
        """Wait for the boot, have the enclosure made, and compare what the guest read back.

        Raises AttestationFailed naming each deviation; StartFailed, HostRefused or
        EngineUnavailable if the machine did not come up in ``timeout`` seconds.
        """
        deadline = waiting.deadline_in(timeout)
        held = self._held
        try:
            sock = await connection.connect(held.places.agent, deadline, self._reaped.done)
        except TimeoutError:
            raise await self._failure("boot", "its agent did not answer in time") from None
        except ConnectionError:
            raise await self._failure("boot", "smol-vmm ended") from None
        self._control = connection.Control(sock, self._message, self._lost)
        self._adopt()
        self._control.send(held.plan)
        facts = await self._expect("attest", deadline, phase="attest")
        found = attestation.deviations(facts, held.spec, held.read_only)
        found += [] if held.machine is None else monitor.deviations(held.machine, held.user)
        if found:
            self.kill()
            raise AttestationFailed(
                f"the sandbox is not what was asked for: {'; '.join(found)}.",
                remedy="report this with the output of `backintel sandbox check`; nothing was run.",
                phase="attest",
            )
        self._limits.update(attestation.recorded(facts))
        return {**facts["attest"], "vm": facts["vm"]}

    def _adopt(self) -> None:
        """Hold the machine's own process. Raises StartFailed if it cannot be told apart."""
        held = self._held
        machine = monitor.find(held.monitor)
        fd = None if machine is None else linux.open_identity(machine)
        if machine is None or fd is None:
            raise StartFailed("the machine's process was not found.", phase="boot")
        held.machine, held.machine_fd = machine, fd

    async def open_endpoints(self, timeout: float) -> Mapping[str, EndpointListener]:
        """Have the agent listen for each endpoint and lead what comes to the host's sockets.

        Raises StartFailed with what the guest said; the machine is ended then.
        """
        deadline = waiting.deadline_in(timeout)
        held = self._held
        if held.listeners:
            assert self._control is not None
            self._control.send(command.endpoints(held.spec))
            await self._expect("endpoints", deadline, phase="endpoints")
        opened, held.listeners = held.listeners, {}
        return {name: EndpointListener(sock, framed=True) for name, sock in opened.items()}

    async def release(self, connection: Mapping[str, object], timeout: float) -> None:
        """Send the go frame with key and signature scheme; return once the sockets are bound.

        Raises StartFailed with what the guest printed.
        """
        deadline = waiting.deadline_in(timeout)
        assert self._control is not None
        variables = dict(self._held.spec.environment)
        self._control.send({"op": "go", "connection": dict(connection), "environment": variables})
        self._released = True
        await self._expect("ready", deadline, phase="kernel")

    async def _expect(self, name: str, deadline: float, *, phase: str) -> dict[str, Any]:
        """Return the next frame that holds ``name``; samples and ends are not queued here."""
        while True:
            wait = asyncio.ensure_future(self._messages.get())
            waiting_for: set[asyncio.Future[Any]] = {wait, self._exit}
            done, _ = await asyncio.wait(
                waiting_for,
                timeout=waiting.left(deadline),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if wait in done:
                message = wait.result()
                if name in message:
                    return message
                raise await self._failure(phase, str(message.get("failed", "it said nonsense")))
            wait.cancel()
            raise await self._failure(phase, "it ended" if done else "it did not answer in time")

    async def _failure(self, phase: str, how: str) -> BackIntelError:
        """Compose the error of a start: the machine is ended and what was printed is quoted."""
        self._end_machine()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GONE_S):
                await asyncio.shield(self._reaped)
        held = self._held
        held.output.drain()
        if self._printed:
            printed = quoted(self._printed, 1500)
            return StartFailed(
                f"the guest did not come up: {quoted(how, 500)}. It printed: {printed}",
                phase=phase,
            )
        left = monitor.remains(held.places.directory)
        return failures.explain(held.output.text(), left, how, phase)

    # -- events --------------------------------------------------------------------------------

    def _message(self, message: dict[str, Any]) -> None:
        """Take a frame of the agent; a malformed one ends the machine."""
        try:
            if "sample" in message:
                self._take(message["sample"])
            elif "exited" in message:
                self._printed = str(message["printed"])[-16384:]
                kills = int(message["oom_kills"])
                self._last = self._with(**self._exhausted(kills))
                self._finish(int(message["exited"]))
            elif "frozen" in message or "thawed" in message:
                self._still.take(message)
            elif not self._released or self._messages.empty():
                self._messages.put_nowait(message)
        except (KeyError, TypeError, ValueError):
            self._end_machine()

    def _take(self, figures: Mapping[str, Any]) -> None:
        memory = int(figures["memory_bytes"])
        self._last = self._with(
            memory_bytes=memory,
            peak_memory_bytes=max(self._last.peak_memory_bytes, memory),
            tasks=int(figures["tasks"]),
        )
        self._last = self._with(**self._exhausted(int(figures["oom_kills"])))

    def _exhausted(self, kills: int) -> dict[str, int]:
        """Return the figures after so many kills for memory: before one all of it was taken.

        On real hardware that takes less than the second from one sample to the next.
        """
        last = self._last
        if kills <= last.oom_kills:
            return {}
        whole = int(str(self._limits.get("guest_memory_bytes", 0)))
        return {"oom_kills": kills, "peak_memory_bytes": max(last.peak_memory_bytes, whole)}

    def _with(self, **changes: int) -> Sample:
        """Return the last sample with changes and the host's own figure of CPU time."""
        held = self._held
        ticks = sum(linux.cpu_ticks(p.pid) for p in (held.monitor, held.machine) if p is not None)
        cpu = max(self._last.cpu_seconds, ticks / os.sysconf("SC_CLK_TCK"))
        last = self._last
        return Sample(
            memory_bytes=changes.get("memory_bytes", last.memory_bytes),
            # The guest's own figure leaves out what its kernel can take back.
            held_bytes=changes.get("memory_bytes", last.memory_bytes),
            peak_memory_bytes=changes.get("peak_memory_bytes", last.peak_memory_bytes),
            peak_memory_method=_METHOD,
            cpu_seconds=cpu,
            tasks=changes.get("tasks", last.tasks),
            oom_kills=changes.get("oom_kills", last.oom_kills),
        )

    def _lost(self, why: str) -> None:
        """Without the agent there is neither a kernel's end nor an export to wait for."""
        del why
        self._end_machine()

    def _finish(self, status: int | None, detail: str = "") -> None:
        if not self._exit.done():
            self._exit.set_result(GuestExit(status, detail))

    def _reap(self) -> None:
        """smol-vmm ended, and with it the machine. Its status says nothing about the kernel's."""
        held = self._held
        self._loop.remove_reader(held.monitor_fd)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(held.monitor.pid, 0)
        if not self._reaped.done():
            self._reaped.set_result(None)
        if not self._exit.done():
            held.output.drain()
            left = monitor.remains(held.places.directory)
            self._finish(None, failures.lost(held.output.text(), left))

    # -- verbs ---------------------------------------------------------------------------------

    def signal(self, signum: int, msg_id: str = "") -> None:
        """See engines.base.Guest."""
        if self._control is not None and not self._exit.done():
            self._control.send({"op": "signal", "signum": signum, "msg_id": msg_id})

    async def wait(self) -> GuestExit:
        """Wait until the kernel and all user code are gone."""
        return await asyncio.shield(self._exit)

    def kill(self) -> None:
        """End all user code: by the agent if it answers within a second, else with the machine."""
        if self._exit.done():
            return
        if self._control is None or self._control.closed or not self._released:
            self._finish(-signal.SIGKILL)
            self._end_machine()
            return
        self._control.send({"op": "kill"})
        self._loop.call_later(KILL_ANSWER_S, self._kill_unanswered)

    def _kill_unanswered(self) -> None:
        if not self._exit.done():
            self._finish(-signal.SIGKILL)
            self._end_machine()

    def _end_machine(self) -> None:
        """End the machine and the program that runs it, by identity."""
        held = self._held
        if held.closed:
            return
        if held.machine is None and not self._reaped.done():
            # It may have started since; what it left unadopted dies with the program itself.
            held.machine = monitor.find(held.monitor)
            if held.machine is not None:
                held.machine_fd = linux.open_identity(held.machine) or -1
        if held.machine_fd >= 0:
            linux.pidfd_kill(held.machine_fd, signal.SIGKILL)
        # As root the keeper's death ends its PID namespace; as a user it ends the rest itself.
        linux.pidfd_kill(held.monitor_fd, signal.SIGTERM if os.geteuid() else signal.SIGKILL)

    def sample(self) -> Sample:
        """Return the agent's last figures with the host's figure of CPU time."""
        if not self._held.closed:
            self._last = self._with()
        return self._last

    def artifacts(self) -> BinaryIO:
        """Return /artifacts as a tar stream, also after ``kill``, while the agent lives.

        Raises StartFailed if the guest never came up or the machine is gone, NoAnswer if it takes
        no connection.
        """
        return connection.open_artifacts(self._agent())

    def _agent(self) -> Path:
        """Return the agent's socket. Raises StartFailed if nobody can answer there."""
        if self._control is None:
            raise StartFailed("there is no guest whose artifacts could be read.", phase="export")
        if self._control.closed:
            raise StartFailed("the artifacts are lost with the VM.", phase="export")
        return self._held.places.agent

    def _send(self, message: Mapping[str, object]) -> None:
        if self._control is not None:
            self._control.send(message)

    def frozen(self) -> AbstractAsyncContextManager[Hold]:
        """Have the agent stop the kernel for at most 2 s. Raises FreezeRefused."""
        gone = self._control is None or self._control.closed or self._exit.done()
        return live.stands_anyway() if gone else self._still.frozen()

    def listing(self) -> Sequence[Listed]:
        """Ask the agent what is in /artifacts. Raises StartFailed, NoAnswer, ExportRefused."""
        return live.listing(self._agent())

    async def destroy(self, timeout: float) -> Sequence[str]:
        """End the machine and remove everything; idempotent; return what could not be removed."""
        deadline = time.monotonic() + timeout
        held = self._held
        left = []
        if not held.closed:
            self._last = self._with()
            if self._control is not None:
                self._control.close()
            self._end_machine()
            try:
                async with asyncio.timeout(waiting.left(deadline)):
                    await asyncio.shield(self._reaped)
                    if held.machine_fd >= 0:
                        await waiting.readable(held.machine_fd, None)
            except TimeoutError:
                left.append(f"process {held.monitor.pid} of the machine")
            else:
                self._close()
        for path in (held.places.directory, held.places.sockets):
            left += await asyncio.to_thread(remove_directory, path, held.spec.session)
        return left

    def _close(self) -> None:
        held = self._held
        held.closed = True
        for listener in held.listeners.values():
            listener.close()
        held.output.close()
        os.close(held.monitor_fd)
        if held.machine_fd >= 0:
            os.close(held.machine_fd)
