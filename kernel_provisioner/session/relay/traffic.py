"""Which of a guest's messages pass to a client, which of them are believed, and what they cost.

Responsible for the direction from guest to client (spec H3). The guest is hostile and knows the
key. What is no Jupyter message is a violation. What no kernel has a reason to send is dropped, and
nothing is learned from it: on shell and control all but the one reply to a request that waits on
this connection, on stdin all but the question of a running cell that allows it, on hb all but the
echo of a ping, and everywhere what is signed wrongly. Dropped or not, all of it is charged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kernel_provisioner.errors import Reason
from kernel_provisioner.session.relay.inspect import (
    COMM_TYPES,
    Envelope,
    MalformedMessage,
    RelayBounds,
    RelayMonitor,
    Signer,
    TooDeep,
    guest_content,
    parse_envelope,
)
from kernel_provisioner.session.relay.ledger import Ledger, Pending, answers
from kernel_provisioner.session.relay.meter import OutputMeter
from kernel_provisioner.session.relay.splice import Connection, Mode
from kernel_provisioner.session.relay.zmtp import Head, ZmtpError

_AFTER_EXCESS = frozenset({"status", "error"})

Decision = tuple[bool, Callable[[int], None] | None]
"""Whether a message is forwarded, and what to do at its end with its size in wire bytes."""


class GuestTraffic:
    """Judges the guest's messages of one session.

    ``notify`` shows a text in the cell of a request.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        signer: Signer,
        bounds: RelayBounds,
        monitor: RelayMonitor,
        notify: Callable[[str, str], None],
    ) -> None:
        self.meter = OutputMeter(bounds)
        self.dropped = 0
        self._ledger = ledger
        self._signer = signer
        self._bounds = bounds
        self._monitor = monitor
        self._notify = notify

    def head(self, connection: Connection, head: Head) -> Decision:
        """Judge a message by its held start. Raises ZmtpError for what is not Jupyter's."""
        if connection.channel == "hb":
            if connection.pings == 0:
                return self._drop(connection, "")
            connection.pings -= 1
            return True, None
        try:
            envelope = parse_envelope(head.frames, self._bounds)
            entry = self._ledger.find(envelope.parent_id)
            content = self._content(connection, envelope, entry, complete=head.complete)
        except MalformedMessage as error:
            raise ZmtpError(str(error)) from None
        msg_id = envelope.parent_id if entry is not None else ""
        if content is None or not self._signer.believable(envelope):
            return self._drop(connection, msg_id)
        if connection.channel == "iopub":
            return self._publication(connection, envelope, msg_id, content, small=head.complete)
        if connection.channel == "stdin":
            if entry is None or not self._asks(connection, envelope, entry, small=head.complete):
                return self._drop(connection, msg_id)
            return True, partial(self._charge, connection, msg_id, False)
        if entry is None or not answers(
            entry,
            envelope.msg_type,
            channel=connection.channel,
            connection=connection.number,
            identity=connection.identity,
        ):
            return self._drop(connection, msg_id)
        status = content.get("status")
        status = status if isinstance(status, str) and len(status) <= 32 else "unknown"
        return True, partial(self._replied, connection, entry, status)

    def _content(
        self, connection: Connection, envelope: Envelope, entry: Pending | None, *, complete: bool
    ) -> dict[str, Any] | None:
        """Return the content; None if it is a publication that only nests too deep."""
        try:
            return guest_content(envelope, self._bounds, complete=complete)
        except TooDeep:
            if connection.channel != "iopub":
                raise
            limit = self._bounds.content_depth
            self._tell(entry, f"an output is not shown: its JSON nests deeper than {limit} levels")
            return None

    def _drop(self, connection: Connection, msg_id: str) -> Decision:
        self.dropped += 1
        return False, partial(self._charge, connection, msg_id, False)

    # ---- shell and control

    def _replied(self, connection: Connection, entry: Pending, status: str, size: int) -> None:
        """A reply was forwarded in full."""
        self._charge(connection, entry.request.msg_id, False, size)
        entry.replied = True
        self._resolve(entry, status)

    def _resolve(self, entry: Pending, status: str) -> None:
        if self._ledger.resolve(entry):
            self._monitor.replied(entry.request.msg_id, status)

    # ---- stdin

    def _asks(
        self, connection: Connection, envelope: Envelope, entry: Pending, *, small: bool
    ) -> bool:
        """Take a question to the person; return whether it is one that may be asked."""
        msg_id = entry.request.msg_id
        if (
            envelope.msg_type != "input_request"
            or msg_id not in self._ledger.pending
            or entry.request.msg_type != "execute_request"
            or not entry.allow_stdin
            or entry.identity != connection.identity
            or connection.mode is not Mode.BRIDGED
        ):
            return False
        bounds = self._bounds
        fault = (
            f"its prompt has more than {bounds.parser.hold_bytes} bytes"
            if not small
            else f"{bounds.open_inputs} earlier questions have no answer"
            if entry.open_inputs >= bounds.open_inputs
            else f"this cell asked {bounds.cell_inputs} times already"
            if entry.inputs >= bounds.cell_inputs
            else ""
        )
        if fault:
            self._tell(entry, f"input() is not passed on: {fault}; interrupt the cell")
            return False
        entry.inputs += 1
        entry.open_inputs += 1
        connection.inputs.add(msg_id)
        self._monitor.input_requested(msg_id)
        return True

    def input_answered(self, msg_id: str) -> None:
        """The person answered a request's questions, or went away."""
        entry = self._ledger.find(msg_id)
        if entry is not None:
            entry.open_inputs = 0
        self._monitor.input_replied(msg_id)

    # ---- iopub

    def _publication(
        self,
        connection: Connection,
        envelope: Envelope,
        msg_id: str,
        content: Mapping[str, Any],
        *,
        small: bool,
    ) -> Decision:
        kind = envelope.msg_type
        if self.meter.exceeded(msg_id) and not (
            kind in _AFTER_EXCESS and small and self.meter.take_late(msg_id)
        ):
            # Its consequence is on the way; the host takes no more of it.
            return self._drop(connection, msg_id)
        if msg_id and kind == "status":
            self._status(connection, msg_id, content.get("execution_state"))
        elif msg_id and kind == "execute_input":
            self._ledger.counted(msg_id, content.get("execution_count"))
        return True, partial(self._charge, connection, msg_id, kind == "stream")

    def _status(self, connection: Connection, msg_id: str, state: object) -> None:
        entry = self._ledger.pending.get(msg_id)
        if state == "busy" and entry is not None and not entry.started:
            entry.started = True
            self._monitor.started(msg_id)
        elif state == "idle":
            connection.idled.add(msg_id)
            if len(connection.idled) > 2 * len(self._ledger.recent):
                connection.idled.intersection_update(self._ledger.recent)
            if entry is not None and entry.request.msg_type in COMM_TYPES:
                self._resolve(entry, "idle")

    # ---- cost

    def _charge(self, connection: Connection, msg_id: str, text: bool, size: int) -> None:
        """A message is over: charge it to its request."""
        if connection.channel == "iopub":
            detail = self.meter.publish(
                connection.number, msg_id, size=size, text=size if text else 0
            )
        else:
            detail = self.meter.charge(msg_id, size=size)
        if detail:
            self._notify(
                msg_id, f"\n{Reason.OUTPUT_LIMIT}: the sandbox stops this cell: {detail}.\n"
            )
            self._monitor.output_exceeded(msg_id, detail)

    def _tell(self, entry: Pending | None, text: str) -> None:
        """Show a notice in a request's cell, once."""
        if entry is not None and text not in entry.told:
            entry.told.add(text)
            self._notify(entry.request.msg_id, f"\nBackIntel sandbox: {text}.\n")
