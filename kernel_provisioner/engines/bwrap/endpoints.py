"""Opens the endpoints' listeners in a sandbox's network namespace, before any user code runs.

The sockets are made in that namespace and held by the supervisor, so that nothing in the sandbox
takes part in forwarding and nothing of the host's becomes visible in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kernel_provisioner.engines.base import GuestEndpoint
from kernel_provisioner.errors import StartFailed

_NS_GET_USERNS = 0xB701
"""linux/nsfs.h: the user namespace that owns a namespace; needed to be allowed to enter it."""
_PROGRAM = Path(__file__).with_name("inside.py")


def listen(
    pid: int, namespace: str, endpoints: Sequence[GuestEndpoint], timeout: float
) -> Mapping[str, socket.socket]:
    """Return a non-blocking listener by endpoint's name. Blocks; raises StartFailed.

    ``pid`` is a process of the sandbox that still waits, ``namespace`` the network namespace that
    it attested (``net:[INODE]``).
    """
    try:
        with _namespaces(pid, namespace) as (user, net):
            received = _ask(user, net, endpoints, timeout)
    except OSError as error:
        raise _failed(error.strerror or "it is gone") from None
    listeners = [socket.socket(fileno=fd) for fd in received]
    if len(listeners) != len(endpoints):
        for listener in listeners:
            listener.close()
        raise _failed("not every listener came")
    for listener in listeners:
        listener.setblocking(False)
    return {
        endpoint.name: listener for endpoint, listener in zip(endpoints, listeners, strict=True)
    }


@contextlib.contextmanager
def _namespaces(pid: int, namespace: str) -> Iterator[tuple[int, int]]:
    with contextlib.ExitStack() as owned:
        net = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        owned.callback(os.close, net)
        if namespace != f"net:[{os.fstat(net).st_ino}]":
            raise StartFailed("the sandbox's network is not the attested one.", phase="endpoints")
        user = fcntl.ioctl(net, _NS_GET_USERNS)
        owned.callback(os.close, user)
        yield user, net


def _ask(user: int, net: int, endpoints: Sequence[GuestEndpoint], timeout: float) -> list[int]:
    wanted = json.dumps([[endpoint.address, endpoint.port] for endpoint in endpoints])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        numbers = [theirs.fileno(), user, net]
        command = [sys.executable, "-I", "-S", "-B", str(_PROGRAM), *map(str, numbers), wanted]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                pass_fds=numbers,
                env={},
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise _failed("it took too long") from None
        if done.returncode != 0:
            raise _failed(done.stderr.decode(errors="replace").strip()[-300:] or "it was killed")
        _, fds, _, _ = socket.recv_fds(ours, 1, len(endpoints), socket.MSG_DONTWAIT)
        return fds


def _failed(why: str) -> StartFailed:
    return StartFailed(
        f"the endpoints cannot be opened inside the sandbox: {why}.",
        remedy="report this with the output of `backintel sandbox check`; nothing was run.",
        phase="endpoints",
    )
