"""The real SmolVM: what its kernel sees of the way to assigned endpoints, which is nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from live_guest import PACE, LiveGuest

from kernel_provisioner.engines.base import GuestEndpoint

_ENDPOINTS = (
    GuestEndpoint("db", "db.internal", "127.0.1.1", 5432),
    # A port that only root may use, and an address that no interface has.
    GuestEndpoint("web", "10.9.8.7", "10.9.8.7", 443),
)
_ASK = f"""
import os, socket
def attempt(what):
    try:
        return what()
    except OSError as error:
        return error.strerror
def ask():
    with socket.create_connection(('db.internal', 5432), {60 * PACE}) as sock:
        return sock.recv(1)
"""
_ENDED = (b"", "Broken pipe", "Connection reset by peer")


@pytest.mark.full
def test_the_way_to_an_endpoint_is_out_of_the_kernels_reach(own: LiveGuest) -> None:
    own.spec = replace(own.spec, endpoints=_ENDPOINTS)
    own.start().release()
    assert sorted(own.listeners) == ["db", "web"]
    assert not any(listener.sock.getblocking() for listener in own.listeners.values())
    own.check(_ASK)
    _nothing_else_is_reached(own)
    for listener in own.listeners.values():
        listener.sock.close()
    # Nobody takes it any more, and the guest is told so.
    assert own.check(f"print(attempt(ask) in {_ENDED})") == "True"


def _nothing_else_is_reached(own: LiveGuest) -> None:
    sockets = own.plan.directories[1]
    assert sorted(path.name for path in sockets.glob("e-*")) == ["e-0", "e-1"]
    others = [("db.internal", 443), ("127.0.0.1", 5432), ("10.9.8.7", 5432), ("10.9.8.6", 443)]
    text = own.check(
        f"""
print(open('/proc/net/route').read().count(chr(10)))
print(sorted(line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]))
for address in {others}:
    print(attempt(lambda: socket.create_connection(address, 5)))
for name in ('/run/backintel/e-0', {str(sockets / "e-0")!r}, chr(0) + '/run/backintel/e-0'):
    with socket.socket(socket.AF_UNIX) as sock:
        print(attempt(lambda: sock.connect(name)))
print(attempt(lambda: socket.socket(40, socket.SOCK_STREAM)))
print('e-0' in open('/proc/net/unix').read(), 'e-0' in open('/proc/self/mountinfo').read())
names = [n for n in os.listdir('/proc') if n.isdigit()]
print([n for n in names if 'forward' in open(f'/proc/{{n}}/cmdline').read()])
"""
    )
    assert text.splitlines() == [
        "1",
        "['lo']",
        *["Connection refused"] * 3,
        "Network is unreachable",
        *["No such file or directory"] * 2,
        "Connection refused",
        "Address family not supported by protocol",
        "False False",
        "[]",
    ]
