"""Who else in this process wants to know of sessions: a Jupyter server's extension, if any.

Told by the provisioner, which works the same without any. What an observer raises is its own
problem: it is logged and forgotten. Standard library only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernel_provisioner.provisioner import SandboxProvisioner

Observer = Callable[["SandboxProvisioner", str, Mapping[str, Any]], None]
"""Called with the provisioner, what happened (phase, ready, failed, gone) and its figures."""

_observers: list[Observer] = []


def add(observer: Observer) -> None:
    """Tell ``observer`` from now on."""
    _observers.append(observer)


def tell(provisioner: SandboxProvisioner, event: str, facts: Mapping[str, Any]) -> None:
    """Tell all. Never raises."""
    for observer in list(_observers):
        try:
            observer(provisioner, event, facts)
        except Exception:
            logging.getLogger(__name__).exception("An observer of sandboxes failed.")
