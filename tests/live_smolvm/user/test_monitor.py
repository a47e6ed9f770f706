"""The real SmolVM of an ordinary user: whose its monitor is, and what Landlock keeps from it."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from live_guest import LiveGuest
from product import ask_for_socket_outside, host_address

from kernel_provisioner.engines.smolvm import monitor

_NO_FAMILY = "Address family not supported by protocol"
_REACH = """
import socket
print(sorted(line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]))
try:
    print(socket.create_connection(('{host}', {port}), 5))
except OSError as error:
    print(error.strerror)
try:
    print(socket.socket(40, socket.SOCK_STREAM))
except OSError as error:
    print(error.strerror)
"""


@pytest.mark.parametrize(
    "enforced", [True, pytest.param(False, marks=pytest.mark.full)], ids=["enforced", "without"]
)
def test_monitor_is_this_very_user_and_confined(
    own: LiveGuest, monkeypatch: pytest.MonkeyPatch, enforced: bool
) -> None:
    """A socket in the user's own home never appears, as it does without Landlock."""
    outside = Path.home() / "outside"
    outside.mkdir()
    ask_for_socket_outside(monkeypatch, outside, enforced=enforced)
    own.start()
    keeper, machine = own.guest.leftovers.processes
    user = os.getuid()
    assert user >= 1000
    assert own.guest.limits["monitor_uid"] == user
    assert monitor.deviations(machine, user) == []
    for process in (keeper, machine):
        status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        told = dict(line.split(":\t", 1) for line in status if ":\t" in line)
        assert told["Uid"].split() == [str(user)] * 4
        assert told["NoNewPrivs"] == "1"
        assert [int(told[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")] == [0] * 4
    assert (own.plan.directories[1] / "agent").is_socket()
    assert (outside / "socket").exists() is not enforced
    (outside / "socket").unlink(missing_ok=enforced)
    outside.rmdir()
    # The monitor is in the host's own network here, and its guest in none all the same.
    own.release()
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        host = host_address()
        with socket.create_connection((host, port)):
            found = own.check(_REACH.format(host=host, port=port))
    assert found.splitlines() == ["['lo']", "Network is unreachable", _NO_FAMILY]
