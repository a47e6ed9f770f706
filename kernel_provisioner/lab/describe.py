"""The JSON forms that pages get where no supervisor answers: statuses of the ledger, plans.

Pure. The fields are those of ``openapi.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernel_provisioner.session.status import described_sources

if TYPE_CHECKING:
    from kernel_provisioner.lab.ledger import Entry


def from_ledger(entry: Entry) -> dict[str, Any]:
    """Return the ``Status`` of a session that is being started or that is over."""
    return {
        "kernel_id": entry.kernel_id,
        "session": entry.session,
        "previous": entry.previous,
        "state": "ended" if entry.state == "ended" else "starting",
        "engine": entry.engine,
        "isolation": entry.isolation,
        "profile": entry.limits["name"],
        "network": "off",
        "limits": entry.limits,
        "sources": described_sources(entry.sources),
        "endpoints": entry.endpoints,
        "phase": next(reversed(entry.phases), None),
        "phases": entry.phases,
        "memory": None,
        "cell": None,
        "run": None,
        "cells": None,
        "ended": entry.ended,
    }


def ended_as_told(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``Ended`` of a supervisor's word."""
    return {
        "reason": str(message["reason"]),
        "class": str(message["class"]),
        "message": str(message["message"]),
        "remedy": str(message.get("remedy", "")),
        "code": message.get("code"),
    }
