"""First program of a microVM: makes the kernel's enclosure and serves the host beside it.

Root in the microVM, outside the enclosure and therefore out of the kernel's reach. It trusts the
host, which alone can connect to its socket, and nothing that happens in the enclosure after the
``go``. Protocol (wire.py): the host opens connections and names their purpose in a first frame,
``{"v": 1, "role": "control"}`` (answered ``{"v": 1}``), ``"artifacts"`` (answered by a tar stream)
or ``"listing"`` (answered by export.py's records). The first control connection that is used after
its answer is the only one for life: a host that asked too early asks again, and what it gave up
ends nothing. Frames to the agent carry ``op``: ``plan``, ``endpoints``, ``go``, ``signal``,
``kill``, ``freeze``, ``thaw``; frames from it carry ``attest``, ``endpoints``, ``ready``,
``failed``, ``sample``, ``frozen``, ``thawed`` or ``exited``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import enclosure
import endpoints
import export
import standstill
import wire

DIRECTORY = "/run/backintel"
_SAMPLE_S = 1.0
_KEPT = 16384
_NAMESPACES = ("mnt", "pid", "net", "ipc", "uts", "cgroup")


def _listen(path: str, backlog: int) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(path)
    os.chmod(path, 0o600)
    sock.listen(backlog)
    return sock


def _meminfo() -> dict[str, int]:
    with open("/proc/meminfo") as file:
        return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}


def _oom_kills() -> int:
    with open("/proc/vmstat") as file:
        pairs = dict(line.split() for line in file)
    return int(pairs.get("oom_kill", "0"))


def _interfaces() -> list[str]:
    with open("/proc/self/net/dev") as file:
        return [line.split(":", 1)[0].strip() for line in file.readlines()[2:]]


class Agent:
    """The state of one microVM: at most one control connection and one kernel."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._host: socket.socket | None = None
        self._adopting = threading.Lock()
        self._telling = threading.Lock()
        self._standstill = standstill.Standstill(self._tell)
        self._init: socket.socket | None = None
        self._first = 0
        self._first_fd = -1
        self._kernel = 0
        self._kernel_fd = -1
        self._artifacts = -1
        self._max_export = 0
        self._uid = -1
        self._printed = bytearray()
        self._report = -1
        self._targets = -1
        self._oom_before = _oom_kills()
        self._next_sample = time.monotonic() + _SAMPLE_S

    def serve(self) -> None:
        """Serve until the host's control connection ends; then the microVM is of no use."""
        os.makedirs(DIRECTORY, 0o700, exist_ok=True)
        listener = _listen(f"{DIRECTORY}/agent", 16)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        while True:
            timeout = max(0.0, self._next_sample - time.monotonic())
            for key, _ in self._selector.select(timeout):
                key.data()
            if time.monotonic() >= self._next_sample:
                self._next_sample = time.monotonic() + _SAMPLE_S
                if self._first:
                    self._tell({"sample": self._sample()})

    def _tell(self, message: Mapping[str, object]) -> None:
        if self._host is not None:
            try:
                with self._telling:
                    wire.send(self._host, message)
            except OSError:
                os._exit(0)

    def _accept(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        threading.Thread(target=self._greet, args=(sock,), daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        """Read the first frame of a connection, off the loop: the peer may be slow."""
        with contextlib.suppress(OSError, ValueError, wire.WireError, export.Truncated):
            hello = wire.receive(sock)
            if hello.get("v") != wire.VERSION:
                sock.close()
            elif hello.get("role") == "control" and self._host is None:
                wire.send(sock, {"v": wire.VERSION})
                if sock.recv(1, socket.MSG_PEEK) and self._adopt(sock):
                    return
            elif hello.get("role") == "artifacts" and self._artifacts >= 0:
                export.Export(sock, self._max_export).send(self._artifacts)
            elif hello.get("role") == "listing" and self._artifacts >= 0:
                sock.sendall(export.listing(self._artifacts))
        sock.close()

    def _adopt(self, sock: socket.socket) -> bool:
        """Take this connection for the host's, unless there is one already."""
        with self._adopting:
            if self._host is not None:
                return False
            self._host = sock
        self._selector.register(sock, selectors.EVENT_READ, self._from_host)
        return True

    def _from_host(self) -> None:
        assert self._host is not None
        try:
            message = wire.receive(self._host)
        except (OSError, ValueError, wire.WireError):
            # The host is gone or closed the session: the whole microVM ends with this process.
            os._exit(0)
        match message.get("op"):
            case "plan":
                self._enclose(message)
            case "endpoints":
                self._open_endpoints(message["endpoints"])
            case "go" if self._init is not None:
                go = {name: message[name] for name in ("connection", "environment")}
                wire.send(self._init, go)
            case "signal":
                self._signal(int(str(message["signum"])), str(message["msg_id"]))
            case "kill":
                self._kill()
            case "freeze":
                hold, seconds = int(str(message["hold"])), float(str(message["seconds"]))
                self._standstill.freeze(hold, seconds)
            case "thaw":
                self._standstill.thaw()

    def _enclose(self, plan: Mapping[str, Any]) -> None:
        listeners = {
            name: _listen(f"{DIRECTORY}/{port}", 128)
            for port, name in enumerate(plan["channels"], start=1)
        }
        ours, theirs = socket.socketpair()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        output, output_end = os.pipe()
        self._report, report_end = os.pipe()
        self._uid = plan["uid"]
        self._max_export = plan["max_export"]
        numbers = {name: sock.fileno() for name, sock in listeners.items()}
        targets, self._targets = os.pipe()
        os.set_blocking(self._targets, False)
        init = {
            "control": theirs.fileno(),
            "listeners": numbers,
            "targets": targets,
            "rlimits": plan["rlimits"],
            "tmpfs": list(plan["tmpfs"]),
        }
        argv = [*plan["argv"], json.dumps(init, separators=(",", ":"))]
        group = self._standstill.prepare()
        inherited = [*numbers.values(), targets]
        self._first = enclosure.enclose(
            {**plan, "argv": argv}, theirs, inherited, output_end, report_end, group
        )
        if group >= 0:
            os.close(group)
            self._standstill.enclosed(self._first)
        os.close(targets)
        for sock in listeners.values():
            sock.close()
        theirs.close()
        os.close(output_end)
        os.close(report_end)
        self._init = ours
        self._selector.register(ours, selectors.EVENT_READ, self._from_init)
        os.set_blocking(output, False)
        self._selector.register(output, selectors.EVENT_READ, lambda: self._drain(output))
        self._selector.register(self._report, selectors.EVENT_READ, self._ended)
        if self._first:
            self._first_fd = os.pidfd_open(self._first)

    def _open_endpoints(self, asked: Any) -> None:
        """Have connections to these addresses led to the host; answer once they are taken."""
        try:
            forwarder = endpoints.offer(self._first_fd, asked)
        except OSError as error:
            self._tell({"failed": f"no endpoint can be offered: {error}"})
            return

        def answer() -> None:
            if forwarder.recv(1):
                self._tell({"endpoints": True})
            else:
                self._selector.unregister(forwarder)
                self._tell({"failed": "the endpoints' forwarder ended"})

        # For life: it ends when this connection is closed, which is with this process.
        self._selector.register(forwarder, selectors.EVENT_READ, answer)

    def _from_init(self) -> None:
        """Pass on what the kernel's process says before user code runs."""
        assert self._init is not None
        try:
            credentials = self._sender()
            message = wire.receive(self._init)
        except (OSError, ValueError, wire.WireError):
            self._selector.unregister(self._init)
            self._init.close()
            self._init = None
            return
        if "attest" in message:
            self._kernel = credentials
            self._kernel_fd = os.pidfd_open(credentials)
            path = f"/proc/{credentials}/root/artifacts"
            self._artifacts = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            message = {**message, "vm": self._facts()}
        self._tell(message)

    def _sender(self) -> int:
        """Return the pid of the next frame's sender as the kernel states it, in our namespace."""
        assert self._init is not None
        _, ancillary, _, _ = self._init.recvmsg(1, socket.CMSG_SPACE(12), socket.MSG_PEEK)
        for level, kind, value in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                return int(struct.unpack("3i", value)[0])
        raise wire.WireError("the enclosure closed its connection.")

    def _facts(self) -> dict[str, object]:
        name = os.uname()
        return {
            "kernel": name.release,
            "machine": name.machine,
            "memory_bytes": _meminfo()["MemTotal"],
            "cpus": os.cpu_count(),
            "interfaces": _interfaces(),
            "namespaces": enclosure.namespaces(_NAMESPACES),
            "time": time.time(),
        }

    def _signal(self, signum: int, msg_id: str) -> None:
        if self._kernel_fd < 0 or not self._first:
            return
        if msg_id:
            # A kernel that does not read them fills the pipe: then any request is interrupted.
            with contextlib.suppress(OSError):
                name = hashlib.sha256(msg_id.encode()).hexdigest()
                os.write(self._targets, f"{name}\n".encode())
        try:
            # The pidfd first: while it answers, the number of the group cannot be another's.
            signal.pidfd_send_signal(self._kernel_fd, 0)
            os.killpg(self._kernel, signum)
        except ProcessLookupError:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._kernel_fd, signum)

    def _kill(self) -> None:
        if self._first_fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first_fd, signal.SIGKILL)

    def _drain(self, fd: int) -> None:
        """Keep the last of what the enclosure prints, for a failed start's message."""
        data = os.read(fd, 65536)
        self._printed += data
        del self._printed[:-_KEPT]
        if not data:
            self._selector.unregister(fd)
            os.close(fd)

    def _ended(self) -> None:
        """The enclosure is gone, or going: wait for its process 1, then say how it ended."""
        text = os.read(self._report, 4096).decode(errors="replace")
        self._selector.unregister(self._report)
        if self._first:
            os.waitpid(self._first, 0)
        self._first = 0
        kind, _, rest = text.partition(" ")
        status = os.waitstatus_to_exitcode(int(rest)) if kind == "exit" else -signal.SIGKILL
        if kind == "fail":
            self._tell({"failed": rest})
        self._tell(
            {
                "exited": status,
                "oom_kills": _oom_kills() - self._oom_before,
                "printed": self._printed.decode(errors="replace"),
            }
        )

    def _sample(self) -> dict[str, object]:
        memory = _meminfo()
        return {
            "memory_bytes": memory["MemTotal"] - memory["MemAvailable"],
            "tasks": self._tasks(),
            "oom_kills": _oom_kills() - self._oom_before,
        }

    def _tasks(self) -> int:
        """Count the threads of the kernel's user."""
        count = 0
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):
                    if os.stat(f"/proc/{name}").st_uid == self._uid:
                        count += len(os.listdir(f"/proc/{name}/task"))
        return count


def main() -> None:
    """Protect this process from the enclosure's appetite, then serve."""
    os.umask(0o077)
    enclosure.become_subreaper()
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("-1000")
    os.setpriority(os.PRIO_PROCESS, 0, -20)
    Agent().serve()


main()
