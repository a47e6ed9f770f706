"""The supervisor process: ``python -I -m kernel_provisioner.session FD``, FD its control socket.

A start waits for nothing that a launch does not need. So the request is read and the guest launched
first; what the rest of the session needs, an event loop above all, is imported while the guest
boots beside this process (45 ms on the machine of docs/benchmarks.md).
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys

# Imports make many objects that live on; collecting among them is a tenth of their time.
gc.disable()

from kernel_provisioner import wire  # noqa: E402
from kernel_provisioner.errors import BackIntelError, WireError  # noqa: E402
from kernel_provisioner.session.opening import Opening  # noqa: E402
from kernel_provisioner.session.request import Start  # noqa: E402

_REQUEST_TIMEOUT_S = 10.0


def receive(sock: socket.socket, reader: wire.FrameReader) -> list[dict[str, object]]:
    """Return the first messages of the owner, none if it left. Raises OSError, WireError."""
    sock.settimeout(_REQUEST_TIMEOUT_S)
    messages: list[dict[str, object]] = []
    while not messages:
        data = sock.recv(65536)
        if not data:
            break
        messages = reader.feed(data)
    return messages


def main() -> None:
    """Open the session, then serve it to its end."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    os.umask(0o077)
    # A terminal's signals are for the client, whose end ends the session in its own order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    reader = wire.FrameReader()
    try:
        messages = receive(sock, reader)
        if not messages:
            return
        opening = Opening(Start.parse(messages.pop(0)))
    except (OSError, WireError):
        return
    except BackIntelError as error:
        wire.send(sock, {"op": "failed", "error": error.as_dict()})
        return
    opening.begin()

    from kernel_provisioner.session.supervisor import serve

    gc.freeze()
    gc.enable()
    serve(sock, reader, messages, opening)


main()
