"""The extension of a Jupyter server (spec J2, K, L): REST, events and metrics of its sandboxes.

Contract: ``openapi.yaml`` and ``events/session.yaml`` beside this file. It trusts the server's own
authentication and authorization and the supervisors of its sandboxes; artifacts stay hostile. It
does nothing for a session that nobody asks about, but to hand on what the session itself tells.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jupyter_server.serverapp import ServerApp

EVENTS = Path(__file__).parent / "events" / "session.yaml"
_LEDGER = "backintel_ledger"
"""Key in the web application's settings."""


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    """Called by Jupyter's extension manager."""
    return [{"module": "kernel_provisioner.lab"}]


def _load_jupyter_server_extension(serverapp: ServerApp) -> None:
    """Called by Jupyter's extension manager, once for a server."""
    # Imported only here: a program that uses the package without a Jupyter server needs none.
    from kernel_provisioner import observers
    from kernel_provisioner.lab import metrics
    from kernel_provisioner.lab.handlers import handlers
    from kernel_provisioner.lab.ledger import Ledger

    event_logger = serverapp.event_logger
    assert event_logger is not None  # made before extensions are loaded
    event_logger.register_event_schema(EVENTS)
    ledger = Ledger(serverapp.kernel_manager, event_logger, _root(serverapp))
    observers.add(ledger.observe)
    metrics.watch(ledger)
    serverapp.web_app.settings[_LEDGER] = ledger
    routes = handlers(serverapp.base_url, ledger)
    serverapp.web_app.add_handlers(".*$", routes)  # type: ignore[no-untyped-call]


def _root(serverapp: ServerApp) -> Path | None:
    """Return the directory that notebook paths are relative to, if contents are files."""
    root = getattr(serverapp.contents_manager, "root_dir", None)
    return Path(root).resolve() if root else None
