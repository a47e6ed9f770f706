"""How much a guest sent for each request, over all channels, against the bounds of spec H3.

Responsible for the arithmetic alone; whoever charges it decides what passes. The guest sends each
publication to every iopub connection, which is one output, not several: each connection has a
place in a request's output, and the farthest place counts. A new connection begins at the farthest,
so that a guest gains nothing by closing connections for clients to make them anew.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace

from kernel_provisioner.session.relay.inspect import RelayBounds
from kernel_provisioner.session.relay.ledger import RECENT

_LATE = 1000
"""Messages of a request that still pass after its excess, for all connections together."""


@dataclass(slots=True)
class _Usage:
    size: int = 0
    text: int = 0
    messages: int = 0

    def add(self, size: int, text: int) -> None:
        self.size += size
        self.text += text
        self.messages += 1

    def reach(self, place: _Usage) -> None:
        self.size = max(self.size, place.size)
        self.text = max(self.text, place.text)
        self.messages = max(self.messages, place.messages)


@dataclass(slots=True)
class OutputMeter:
    """Counts one session's traffic for each request.

    What belongs to no known request (id ``""``) is counted together, since the last request.
    """

    bounds: RelayBounds
    _published: dict[str, _Usage] = field(default_factory=dict)
    _direct: dict[str, _Usage] = field(default_factory=dict)  # on all other channels
    _places: dict[int, dict[str, _Usage]] = field(default_factory=dict)
    _late: dict[str, int] = field(default_factory=dict)  # of requests in excess

    def join(self, connection: int) -> None:
        """An iopub connection begins."""
        self._places[connection] = {key: replace(used) for key, used in self._published.items()}

    def leave(self, connection: int) -> None:
        """A connection is over; what it got stays counted."""
        self._places.pop(connection, None)

    def exceeded(self, msg_id: str) -> bool:
        """Return whether the request's traffic already passed a bound."""
        return msg_id in self._late

    def take_late(self, msg_id: str) -> bool:
        """Return whether one more small message may pass after the excess, and count it."""
        self._late[msg_id] += 1
        return self._late[msg_id] <= _LATE

    def publish(self, connection: int, msg_id: str, *, size: int, text: int) -> str:
        """Charge an iopub message of ``size`` bytes, ``text`` of them stream text.

        Returns what was passed by it for the first time, or an empty text.
        """
        place = self._places[connection].setdefault(msg_id, _Usage())
        place.add(size, text)
        self._published.setdefault(msg_id, _Usage()).reach(place)
        return self._check(msg_id)

    def charge(self, msg_id: str, *, size: int) -> str:
        """Charge a message of another channel; returns as ``publish`` does."""
        self._direct.setdefault(msg_id, _Usage()).add(size, 0)
        return self._check(msg_id)

    def new_request(self, known: Container[str]) -> None:
        """A request begins: output of no request is counted anew; forgotten ones are dropped."""
        self._late.pop("", None)
        for table in (self._published, self._direct, *self._places.values()):
            table.pop("", None)
            if len(table) > 2 * RECENT:
                for key in [key for key in table if key not in known]:
                    del table[key]
                    self._late.pop(key, None)

    def _check(self, msg_id: str) -> str:
        if msg_id in self._late:
            return ""
        bounds = self.bounds
        published = self._published.get(msg_id, _NOTHING)
        direct = self._direct.get(msg_id, _NOTHING)
        if published.size + direct.size > bounds.cell_bytes:
            found = f"more than {bounds.cell_bytes / 2**20:g} MiB of output"
        elif published.text > bounds.cell_text_bytes:
            found = f"more than {bounds.cell_text_bytes / 2**20:g} MiB of stream text"
        elif published.messages + direct.messages > bounds.cell_messages:
            found = f"more than {bounds.cell_messages} output messages"
        else:
            return ""
        self._late[msg_id] = 0
        return found


_NOTHING = _Usage()
