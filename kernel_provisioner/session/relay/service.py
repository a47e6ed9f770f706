"""The relay of one session: sockets for clients, their requests, answers in the guest's place.

Responsible for who may ask what (by its monitor), for knowing which requests wait, and for telling
their clients when the guest is dead; ``traffic`` judges what the guest sends. Clients are trusted
as far as the session's 0700 directory goes; the guest is not trusted at all. Everything runs on
one event loop and nothing blocks it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum, auto
from pathlib import Path

from kernel_provisioner.session.relay.endpoint import CHUNK, listen
from kernel_provisioner.session.relay.inject import Failure, Injector
from kernel_provisioner.session.relay.inspect import (
    COMM_TYPES,
    Envelope,
    MalformedMessage,
    RelayBounds,
    RelayMonitor,
    Signer,
    content_object,
    parse_envelope,
)
from kernel_provisioner.session.relay.ledger import Ledger, Pending, make_request
from kernel_provisioner.session.relay.splice import Connection, Mode
from kernel_provisioner.session.relay.traffic import Decision, GuestTraffic
from kernel_provisioner.session.relay.zmtp import Head
from kernel_provisioner.session.watchdog import Refuse

CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
_POLL_S = 0.004
_OBITUARIES = 1024  # endings that are told to an iopub client who comes after the guest's death
_log = logging.getLogger(__name__)


class State(Enum):
    """The life of a relay, in this order."""

    NEW = auto()
    WAITING = auto()
    OPEN = auto()
    DYING = auto()  # the guest is dead; what it had sent is still being delivered
    DEAD = auto()
    CLOSED = auto()


class Relay:
    """Five client sockets spliced to five guest sockets, one guest connection for each client's.

    ``client_paths`` and ``guest_paths`` map each name in CHANNELS to a Unix socket's path.
    """

    def __init__(
        self,
        *,
        client_paths: Mapping[str, Path],
        guest_paths: Mapping[str, Path],
        key: bytes,
        signature_scheme: str,
        monitor: RelayMonitor,
        bounds: RelayBounds,
    ) -> None:
        """Raises ValueError for an unknown signature scheme."""
        self.monitor = monitor
        self.bounds = bounds
        self.ledger = Ledger()
        self.counts = {"client_messages": 0, "guest_messages": 0, "refused": 0, "injected": 0}
        self._client_paths = dict(client_paths)
        self._guest_paths = dict(guest_paths)
        self._signer = Signer(key, signature_scheme)
        self._injector = Injector(self._signer)
        self._traffic = GuestTraffic(
            ledger=self.ledger,
            signer=self._signer,
            bounds=bounds,
            monitor=monitor,
            notify=self.notify,
        )
        self._state = State.NEW
        self._listeners: list[tuple[socket.socket, Path, int]] = []
        self._connections: dict[int, Connection] = {}
        self._dials: set[asyncio.Task[None]] = set()
        self._number = 0
        self._bytes = {"client_bytes": 0, "guest_bytes": 0}
        self._scratch = memoryview(bytearray(CHUNK))
        self._death: tuple[str, str] = ("", "")
        self._obituaries: deque[bytes] = deque(maxlen=_OBITUARIES)
        self._owed: dict[tuple[str, bytes], list[bytes]] = {}
        self._cut: list[tuple[str, bytes]] = []  # connections that we closed inside a message

    # ---- life

    async def start(self) -> None:
        """Bind and listen on the client sockets; connections wait until ``open``.

        Raises StartFailed if a path is too long or taken by something other than our own socket.
        """
        loop = asyncio.get_running_loop()
        self._state = State.WAITING
        for channel in CHANNELS:
            path = self._client_paths[channel]
            listener = listen(path)
            self._listeners.append((listener, path, path.lstat().st_ino))
            loop.add_reader(listener.fileno(), self._accept, listener, channel)

    def open(self) -> None:
        """The guest is verified: bridge what waits and what comes."""
        if self._state is State.WAITING:
            self._state = State.OPEN
            for connection in list(self._connections.values()):
                self._dial(connection)

    async def fail_pending(self, ename: str, evalue: str, *, timeout: float) -> int:
        """The guest is dead: end every waiting request with ``ename: evalue``; return how many.

        What the guest had sent is delivered first. Returns when clients have taken the messages,
        or after ``timeout`` seconds. From here on new requests get the same answer until ``close``.
        """
        if self._state in (State.DYING, State.DEAD, State.CLOSED):
            return 0
        self._state = State.DYING  # nobody is bridged any more: who comes now waits for the answer
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        for task in self._dials:
            task.cancel()
        await _until(self._guests_drained, loop.time() + timeout / 2)
        if self._state is not State.DYING:
            return 0  # closed meanwhile
        self._state = State.DEAD
        self._death = (ename, evalue)
        for connection in list(self._connections.values()):
            connection.answer_locally()
        failed = list(self.ledger.pending.values())
        self.ledger.pending.clear()
        failures = [(entry, self._failure(entry)) for entry in failed]
        self._obituaries.extend(failure.iopub for _, failure in failures)
        answered = {entry.request.msg_id for entry in failed}
        for connection in self._of("iopub"):
            for msg_id, entry in self.ledger.recent.items():
                # Replied, but this client never saw it become idle: its cell would wait for ever.
                if msg_id not in answered and msg_id not in connection.idled:
                    self._inject(connection, self._injector.idle(entry.header_raw))
            for blob in self._obituaries:
                self._inject(connection, blob)
        # A reply that overtakes its error output would be taken for the end of the cell.
        await _until(self._output_taken, loop.time() + timeout / 4)
        for entry, failure in failures:
            if failure.reply is not None:
                self._deliver_reply(entry, failure.reply)
        await _until(self._all_delivered, deadline)
        return len(failures)

    async def close(self) -> None:
        """Close every connection, bridged or not, and remove our own client sockets."""
        self._state = State.CLOSED
        loop = asyncio.get_running_loop()
        for task in list(self._dials):
            task.cancel()
        await asyncio.gather(*self._dials, return_exceptions=True)
        for listener, path, inode in self._listeners:
            loop.remove_reader(listener.fileno())
            listener.close()
            try:
                if path.lstat().st_ino == inode:
                    path.unlink()
            except FileNotFoundError:
                pass  # the session's directory may be gone already
        self._listeners.clear()
        for connection in list(self._connections.values()):
            connection.close()

    @property
    def stats(self) -> dict[str, int]:
        """Messages and bytes received from each side so far, refusals, injections, connections.

        ``dropped``: guest messages that no client had a reason to get.
        """
        totals = dict(self._bytes)
        for connection in self._connections.values():
            _add_bytes(totals, connection)
        dropped = self._traffic.dropped
        return {**self.counts, "dropped": dropped, **totals, "connections": self._number}

    def notify(self, msg_id: str, text: str) -> None:
        """Show ``text`` on stderr of a recent request's cell."""
        entry = self.ledger.find(msg_id)
        if entry is not None:
            for connection in self._of("iopub"):
                self._inject(connection, self._injector.notice(entry.header_raw, text))

    # ---- connections

    def _accept(self, listener: socket.socket, channel: str) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors: the client waits in the backlog
            _log.warning("relay: %s: cannot accept (%s)", channel, error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listener.fileno())
            loop.call_later(0.5, self._accept_again, listener, channel)
            return
        if len(self._connections) >= self.bounds.connections:
            _log.warning("relay: over %d connections, one refused", self.bounds.connections)
            sock.close()
            return
        sock.setblocking(False)
        self._number += 1
        connection = Connection(self, self._number, channel, sock, self._scratch)
        self._connections[self._number] = connection
        if self._state is State.OPEN:
            self._dial(connection)
        elif self._state is State.DEAD:
            connection.answer_locally()

    def _accept_again(self, listener: socket.socket, channel: str) -> None:
        if self._state is not State.CLOSED:
            loop = asyncio.get_running_loop()
            loop.add_reader(listener.fileno(), self._accept, listener, channel)

    def _dial(self, connection: Connection) -> None:
        task = asyncio.get_running_loop().create_task(self._connect_guest(connection))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _connect_guest(self, connection: Connection) -> None:
        """Connect to the guest; its backlog is small and may be full for a while (EAGAIN)."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.bounds.dial_s
        pause = 0.005
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.setblocking(False)
            try:
                sock.connect(str(self._guest_paths[connection.channel]))
            except OSError:
                sock.close()
            else:
                break
            if loop.time() >= deadline:
                connection.close()
                return
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.1)
        if connection.mode is Mode.WAITING and self._state is State.OPEN:
            if connection.channel == "iopub":
                self._traffic.meter.join(connection.number)
            connection.bridge(sock)
        else:
            sock.close()

    def ended(self, connection: Connection) -> None:
        """A connection is over."""
        if self._connections.pop(connection.number, None) is not None:
            _add_bytes(self._bytes, connection)
            self._traffic.meter.leave(connection.number)

    def _of(self, channel: str) -> list[Connection]:
        return [entry for entry in self._connections.values() if entry.channel == channel]

    # ---- client messages

    def client_fault(self, connection: Connection, detail: str) -> None:
        """A client broke the protocol; its connection is being closed."""
        _log.warning("relay: %s: client connection closed: %s", connection.channel, detail)

    def client_head(self, connection: Connection, head: Head) -> bool:
        """Look at a client's message; return whether it is forwarded."""
        self.counts["client_messages"] += 1
        if connection.channel in ("shell", "control"):
            return self._request(connection, head)
        if connection.channel == "stdin":
            connection.answered_input()
        elif connection.channel == "hb":
            connection.pings += 1
        return True

    def _request(self, connection: Connection, head: Head) -> bool:
        try:
            envelope = parse_envelope(head.frames, self.bounds)
        except MalformedMessage as error:
            _log.warning("relay: a client's message is dropped: %s", error)
            return False
        if not self._signer.believable(envelope):
            _log.warning("relay: a client's message is dropped: wrong signature")
            return False  # the kernel would drop it, and never answer
        content = content_object(envelope, self.bounds) if _asks_content(envelope) else {}
        request = make_request(
            envelope, content, channel=connection.channel, connection=connection.number
        )
        pending = Pending(
            request,
            envelope.header_raw,
            connection.identity,
            allow_stdin=content.get("allow_stdin", True) is True,
        )
        refusal = Refuse(*self._death) if self._state is State.DEAD else self.monitor.admit(request)
        if isinstance(refusal, Refuse):
            self._refuse(connection, pending, refusal)
            return False
        if _expects_end(envelope.msg_type):
            self.ledger.add(pending)
        self._traffic.meter.new_request(self.ledger.recent)
        return True

    def _refuse(self, connection: Connection, pending: Pending, refusal: Refuse) -> None:
        self.counts["refused"] += 1
        failure = self._failure(pending, refusal)
        if self._state is State.DEAD:
            self._obituaries.append(failure.iopub)
        for entry in self._of("iopub"):
            self._inject(entry, failure.iopub)
        if failure.reply is not None:
            self._inject(connection, failure.reply)

    # ---- guest messages

    def violation(self, channel: str, detail: str) -> None:
        """The guest broke the protocol on a connection, which is closed."""
        self.monitor.violation(f"{channel}: {detail}")

    def oversized(self, channel: str, detail: str) -> None:
        """A message was over the bound of spec H3; its connection is closed."""
        self.monitor.oversized(f"{channel}: {detail}")

    def guest_head(self, connection: Connection, head: Head) -> Decision:
        """Look at a guest's message. Raises ZmtpError for what is not a Jupyter message."""
        return self._traffic.head(connection, head)

    def input_answered(self, msg_id: str) -> None:
        """The client answered what a request asked on stdin, or went away."""
        self._traffic.input_answered(msg_id)

    # ---- answers in the guest's place

    def _failure(self, entry: Pending, refusal: Refuse | None = None) -> Failure:
        ename, evalue = (refusal.ename, refusal.evalue) if refusal else self._death
        return self._injector.failure(
            entry.header_raw,
            entry.request.msg_type,
            ename,
            evalue,
            entry.execution_count or self.ledger.last_count,
        )

    def _inject(self, connection: Connection, raw: bytes) -> None:
        self.counts["injected"] += 1
        connection.inject(raw)

    def _deliver_reply(self, entry: Pending, reply: bytes) -> None:
        connection = self._connections.get(entry.request.connection)
        if connection is not None and connection.can_deliver:
            self._inject(connection, reply)
            return
        # Its client reconnects under the same identity (READY), or will never ask for it.
        place = (entry.request.channel, entry.identity)
        for other in self._of(entry.request.channel):
            if other.identity == entry.identity and other.answering:
                self._inject(other, reply)
                return
        self._owed.setdefault(place, []).append(reply)

    def much_is_unread(self) -> bool:
        """Whether clients leave more unread than is kept for them."""
        unread = sum(connection.client.backlog for connection in self._connections.values())
        return unread > self.bounds.unread_bytes

    def closed_inside_message(self, connection: Connection) -> None:
        """A client connection cannot be used any more; its reconnect is owed the answers."""
        self._cut.append((connection.channel, connection.identity))

    def local_ready(self, connection: Connection) -> None:
        """A client (re)connected to a dead guest: deliver what it is owed.

        On iopub not only after it subscribed: libzmq filters again as it receives, and it repeats
        its subscriptions only when its application next uses the socket.
        """
        place = (connection.channel, connection.identity)
        if connection.channel == "iopub":
            for blob in self._obituaries:
                self._inject(connection, blob)
        for reply in self._owed.pop(place, []):
            self._inject(connection, reply)
        if place in self._cut:
            self._cut.remove(place)

    def _cut_channel(self, channel: str) -> bool:
        return any(name == channel for name, _ in self._cut)

    def _guests_drained(self) -> bool:
        """True once every guest connection reached its end."""
        return not any(
            entry.guest is not None and not entry.guest.closed
            for entry in self._connections.values()
            if entry.channel != "hb"
        )

    def _output_taken(self) -> bool:
        unread = any(connection.client.backlog for connection in self._of("iopub"))
        return not unread and not self._cut_channel("iopub")

    def _all_delivered(self) -> bool:
        waiting = any(entry.client.unread_by_peer() for entry in self._connections.values()) or any(
            self._cut_channel(channel) for channel in ("shell", "iopub", "control")
        )
        return not waiting


async def _until(condition: Callable[[], bool], deadline: float) -> None:
    """Wait for what has no event of its own (a peer having read), until the loop's ``deadline``."""
    loop = asyncio.get_running_loop()
    while not condition() and loop.time() < deadline:
        await asyncio.sleep(_POLL_S)


def _asks_content(envelope: Envelope) -> bool:
    return envelope.msg_type == "execute_request"


def _expects_end(msg_type: str) -> bool:
    return msg_type.endswith("_request") or msg_type in COMM_TYPES


def _add_bytes(totals: dict[str, int], connection: Connection) -> None:
    totals["client_bytes"] += connection.client.received
    totals["guest_bytes"] += connection.guest.received if connection.guest is not None else 0
