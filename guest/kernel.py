"""Becomes ipykernel on listening sockets that the host bound, in the process that attested.

The kernel never sees a connection file or a path it could replace: the five listening descriptors
are inherited and handed to libzmq (ZMQ_USE_FD). After ``ready`` the control connection is closed,
so that user code has no channel to the host but the Jupyter sockets.
"""

from __future__ import annotations

import gc
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from typing import Any

import lazy
import wire

SITE_DIR = "/opt/backintel/guest/site"
_MATPLOTLIB_CACHE = "/opt/backintel/cache/matplotlib"
_ENDPOINT = "ipc:///inherited-{}"
CHANNELS = ("shell", "iopub", "stdin", "control", "hb")
"""Channel order; a channel's port is its index + 1 (the host's ``engines/base.py`` agrees)."""


def preload() -> Any:
    """Import what the kernel will need and put prebuilt caches in place; runs no user code.

    Returns the kernel's class.
    """
    sys.path.insert(0, SITE_DIR)
    lazy.install()
    import ipykernel.ipkernel
    import ipykernel.kernelapp
    import ipykernel.zmqshell
    import IPython.core.completer
    from backintel import _duckdb
    from interrupts import SandboxKernel

    # Kept in sys.modules; the names are of no use here.
    del IPython, ipykernel
    # Python was started isolated, so sitecustomize did not do it.
    _duckdb.install_hook()
    _copy_matplotlib_cache()
    os.makedirs(os.environ["BACKINTEL_DUCKDB_TEMP"], mode=0o700, exist_ok=True)
    return SandboxKernel


def _copy_matplotlib_cache() -> None:
    """Copy the prebuilt font list, so that the first plot is silent and quick (spec C2)."""
    target = os.environ["MPLCONFIGDIR"]
    if not os.path.isdir(_MATPLOTLIB_CACHE):
        return
    os.makedirs(target, mode=0o700, exist_ok=True)
    for entry in os.scandir(_MATPLOTLIB_CACHE):
        if entry.is_file(follow_symlinks=False):
            shutil.copyfile(entry.path, os.path.join(target, entry.name))


def _make_app(listeners: Mapping[str, int]) -> Any:
    """Return the application class; built here because ipykernel is imported late."""
    import traitlets
    import zmq
    from ipykernel.heartbeat import Heartbeat
    from ipykernel.kernelapp import IPKernelApp

    by_port = {port: listeners[name] for port, name in enumerate(CHANNELS, start=1)}

    def bind(sock: Any, port: int) -> int:
        # libzmq takes the descriptor over and uses the name in messages only.
        sock.setsockopt(zmq.USE_FD, by_port[port])
        sock.bind(_ENDPOINT.format(port))
        sock.setsockopt(zmq.USE_FD, -1)
        return port

    class SandboxKernelApp(IPKernelApp):
        """IPKernelApp without a connection file, a parent to poll or a port to choose."""

        # By default a class of jupyter_client, resolved at the start with all that it imports.
        blocking_class = traitlets.Type(None, klass=object, allow_none=True)

        def init_connection_file(self) -> None:
            """Nothing to load: the connection came in the go frame."""

        def write_connection_file(self, **kwargs: Any) -> None:
            """Nothing to write: the key stays in this process."""

        def cleanup_connection_file(self) -> None:
            """Nothing to remove."""

        def init_poller(self) -> None:
            """The host ends the sandbox; process 1 is not the parent that ipykernel knows."""

        def log_connection_info(self) -> None:
            """Record the ports without printing the banner (bug reports read them)."""
            self._ports = {name: getattr(self, f"{name}_port") for name in CHANNELS}

        def _try_bind_socket(self, s: Any, port: int) -> int:
            bound = bind(s, port)
            if s is self.shell_socket:
                # The debugger connects back to the shell by its last endpoint; the host's path
                # of the inherited socket does not exist here.
                s.bind("inproc://backintel-shell")
            return bound

        def init_iopub(self, context: Any) -> None:
            # With the default high-water mark of 1000 a slow subscriber loses displays; memory
            # is bounded by the cgroup.
            context.setsockopt(zmq.SNDHWM, 0)
            super().init_iopub(context)  # type: ignore[no-untyped-call]

    Heartbeat._try_bind_socket = lambda self: bind(self.socket, self.port)  # type: ignore[method-assign]
    return SandboxKernelApp


def _configure(connection: Mapping[str, Any], kernel_class: Any) -> Any:
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = True
    config.HistoryManager.hist_file = ":memory:"
    config.Session.key = str(connection["key"]).encode()
    config.Session.signature_scheme = connection["signature_scheme"]
    config.IPKernelApp.transport = "ipc"
    config.IPKernelApp.parent_handle = 0
    config.IPKernelApp.kernel_class = kernel_class
    config.IPKernelApp.outstream_class = "backintel._outstream.BoundedOutStream"
    for port, channel in enumerate(CHANNELS, start=1):
        setattr(config.IPKernelApp, f"{channel}_port", port)
    return config


def run(
    go: Mapping[str, Any],
    kernel_class: Any,
    listeners: Mapping[str, int],
    control: socket.socket,
    targets: int,
) -> None:
    """Bind, say ``ready``, close the control connection and serve; returns when the kernel ends.

    ``go["connection"]`` holds key and signature scheme, ``go["environment"]`` the variables that
    the owner named; ``listeners`` are the inherited descriptors by channel, and from ``targets``
    come the message ids of the requests that interrupts are for.
    """
    os.environ.update(go["environment"])
    os.set_blocking(targets, False)
    kernel_class.targets = targets
    app = _make_app(listeners).instance(config=_configure(go["connection"], kernel_class))
    app.initialize([])
    # As in a local kernel, modules in the working directory can be imported (-I left it out).
    sys.path.insert(0, "")
    gc.enable()
    wire.send(control, {"ready": True})
    control.close()
    app.start()
