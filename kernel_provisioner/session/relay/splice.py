"""One client connection and its own guest connection, joined byte for byte.

Responsible for moving bytes with bounded memory: each direction keeps at most one received chunk
(256 KiB), one held message start, and what the relay injects; a guest that does not read stops its
client from being read, and a client its guest once much is unread (``RelayBounds.unread_bytes``).
Guest bytes are hostile and pass the parser before anything is forwarded. A small message is
forwarded whole or not at all, so a guest that dies in one leaves no trace of it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING

from kernel_provisioner.session.relay import zmtp
from kernel_provisioner.session.relay.endpoint import Endpoint
from kernel_provisioner.session.relay.zmtp import (
    Command,
    Data,
    End,
    FrameParser,
    GreetingPart,
    Head,
    MessageTooLong,
    ZmtpError,
)

if TYPE_CHECKING:
    from kernel_provisioner.session.relay.service import Relay

_SERVER_TYPES = {
    "shell": b"ROUTER",
    "control": b"ROUTER",
    "stdin": b"ROUTER",
    "iopub": b"XPUB",
    "hb": b"ROUTER",
}
# Not SUBSCRIBE and CANCEL: libzmq hands those to the client's application like messages.
_GUEST_COMMANDS = frozenset({b"READY", b"ERROR", b"PING", b"PONG"})


class Mode(Enum):
    """What stands behind a client connection."""

    WAITING = auto()  # accepted; the guest is not verified yet, or is being dialled
    BRIDGED = auto()
    ORPHAN = auto()  # the guest's side closed; its failure is not declared yet
    LOCAL = auto()  # the guest is dead; the relay answers
    ZOMBIE = auto()  # the client left; the guest's replies are still observed
    CLOSED = auto()


class Connection:
    """A client connection of one channel with what stands behind it."""

    def __init__(
        self, relay: Relay, number: int, channel: str, sock: socket.socket, scratch: memoryview
    ) -> None:
        self._relay = relay
        self._scratch = scratch
        self.number = number
        self.channel = channel
        self.mode = Mode.WAITING
        self.identity = b""
        self.idled: set[str] = set()
        self.inputs: set[str] = set()  # requests whose questions on stdin wait for an answer
        self.pings = 0  # on hb, not echoed yet
        bounds = relay.bounds.heartbeat if channel == "hb" else relay.bounds.parser
        self._from_client = FrameParser(bounds)
        self._from_guest = FrameParser(bounds)
        self._to_client: list[bytes | memoryview] = []
        self._to_guest: list[bytes | memoryview] = []
        self._injections: list[bytes] = []
        self._feeding = False
        self._drop_request = False
        self._drop_output = False
        self._after: Callable[[int], None] | None = None  # at the end of a streamed guest message
        self._stall: asyncio.TimerHandle | None = None
        self._orphaned: asyncio.TimerHandle | None = None
        self.guest: Endpoint | None = None
        self.client = Endpoint(
            sock,
            scratch,
            on_data=self._client_data,
            on_gone=self.client_gone,
            on_drained=self._client_drained,
        )

    # ---- transitions

    def bridge(self, sock: socket.socket) -> None:
        """Join the client with a connected guest socket."""
        self.mode = Mode.BRIDGED
        self.guest = Endpoint(
            sock,
            self._scratch,
            on_data=self._guest_data,
            on_gone=self._guest_gone,
            on_drained=self.client.resume,
        )
        self.guest.resume()
        self.client.resume()
        self._arm_stall()

    def answer_locally(self) -> None:
        """The guest is dead: from here on the relay is the client's peer.

        A connection that stands inside a message cannot be used: it is closed, and the client's
        reconnect is answered instead.
        """
        if self.mode is Mode.ZOMBIE:
            self._end(Mode.CLOSED)
            return
        if self.mode in (Mode.BRIDGED, Mode.ORPHAN, Mode.WAITING):
            fresh = self._from_guest.untouched  # the client heard nothing: greet it ourselves
            usable = fresh or (self._at_boundary and self._from_client.ready)
            self._drop_guest()
            if not usable:
                self._relay.closed_inside_message(self)
                self._end(Mode.CLOSED)
                return
            self.mode = Mode.LOCAL
            if fresh:
                self.client.write(zmtp.GREETING)
            self.client.resume()

    @property
    def _at_boundary(self) -> bool:
        """True if a whole message may follow what the client got."""
        return self._from_guest.at_boundary or self._drop_output

    @property
    def answering(self) -> bool:
        """True once the local peer's handshake is over."""
        return self.mode is Mode.LOCAL and self._from_client.ready

    @property
    def can_deliver(self) -> bool:
        """True if an injected message will reach the client in its turn."""
        if self.mode is Mode.LOCAL:
            return self._from_client.ready
        return self.mode in (Mode.BRIDGED, Mode.ORPHAN) and self._from_guest.ready

    def inject(self, raw: bytes) -> None:
        """Send a whole message of our own, now or after the message that is on its way."""
        if not self.can_deliver:
            return
        if self.mode is Mode.BRIDGED and not self._at_boundary:
            self._injections.append(raw)
            return
        self._to_client.append(raw)
        if not self._feeding:
            self._flush_to_client()

    def close(self) -> None:
        """Close both sides at once."""
        if self.guest is not None:
            self.guest.close()
        self.client.close()
        self._end(Mode.CLOSED)

    def client_gone(self) -> None:
        """The client left. Replies to what it asked still end clocks: watch for them."""
        self._end_inputs()
        if self.mode is Mode.BRIDGED and self._relay.ledger.waits(self.number):
            self.mode = Mode.ZOMBIE
            self.client.close()
            if self.guest is not None:
                self.guest.resume()
        else:
            self._end(Mode.CLOSED)

    def _guest_gone(self) -> None:
        if self.mode is Mode.ZOMBIE:
            self._end(Mode.CLOSED)
        elif self.mode is Mode.BRIDGED:
            usable = self._at_boundary and self._from_client.ready
            self._drop_guest()
            if not usable:
                self._relay.closed_inside_message(self)
                self._end(Mode.CLOSED)
                return
            self.mode = Mode.ORPHAN
            loop = asyncio.get_running_loop()
            self._orphaned = loop.call_later(self._relay.bounds.orphan_s, self._orphan_timeout)

    def _orphan_timeout(self) -> None:
        """Nobody declared the guest dead: let the client reconnect, as it would without us."""
        if self.mode is Mode.ORPHAN:
            self._end(Mode.CLOSED)

    def _drop_guest(self) -> None:
        if self.guest is not None:
            self.guest.close()
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if self._orphaned is not None:
            self._orphaned.cancel()

    def _end(self, mode: Mode) -> None:
        if self.mode is Mode.CLOSED:
            return
        self.mode = mode
        self._end_inputs()
        timeout = self._relay.bounds.dial_s
        self.client.finish(timeout)
        if self.guest is not None:
            self.guest.finish(timeout)
        for timer in (self._stall, self._orphaned):
            if timer is not None:
                timer.cancel()
        self._relay.ended(self)

    def answered_input(self) -> None:
        """The person answered on stdin: whatever waited for it goes on."""
        self._end_inputs()

    def _end_inputs(self) -> None:
        for msg_id in self.inputs:
            self._relay.input_answered(msg_id)
        self.inputs.clear()

    # ---- client to guest

    def _client_data(self, view: memoryview) -> None:
        try:
            for event in self._from_client.feed(view):
                self._client_event(event)
        except ZmtpError as error:
            self._relay.client_fault(self, str(error))
            self._to_guest.clear()
            self.client.close()
            self.client_gone()
            return
        data = _joined(self._to_guest)
        if data is not None and self.guest is not None and self.mode is Mode.BRIDGED:
            self.guest.write(data)
            if self.guest.backlog:
                self.client.pause()

    def _client_event(self, event: zmtp.Event) -> None:
        if isinstance(event, Data):
            if not self._drop_request:
                self._to_guest.append(event.data)
        elif isinstance(event, Head):
            self._drop_request = not self._relay.client_head(self, event)
            if not self._drop_request:
                self._to_guest.append(event.raw)
        elif isinstance(event, GreetingPart):
            self._to_guest.append(event.data)
        elif isinstance(event, Command):
            self._client_command(event)
        else:
            self._drop_request = False

    def _client_command(self, command: Command) -> None:
        if command.name == b"READY":
            self.identity = zmtp.parse_properties(command.body).get(b"identity", b"")
            if self.mode is Mode.LOCAL:
                self.client.write(zmtp.encode_ready(_SERVER_TYPES[self.channel]))
                self._relay.local_ready(self)
        elif command.name == b"PING" and self.mode is Mode.LOCAL:
            self._to_client.append(zmtp.encode_command(b"PONG", command.body[2:]))
            self._flush_to_client()
        self._to_guest.append(command.raw)

    # ---- guest to client

    def _guest_data(self, view: memoryview) -> None:
        self._feeding = True
        try:
            for event in self._from_guest.feed(view):
                self._guest_event(event)
        except ZmtpError as error:
            self._feeding = False
            self._flush_to_client()
            if self.guest is not None:
                self.guest.close()
            self._guest_gone()
            if isinstance(error, MessageTooLong):
                self._relay.oversized(self.channel, str(error))
            else:
                self._relay.violation(self.channel, str(error))
            return
        self._feeding = False
        self._flush_to_client()
        if self.mode is Mode.ZOMBIE and not self._relay.ledger.waits(self.number):
            self._end(Mode.CLOSED)
        elif self._stall is None:
            self._arm_stall()

    def _guest_event(self, event: zmtp.Event) -> None:
        if isinstance(event, Data):
            if not self._drop_output:
                self._to_client.append(event.data)
        elif isinstance(event, Head):
            wanted, self._after = self._relay.guest_head(self, event)
            self._drop_output = not wanted
            if wanted:
                self._to_client.append(event.raw)
            if event.complete:
                self._message_over(len(event.raw))
            elif not wanted:
                self._release_injections()
        elif isinstance(event, End):
            self._message_over(event.size)
        elif isinstance(event, GreetingPart):
            self._to_client.append(event.data)
        else:
            if event.name not in _GUEST_COMMANDS:
                raise ZmtpError(f"unexpected command {event.name[:32]!r}")
            self._to_client.append(event.raw)

    def _message_over(self, size: int) -> None:
        self._drop_output = False
        self._relay.counts["guest_messages"] += 1
        after, self._after = self._after, None
        if after is not None:
            after(size)
        self._release_injections()

    def _release_injections(self) -> None:
        self._to_client.extend(self._injections)
        self._injections.clear()

    def _flush_to_client(self) -> None:
        data = _joined(self._to_client)
        if data is None or self.mode is Mode.ZOMBIE:
            return
        self.client.write(data)
        if self.client.backlog and self.guest is not None and self._relay.much_is_unread():
            self.guest.pause()

    def _client_drained(self) -> None:
        if self.guest is not None:
            self.guest.resume()

    # ---- a guest that rests inside something it owes

    def _arm_stall(self) -> None:
        if self.mode in (Mode.BRIDGED, Mode.ZOMBIE) and self._from_guest.partial:
            loop = asyncio.get_running_loop()
            due = loop.time() + self._relay.bounds.stall_s
            self._stall = loop.call_at(due, self._check_stall, due, self._progress())

    def _progress(self) -> tuple[int, int]:
        """What must have changed: bytes only count inside a message too long to be held."""
        parser = self._from_guest
        received = self.guest.received if self.guest is not None else 0
        return parser.messages, received if parser.streaming else -1

    def _check_stall(self, due: float, before: tuple[int, int]) -> None:
        self._stall = None
        on_time = asyncio.get_running_loop().time() - due < 1.0  # else we were stopped, not it
        reading = self.guest is not None and self.guest.reading  # else the client is slow
        greeted = self._from_client.ready  # else the client is
        if (
            on_time
            and reading
            and greeted
            and self._from_guest.partial
            and before == self._progress()
        ):
            if self.guest is not None:
                self.guest.close()
            self._guest_gone()
            self._relay.violation(self.channel, "the guest does not finish what it began to send")
        else:
            self._arm_stall()


def _joined(parts: list[bytes | memoryview]) -> bytes | memoryview | None:
    """Take the collected parts as one buffer: one system call instead of many."""
    if not parts:
        return None
    data = parts[0] if len(parts) == 1 else b"".join(parts)
    parts.clear()
    return data
