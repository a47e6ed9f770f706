"""Forwards a guest's connections to the endpoints that the owner assigned, and to nothing else.

It takes listening sockets that the engine opened inside the guest (spec F1): which one a connection
came by decides where it goes, nothing that the guest sends does. The guest and what it sends are
hostile; the store is the owner's word. Bytes are copied, never read.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Any

from kernel_provisioner.endpoints import LOCALHOST, refused_address
from kernel_provisioner.engines.base import EndpointListener, GuestEndpoint
from kernel_provisioner.session.links import CHUNK, Framed, Plain, linger

MAX_CONNECTIONS = 32
"""At once, of all endpoints of a session (spec F2)."""
CONNECT_S = 10.0
"""How long a store may take to accept a connection."""
LAST_S = 0.5
"""How long what is on its way may take at the end of a session."""
_AHEAD = 2 << 20
"""Bytes of a microVM's connection that are read ahead of a store that does not read.

More than the window of ``guest/forward.py``: its monitor waits with all channels of its machine for
one socket that is not read, and never has to unless the guest itself breaks the rule.
"""
_BUFFER = 512 << 10
"""Bytes that the kernel keeps for each way of a connection to a store: it doubles them."""
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 3))
"""Seconds, seconds and a count; what a platform lacks is left out."""
_RESOLVERS = 2
_NOTICES = 10
"""For each endpoint: guest code must not be able to fill a notebook with them."""


@dataclass(slots=True)
class Use:
    """What went over one endpoint; counted by the host."""

    connections: int = 0
    refused: int = 0
    failed: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    told: str = ""
    """Why connections fail, as the person knows; told again after one that did not."""
    notices: int = 0


class Bridge:
    """The forwards of one session. ``tell`` shows a text to the person who runs cells."""

    def __init__(self, endpoints: Sequence[GuestEndpoint], tell: Callable[[str], None]) -> None:
        self._endpoints = {endpoint.name: endpoint for endpoint in endpoints}
        self._uses = {name: Use() for name in self._endpoints}
        self._tell = tell
        self._servers: list[asyncio.Server] = []
        self._open: dict[asyncio.Task[None], tuple[GuestEndpoint, Plain]] = {}
        """By age, with the guest's end."""
        # Of its own: a name server that does not answer must not hold up the session's other work.
        self._resolver = ThreadPoolExecutor(_RESOLVERS, "resolver")
        self._closed = False

    async def start(self, listeners: Mapping[str, EndpointListener]) -> None:
        """Serve the engine's listeners, which are closed by ``close``."""
        for name, listener in listeners.items():
            accepted = partial(self._accept, self._endpoints[name], listener.framed)
            # A reader stops reading at twice its limit.
            limit = (_AHEAD if listener.framed else CHUNK) // 2
            server = await asyncio.start_server(accepted, sock=listener.sock, limit=limit)
            self._servers.append(server)

    def uses(self) -> Mapping[str, Mapping[str, int]]:
        """Return the figures of each endpoint, for the receipt."""
        return {
            name: {
                "connections": use.connections,
                "refused": use.refused,
                "failed": use.failed,
                "sent_bytes": use.sent_bytes,
                "received_bytes": use.received_bytes,
            }
            for name, use in self._uses.items()
        }

    async def close(self) -> None:
        """Close every listener and every forward; idempotent.

        What an ended guest sent has LAST_S seconds to reach its store.
        """
        self._closed = True
        for server in self._servers:
            server.close()
        self._servers.clear()
        if self._open:
            await asyncio.wait(self._open, timeout=LAST_S)
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)
        self._resolver.shutdown(wait=False, cancel_futures=True)

    def _accept(
        self,
        endpoint: GuestEndpoint,
        framed: bool,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        guest = Framed(reader, writer) if framed else Plain(reader, writer)
        if self._closed:
            # Accepted before the listener was closed, and told after.
            guest.abort()
            return
        if len(self._open) >= MAX_CONNECTIONS and not self._make_room():
            self._uses[endpoint.name].refused += 1
            guest.abort()
            self._explain(
                endpoint, f"more than {MAX_CONNECTIONS} connections at once are not forwarded"
            )
            return
        task = asyncio.create_task(self._serve(endpoint, guest))
        self._open[task] = endpoint, guest
        task.add_done_callback(self._done)

    def _make_room(self) -> bool:
        """Break off the oldest connection whose guest's end has ended, if there is one.

        Its client may have closed it, which looks the same: one that gave up on a store that hangs
        must not keep its place for ever.
        """
        for task, (endpoint, guest) in self._open.items():
            if guest.ended:
                task.cancel()
                del self._open[task]
                self._explain(
                    endpoint, "its client had ended its part, and another needs its place"
                )
                return True
        return False

    def _done(self, task: asyncio.Task[None]) -> None:
        self._open.pop(task, None)

    async def _serve(self, endpoint: GuestEndpoint, guest: Plain) -> None:
        use = self._uses[endpoint.name]
        try:
            try:
                async with asyncio.timeout(CONNECT_S):
                    store = Plain(*await self._connect(endpoint.host, endpoint.port))
            except TimeoutError:
                use.failed += 1
                self._explain(endpoint, f"it did not answer within {CONNECT_S:g} s")
                return
            except OSError as error:
                use.failed += 1
                self._explain(endpoint, _why(error))
                return
            try:
                use.connections += 1
                use.told = ""
                async with asyncio.TaskGroup() as ways:
                    ways.create_task(self._sent(use, guest, store))
                    ways.create_task(self._received(use, store, guest))
                for end in (store, guest):
                    await end.close()
            except* OSError:
                pass  # one end broke off, which ends both ways
            finally:
                store.abort()
        finally:
            guest.abort()

    async def _sent(self, use: Use, guest: Plain, store: Plain) -> None:
        while data := await guest.read():
            await store.write(data)
            await guest.taken(len(data))
            use.sent_bytes += len(data)
        await store.end()

    async def _received(self, use: Use, store: Plain, guest: Plain) -> None:
        while data := await store.read():
            await guest.write(data)
            use.received_bytes += len(data)
        await guest.end()

    async def _connect(
        self, host: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first address of a name that answers; whoever serves the name chooses.

        Raises OSError.
        """
        loop = asyncio.get_running_loop()
        look = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await loop.run_in_executor(self._resolver, look)
        if host == LOCALHOST:
            # As inside: whoever may listen on the host must not get between by another family.
            found.sort(key=lambda item: item[0] != socket.AF_INET)
        addresses = list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
        failure = OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        for address in addresses:
            if refused_address(ip_address(address)):
                failure = PermissionError(
                    errno.EPERM, "its name leads to an address that is refused"
                )
                continue
            try:
                async with asyncio.timeout(CONNECT_S / len(addresses)):
                    reader, writer = await asyncio.open_connection(address, port, limit=CHUNK // 2)
            except OSError as error:
                failure = error
                continue
            _bound(writer.get_extra_info("socket"))
            return reader, writer
        raise failure

    def _explain(self, endpoint: GuestEndpoint, why: str) -> None:
        """Say once why a connection was closed: the guest's client sees only that it was."""
        use = self._uses[endpoint.name]
        if use.told == why or use.notices == _NOTICES:
            return
        use.told = why
        use.notices += 1
        last = " This is not said again." if use.notices == _NOTICES else ""
        self._tell(
            f"a connection to the endpoint {endpoint.name} ({endpoint.host}:{endpoint.port}) was "
            f"closed: {why}.{last}"
        )


def _bound(sock: Any) -> None:
    """Bound what the kernel keeps for a store, and notice one that is gone without a word.

    If this process is killed, nothing of it stays.
    """
    linger(sock, reset=True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _why(error: OSError) -> str:
    """Return the reason without the addresses that asyncio writes into it."""
    if isinstance(error, socket.gaierror):
        return "its host name is not known"
    if isinstance(error, PermissionError) and error.strerror:
        return error.strerror
    return os.strerror(error.errno).lower() if error.errno else "the connection failed"
