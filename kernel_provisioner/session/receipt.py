"""The receipt of a session (spec K): what was asked, what held, what came out, why it ended.

Figures come from the host's side or, for facts inside the guest, from its attestation before user
code ran. No secrets: nothing of the environment, the key or the code is written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_provisioner import __version__
from kernel_provisioner.engines.base import GuestEndpoint
from kernel_provisioner.records import write_json

SCHEMA = "backintel.receipt/1"


class Receipt:
    """Facts gathered while a session runs; ``write`` puts them into one JSON file."""

    def __init__(self, session: str, kernel_id: str) -> None:
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "session": session,
            "kernel_id": kernel_id,
            "previous": None,
            "created": time.time(),
            "product": __version__,
            "host": {"machine": os.uname().machine, "kernel": os.uname().release},
            "backend": None,
            "backend_requested": None,
            "isolation": None,
            "engine": None,
            "image": None,
            "profile": None,
            "limits": {},
            "attested": None,
            "sources": [],
            "endpoints": [],
            "timings_ms": {},
            "cells": {"run": 0, "failed": 0, "interrupted": 0, "output_limited": 0},
            "peak_memory_bytes": None,
            "peak_memory_method": None,
            "memory_warning": None,
            "cpu_seconds": None,
            "relay": {},
            "artifacts": [],
            "exports": [],
            "ended": None,
            "leftovers": [],
        }

    def update(self, **facts: object) -> None:
        """Set top-level facts. Raises KeyError for one that the schema does not name."""
        for name, value in facts.items():
            if name not in self.data:
                raise KeyError(name)
            self.data[name] = value

    def timing(self, phase: str, seconds: float) -> None:
        """Record when a phase was over, in milliseconds since launch was asked for."""
        self.data["timings_ms"][phase] = round(seconds * 1000, 1)

    def write(self, receipts: Path) -> Path:
        """Write ``<session>.json`` atomically. Raises OSError."""
        receipts.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = receipts / f"{self.data['session']}.json"
        write_json(path, self.data)
        return path


def ended(reason: str, kind: str, message: str, **more: object) -> Mapping[str, object]:
    """Return the receipt's ``ended`` object; ``at`` is now unless given."""
    return {"reason": reason, "class": kind, "message": message, "at": time.time(), **more}


def stated_endpoints(endpoints: Sequence[GuestEndpoint]) -> list[dict[str, Any]]:
    """Return the receipt's ``endpoints``: what stands there is the owner's word, not looked at."""
    return [
        {"name": e.name, "kind": "tcp", "host": e.host, "port": e.port, "identity": "stated"}
        for e in endpoints
    ]
