"""A request for a session as the supervisor gets it, of the smallest profile."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from kernel_provisioner.profiles import BUILTIN
from kernel_provisioner.session.request import Start

SESSION = "0123456789abcdef"
PROFILE = BUILTIN["benchmark"]


def request(home: Path, engine: str, asked_s_ago: float = 0.0, **words: object) -> Start:
    """Return a request whose directories are all below ``home``; ``words`` replace its fields."""
    return Start.parse(
        {
            "session": SESSION,
            "kernel_id": "",
            "previous": None,
            "replaced": None,
            "engine": engine,
            "engine_requested": engine,
            "profile": asdict(PROFILE),
            "sources": [],
            "endpoints": [],
            "environment": {},
            "key": "00",
            "signature_scheme": "hmac-sha256",
            "socket_dir": str(home / "sockets"),
            "dirs": {name: str(home / name) for name in ("data", "state", "runtime")},
            "started_at": time.monotonic() - asked_s_ago,
            "run_dir": None,
            **words,
        }
    )
