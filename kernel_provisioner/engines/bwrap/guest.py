"""One running guest, held from the host's side: pidfds, cgroup, the artifacts' descriptor.

Trusts nothing that the guest sends but the attestation, which is read before any user code runs.
Every verb works after the guest died, and ending it needs nothing of the guest.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from kernel_provisioner import wire
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
from kernel_provisioner.engines.bwrap import (
    attestation,
    cgroups,
    export,
    freezer,
    keeper,
    linux,
    waiting,
)
from kernel_provisioner.engines.bwrap.output import OutputTail, explain
from kernel_provisioner.engines.bwrap.paths import channel_paths, remove_sockets
from kernel_provisioner.engines.leftovers import members, thaw
from kernel_provisioner.errors import AttestationFailed, StartFailed, WireError
from kernel_provisioner.processes import identify

_READ = 65536
_NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")


@dataclass(slots=True)
class Held:
    """What the engine hands over of a launched guest; the guest closes the descriptors."""

    spec: GuestSpec
    group: cgroups.Group
    limits: Mapping[str, object]
    monitor: ProcessIdentity
    monitor_fd: int
    child: ProcessIdentity
    child_fd: int
    keeper: ProcessIdentity
    freezer: freezer.SupervisorEnd
    control: socket.socket
    targets: int
    output: OutputTail
    read_only: frozenset[str]
    as_root: bool
    closed: bool = field(default=False)


class BwrapGuest:
    """See engines.base.Guest. Made by BwrapEngine.start on the running event loop."""

    def __init__(self, held: Held) -> None:
        self._held = held
        self._reader = wire.FrameReader()
        self._messages: list[dict[str, object]] = []
        self._kernel: ProcessIdentity | None = None
        self._kernel_fd: int | None = None
        self._artifacts_fd: int | None = None
        self._closing = threading.Lock()
        """Held to close the descriptor of /artifacts or to duplicate it in another thread."""
        self._last = Sample(0, 0, 0, held.group.kind, 0.0, 0, 0)
        self._peak = 0
        self._deviations: list[str] = []
        self._network = ""
        loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[GuestExit] = loop.create_future()
        loop.add_reader(held.monitor_fd, self._reap)
        self._keeper_fd = os.pidfd_open(held.keeper.pid)
        self._keeper_lost = False
        self._killed = False
        loop.add_reader(self._keeper_fd, self._lose_keeper)

    @property
    def channels(self) -> Mapping[str, Path]:
        """Host sockets by channel, connectable from start on."""
        return channel_paths(self._held.spec.socket_dir)

    @property
    def limits(self) -> Mapping[str, object]:
        """Cgroup values as read back after the guest was put inside."""
        return {**self._held.limits, "deviations": list(self._deviations)}

    @property
    def leftovers(self) -> Leftovers:
        """What a sweep has to end and remove if the supervisor is killed."""
        held = self._held
        return Leftovers((held.monitor, held.child, held.keeper), held.group.paths, ())

    async def wait_attested(self, timeout: float) -> Mapping[str, object]:
        """Return the guest's facts after comparing them with what was asked.

        Raises AttestationFailed naming each deviation, StartFailed if none came in ``timeout``
        seconds.
        """
        deadline = waiting.deadline_in(timeout)
        message, pid = await self._receive(deadline, phase="attest")
        facts = message.get("attest")
        if message.get("v") != wire.VERSION or not isinstance(facts, dict):
            raise AttestationFailed("the guest's first message is no attestation.", phase="attest")
        self._adopt(pid)
        held = self._held
        own = {name: os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES}
        found = attestation.deviations(
            facts,
            held.spec.session,
            held.spec.profile,
            held.read_only,
            own,
            groups_dropped=held.as_root,
        )
        if found:
            self.kill()
            raise AttestationFailed(
                f"the sandbox is not what was asked for: {'; '.join(found)}.",
                remedy="report this with the output of `backintel sandbox check`; nothing was run.",
                phase="attest",
            )
        self._deviations = attestation.recorded(facts)
        self._network = str(facts["namespaces"]["net"])
        return facts

    def _adopt(self, pid: int) -> None:
        """Hold the kernel's process and /artifacts from now, before user code can touch either.

        ``pid`` is the sender as the kernel states it (SCM_CREDENTIALS), translated to the host.
        """
        held = self._held
        identity = identify(pid)
        fd = None if identity is None else linux.open_identity(identity)
        if identity is None or fd is None or linux.parent_pid(pid) != held.child.pid:
            if fd is not None:
                os.close(fd)
            raise AttestationFailed("the attesting process is not the guest's.", phase="attest")
        self._kernel, self._kernel_fd = identity, fd
        try:
            path = f"/proc/{pid}/root/artifacts"
            artifacts = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise StartFailed(
                f"the guest's /artifacts cannot be held ({error.strerror}).", phase="attest"
            ) from None
        self._artifacts_fd = artifacts
        space = os.fstatvfs(artifacts)
        if space.f_blocks * space.f_frsize < held.spec.profile.artifacts_bytes:
            raise AttestationFailed("/artifacts is not the mount asked for.", phase="attest")

    async def open_endpoints(self, timeout: float) -> Mapping[str, EndpointListener]:
        """Listen in the sandbox's network namespace. Raises StartFailed."""
        if not self._held.spec.endpoints:
            return {}
        from kernel_provisioner.engines.bwrap.endpoints import listen

        assert self._kernel is not None  # it was attested
        opened = await asyncio.to_thread(
            listen, self._kernel.pid, self._network, self._held.spec.endpoints, timeout
        )
        return {name: EndpointListener(sock, framed=False) for name, sock in opened.items()}

    async def release(self, connection: Mapping[str, object], timeout: float) -> None:
        """Send the go frame with key and signature scheme; return once the sockets are bound.

        Raises StartFailed with what the guest printed.
        """
        deadline = waiting.deadline_in(timeout)
        # The owner's variables may be credentials: they go this way, never by an argument list.
        variables = dict(self._held.spec.environment)
        frame = wire.encode({"connection": dict(connection), "environment": variables})
        try:
            async with asyncio.timeout(waiting.left(deadline)):
                await asyncio.get_running_loop().sock_sendall(self._held.control, frame)
        except (OSError, TimeoutError):
            raise await self._failure("kernel", "it does not take the go message") from None
        message, _ = await self._receive(deadline, phase="kernel")
        if message.get("ready") is not True:
            raise StartFailed("the guest did not say that it is ready.", phase="kernel")
        self._held.control.close()

    async def _receive(self, deadline: float, *, phase: str) -> tuple[dict[str, object], int]:
        """Return the next message and the host's pid of its sender."""
        control = self._held.control
        pid = 0
        while not self._messages:
            try:
                await waiting.readable(control.fileno(), deadline)
                data, ancillary, _, _ = control.recvmsg(_READ, socket.CMSG_SPACE(12))
            except TimeoutError:
                raise await self._failure(phase, "it did not answer in time") from None
            except BlockingIOError:
                continue
            except OSError as error:
                raise await self._failure(phase, error.strerror or "it is gone") from None
            if not data:
                raise await self._failure(phase, "it ended")
            for level, kind, value in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                    pid = int.from_bytes(value[:4], "little")
            try:
                self._messages += self._reader.feed(data)
            except WireError as error:
                raise StartFailed(f"the guest's message: {error.message}", phase=phase) from None
        return self._messages.pop(0), pid

    async def _failure(self, phase: str, how: str) -> StartFailed:
        """Compose the error of a start: the guest is killed and what it printed is quoted."""
        self.kill()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                await self.wait()
        self._held.output.drain()
        return explain(self._held.output.text(), how, phase)

    def signal(self, signum: int, msg_id: str = "") -> None:
        """See engines.base.Guest."""
        if self._kernel is None or self._kernel_fd is None or waiting.exited(self._kernel_fd):
            return
        if msg_id:
            # A guest that does not read them fills the pipe: then any request is interrupted.
            with contextlib.suppress(OSError):
                name = hashlib.sha256(msg_id.encode()).hexdigest()
                os.write(self._held.targets, f"{name}\n".encode())
        try:
            # The kernel made itself the leader of this group. Its number cannot have been given
            # to another group: the pidfd says that the leader lives.
            os.killpg(self._kernel.pid, signum)
        except ProcessLookupError:
            # It moved to another group of its own; it is still the one to interrupt.
            linux.pidfd_kill(self._kernel_fd, signum)

    async def wait(self) -> GuestExit:
        """Wait until bubblewrap's monitor and the sandbox's process 1 are gone."""
        result = await asyncio.shield(self._exit)
        if not self._held.closed:
            await waiting.readable(self._held.child_fd, None)
        return result

    def _reap(self) -> None:
        """The monitor ended: take its status. bubblewrap reports a signal n as exit 128 + n."""
        held = self._held
        asyncio.get_running_loop().remove_reader(held.monitor_fd)
        try:
            _, status = os.waitpid(held.monitor.pid, 0)
        except ChildProcessError:
            code: int | None = None
        else:
            code = os.waitstatus_to_exitcode(status)
            if code < 0 or self._keeper_lost:
                # The monitor or the keeper was killed, which nothing in the sandbox can do.
                code = None
            elif 128 < code <= 128 + signal.SIGRTMAX:
                code = 128 - code
            if code == -signal.SIGKILL and not self._killed and self._outside_kill():
                code = None
        # Process 1 ends before its monitor, unless guest code has taken it over or the monitor was
        # killed.
        linux.pidfd_kill(held.child_fd, signal.SIGKILL)
        if not self._exit.done():
            self._exit.set_result(GuestExit(code))

    def _outside_kill(self) -> bool:
        """Whether process 1 was killed, which only the host can do, and the kernel with it.

        bubblewrap's status is one for both deaths. But if the kernel died, process 1 says so by an
        eventfd, and the monitor ends without waiting for it: it is our child then. If process 1
        died, the monitor has reaped it. User code can feign that only by rewriting process 1.
        """
        try:
            os.waitpid(self._held.child.pid, os.WNOHANG)
        except ChildProcessError:
            return True
        return False

    def _lose_keeper(self) -> None:
        """The keeper ended: if bubblewrap runs, it was killed, and no guest runs without one."""
        held = self._held
        asyncio.get_running_loop().remove_reader(self._keeper_fd)
        if not waiting.exited(held.monitor_fd):
            self._keeper_lost = True
            linux.pidfd_kill(held.child_fd, signal.SIGKILL)
            thaw(held.group.paths[0])  # the keeper may have been killed while it froze

    def kill(self) -> None:
        """SIGKILL process 1 of the sandbox: the kernel ends all others with it.

        bubblewrap's monitor then ends by itself; killed too, it could not say how the kernel ended.
        """
        if self._held.closed:
            return
        with contextlib.suppress(OSError):
            self._last = self._read_sample()
        self._killed = True
        linux.pidfd_kill(self._held.child_fd, signal.SIGKILL)
        # On cgroup v1 what is frozen does not die. The keeper too: it may be about to freeze.
        self._held.freezer.release()
        thaw(self._held.group.paths[0])

    def sample(self) -> Sample:
        """Read memory, CPU and out-of-memory evidence; after the end, the last values."""
        if not self._held.closed:
            with contextlib.suppress(OSError):
                self._last = self._read_sample()
        return self._last

    def _read_sample(self) -> Sample:
        group = self._held.group
        usage = group.usage()
        self._peak = max(self._peak, usage.memory_bytes, usage.peak_bytes or 0)
        measured = "kernel's peak counter" if usage.peak_bytes is not None else "highest sample"
        cpu = usage.cpu_seconds
        return Sample(
            memory_bytes=usage.memory_bytes,
            # The two counters are not read at one moment.
            held_bytes=max(0, usage.memory_bytes - usage.file_bytes),
            peak_memory_bytes=self._peak,
            peak_memory_method=f"{group.kind}, {measured}, page cache included",
            cpu_seconds=self._cpu_of_members() if cpu is None else cpu,
            tasks=usage.tasks,
            oom_kills=usage.oom_kills,
        )

    def _cpu_of_members(self) -> float:
        """Add up the CPU time of live processes and their reaped children; never falling."""
        ticks = os.sysconf("SC_CLK_TCK")
        total = 0
        for pid in members(self._held.group.paths[0]):
            total += linux.cpu_ticks(pid)
        return max(self._last.cpu_seconds, total / ticks)

    def artifacts(self) -> BinaryIO:
        """Return /artifacts as a tar stream, also after kill, until destroy.

        Raises StartFailed if the guest never came up or is destroyed.
        """
        if self._artifacts_fd is None:
            raise StartFailed("there is no guest whose artifacts could be read.", phase="export")
        return export.open_stream(self._artifacts_fd, self._held.spec.profile.artifacts_bytes)

    def frozen(self) -> AbstractAsyncContextManager[Hold]:
        """Make the guest stand still for at most 2 s. Raises FreezeRefused."""
        return self._held.freezer.frozen()

    def listing(self) -> Sequence[Listed]:
        """Look at /artifacts through the exports' descriptor. Raises StartFailed, OSError."""
        with self._closing:
            if self._artifacts_fd is None:
                raise StartFailed(
                    "there is no guest whose artifacts could be read.", phase="export"
                )
            own = os.dup(self._artifacts_fd)
        try:
            return export.listing(own)
        finally:
            os.close(own)

    async def destroy(self, timeout: float) -> Sequence[str]:
        """Kill, reap and remove everything; idempotent; return what could not be removed.

        What is returned is tried again by the next call.
        """
        deadline = waiting.deadline_in(timeout)
        held = self._held
        left = []
        if not held.closed:
            if not await self._gone(deadline):
                left.append(f"process {held.child.pid} of the sandbox")
            else:
                with contextlib.suppress(OSError):
                    self._last = self._read_sample()
                self._close()
        left += await asyncio.to_thread(cgroups.remove_all, held.group.paths, deadline)
        return left + remove_sockets(held.spec.socket_dir)

    async def _gone(self, deadline: float) -> bool:
        """Kill, and wait for the end until the deadline; False if something is still there."""
        self.kill()
        for share in (0.5, 1):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(waiting.left(deadline) * share):
                    await self.wait()
                return True
            # A monitor that somebody stopped never ends by itself; how the guest ended is lost.
            linux.pidfd_kill(self._held.monitor_fd, signal.SIGKILL)
        return False

    def _close(self) -> None:
        held = self._held
        held.closed = True
        asyncio.get_running_loop().remove_reader(self._keeper_fd)
        os.close(self._keeper_fd)
        keeper.reap(held.keeper)
        held.freezer.close()
        with contextlib.suppress(ChildProcessError):  # reaped already, or by the monitor
            os.waitpid(held.child.pid, os.WNOHANG)
        held.output.close()
        held.control.close()
        with self._closing:
            for fd in (
                held.monitor_fd,
                held.child_fd,
                held.targets,
                self._kernel_fd,
                self._artifacts_fd,
            ):
                if fd is not None:
                    os.close(fd)
            self._kernel_fd = self._artifacts_fd = None
