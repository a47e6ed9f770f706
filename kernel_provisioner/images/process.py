"""Steps of a preparation: what the person sees, and child processes that cannot outlive it.

Children are our own tools (apt-get, dpkg-deb, pip) and programs of the image being built. Their
output may hold addresses with credentials; only its redacted tail reaches an error.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from kernel_provisioner.errors import PrepareFailed

SPEAK_EVERY_S = 1.8
"""A running step says so this often, which keeps "at least every 2 s"."""

_POLL_S = 0.2
_TAIL_LINES = 12
_CREDENTIALS = re.compile(r"(://)[^/@\s]+@")


class Stopped(Exception):
    """Another step failed or the person interrupted; this one gave up."""


def redact(text: str) -> str:
    """Remove user names and passwords from addresses."""
    return _CREDENTIALS.sub(r"\1***@", text)


@dataclass(slots=True)
class Steps:
    """Says what is being done, from any thread, and holds the deadline (``time.monotonic``)."""

    progress: Callable[[str], None]
    deadline: float | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def say(self, text: str) -> None:
        """Tell the person one line; calls never overlap."""
        with self._lock:
            self.progress(text)

    def check(self) -> None:
        """Raise Stopped if others stopped, PrepareFailed if the deadline passed."""
        if self.stop.is_set():
            raise Stopped
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise PrepareFailed(
                "the preparation did not end within the time that remained.",
                remedy="run `backintel sandbox prepare` on its own, without a deadline.",
            )

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Announce a step, repeat it with the elapsed time, and say when it ended."""
        began = time.monotonic()
        over = threading.Event()

        def speak() -> None:
            while not over.wait(SPEAK_EVERY_S):
                self.say(f"{what} ... {time.monotonic() - began:.0f} s")

        self.check()
        self.say(what)
        speaker = threading.Thread(target=speak, name="prepare-progress", daemon=True)
        speaker.start()
        try:
            yield
        finally:
            over.set()
            speaker.join()
        self.say(f"{what}: done in {time.monotonic() - began:.1f} s")

    def run(
        self,
        command: Sequence[str],
        *,
        what: str,
        env: Mapping[str, str],
        cwd: Path | None = None,
        stdin: str = "",
        remedy: str = "",
    ) -> str:
        """Run a command to its end and return its output (both streams).

        Raises PrepareFailed with the last lines if it fails, Stopped if another step did.
        """
        with self.start(command, env=env, cwd=cwd, text_input=stdin) as child:
            output = child.finish()
        if child.status != 0:
            tail = redact("\n".join(output.splitlines()[-_TAIL_LINES:]))
            raise PrepareFailed(
                f"{what} failed ({_status(child.status)}). Its last words:\n{tail}\n",
                remedy=remedy,
            )
        return output

    @contextlib.contextmanager
    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        text_input: str = "",
        separate: bool = False,
    ) -> Iterator[Child]:
        """Start a command in its own session; its group is killed when the block is left early.

        ``setpriv`` makes the kernel end it if we are killed. With ``separate``, standard output is
        left to the caller (``Child.stdout``) and only errors are collected.
        """
        self.check()
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if separate else subprocess.STDOUT,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,
        )
        child = Child(self, process, separate)
        feeder = threading.Thread(target=_feed, args=(process, text_input), daemon=True)
        feeder.start()
        try:
            yield child
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            child.close()


def _feed(process: subprocess.Popen[bytes], text: str) -> None:
    stdin = process.stdin
    if stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            stdin.write(text.encode())
            stdin.close()


class Child:
    """A running command: collects its output in a thread, bounded to the last megabytes."""

    def __init__(self, steps: Steps, process: subprocess.Popen[bytes], separate: bool) -> None:
        self._steps = steps
        self._process = process
        self._chunks: deque[bytes] = deque(maxlen=256)
        pipe = process.stderr if separate else process.stdout
        if pipe is None:
            raise RuntimeError("the child was started without pipes")
        self._reader = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._reader.start()

    @property
    def stdout(self) -> BinaryIO:
        """The output stream of a ``separate`` child."""
        if self._process.stdout is None:
            raise RuntimeError("the child was started without pipes")
        return self._process.stdout  # type: ignore[return-value]

    @property
    def status(self) -> int | None:
        """Exit status, ``-signal``, or None while it runs."""
        return self._process.poll()

    def _read(self, pipe: BinaryIO) -> None:
        fd = pipe.fileno()
        while chunk := os.read(fd, 65536):
            self._chunks.append(chunk)

    def finish(self) -> str:
        """Wait for the end, minding the deadline, and return what was collected."""
        while True:
            try:
                self._process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                self._steps.check()
                continue
            self._reader.join(_POLL_S * 10)
            return b"".join(self._chunks).decode(errors="replace")

    def close(self) -> None:
        """Release the pipes of an ended child."""
        self._reader.join(_POLL_S * 10)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def _status(status: int | None) -> str:
    if status is None:
        return "still running"
    return f"status {status}" if status >= 0 else f"signal {-status}"
