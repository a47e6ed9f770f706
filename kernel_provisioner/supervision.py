"""The provisioner's end of one supervisor: its process, and the control socket to it.

Runs in the Jupyter server's process, in whatever loop calls it, and never blocks that. The
supervisor is trusted, but it may hang, die or be killed at any moment: every wait is bounded, and
its loss is told as the guest's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from logging import Logger, LoggerAdapter
from typing import Any, TypeVar

from kernel_provisioner import wire
from kernel_provisioner.errors import ENDS, Reason, StartFailed, WireError
from kernel_provisioner.paths import StateDirs
from kernel_provisioner.records import sweep

SEND_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 8.0
"""How long an orderly teardown may take before the supervisor is killed."""

# What a supervisor may see of the server's environment: enough to find programs and, for the
# systemd scope, the user's session bus. Everything else could carry credentials.
_PASSED_ENVIRONMENT = ("PATH", "HOME", "LANG", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")

_T = TypeVar("_T")


class Supervision:
    """A supervisor from its start to its end; what it told stays readable afterwards.

    ``process`` is None once it is gone. ``ended`` says how the guest ended, ``memory_warning``
    that it came near its limit, ``unsaved`` is a receipt that could not be stored.
    """

    def __init__(self, log: Logger | LoggerAdapter[Any]) -> None:
        """Start the process. Raises StartFailed."""
        self.process: subprocess.Popen[bytes] | None
        self.ended: dict[str, Any] | None = None
        self.memory_warning: dict[str, Any] | None = None
        self.unsaved: dict[str, Any] | None = None
        self._log = log
        self._reader = wire.FrameReader()
        self._inbox: list[dict[str, Any]] = []
        self.process, self._sock = _spawn()

    # -- control socket ------------------------------------------------------------------------

    async def start(self, message: Mapping[str, Any]) -> None:
        """Send the request for a session. Raises StartFailed."""
        assert self._sock is not None
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await asyncio.get_running_loop().sock_sendall(self._sock, wire.encode(message))
        except (OSError, TimeoutError):
            raise StartFailed("the supervisor died at once.", phase="start") from None

    async def tell(self, op: str, **fields: object) -> None:
        """Send a message; one that is gone or does not read is not an error here."""
        if self._sock is None:
            return
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.get_running_loop().sock_sendall(
                    self._sock, wire.encode({"op": op, **fields})
                )

    async def next_message(self) -> dict[str, Any]:
        """Return the next message; end of file comes as ``gone``."""
        assert self._sock is not None
        while not self._inbox:
            try:
                data = await asyncio.get_running_loop().sock_recv(self._sock, 65536)
            except OSError:
                data = b""
            if not self._feed(data):
                return {"op": "gone"}
        return self._inbox.pop(0)

    def drain(self) -> None:
        """Read what has arrived without waiting: sync managers run no loop between calls."""
        if self._sock is None:
            return
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    data = self._sock.recv(65536)
                except BlockingIOError:
                    raise
                except OSError:
                    data = b""
                if not self._feed(data):
                    return

    def _feed(self, data: bytes) -> bool:
        """Take bytes of the supervisor; False at its end."""
        if not data:
            self._lost()
            return False
        try:
            messages = self._reader.feed(data)
        except WireError:
            self._lost()
            return False
        for message in messages:
            self._note(message)
            self._inbox.append(message)
        return True

    def _note(self, message: dict[str, Any]) -> None:
        match message.get("op"):
            case "ended":
                self.ended = message
            case "memory_warning":
                self.memory_warning = message
                held, limit = message["held_bytes"], message["limit_bytes"]
                self._log.warning("The memory of a sandbox is at %s of %s bytes.", held, limit)
            case "gone" if isinstance(told := message.get("unsaved"), dict):
                # The receipt's file could not be written: this is all that there is of it.
                self.unsaved = told
                self._log.error("The receipt of the sandbox could not be stored on this host.")

    def _lost(self) -> None:
        if self.ended is None:
            end = ENDS[Reason.GUEST_LOST]
            self.ended = {
                "reason": Reason.GUEST_LOST.value,
                "class": end.kind,
                "message": end.text.format(how="its supervisor is gone"),
                "exit_status": end.exit_status,
                "status": None,
            }

    # -- end -----------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill the supervisor; its guest dies with it (spec B)."""
        if self.process is not None:
            self.process.kill()

    async def close(self, dirs: StateDirs) -> None:
        """Ask for the end and wait for it; kill one that hangs, and sweep what it left then."""
        process = self.process
        if process is None:
            return
        await self.tell("close")
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while process.poll() is None:
                    self.drain()
                    await asyncio.sleep(0.01)
        except TimeoutError:
            process.send_signal(signal.SIGKILL)
            await in_thread(process.wait)
        self.drain()
        if process.returncode != 0:
            await in_thread(partial(sweep, dirs))
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self.process = None


def _spawn() -> tuple[subprocess.Popen[bytes], socket.socket | None]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    environment = {name: os.environ[name] for name in _PASSED_ENVIRONMENT if name in os.environ}
    try:
        # -I: neither the working directory nor PYTHON* variables choose what code runs.
        process = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-m",
                "kernel_provisioner.session",
                str(theirs.fileno()),
            ],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=environment,
            cwd="/",
            # A terminal's Ctrl-C is for the client; the supervisor ends in its own order.
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        raise StartFailed(f"the supervisor did not start ({error.strerror}).") from None
    finally:
        theirs.close()
    ours.setblocking(False)
    return process, ours


async def in_thread(function: Callable[[], _T]) -> _T:
    """Run a blocking function in a thread of its own and return what it returns.

    Not ``asyncio.to_thread``: in a forked worker (a process pool that executes notebooks) the loop
    of jupyter_core's sync managers is a copy, and so is its executor, whose threads are not: the
    call would wait for ever. Polled, for the copy shares its wake-up socket with the parent's.
    """
    pool = ThreadPoolExecutor(max_workers=1)
    future = pool.submit(function)
    pool.shutdown(wait=False)
    while not future.done():
        await asyncio.sleep(0.002)
    return future.result()
