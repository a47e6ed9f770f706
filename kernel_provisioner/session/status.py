"""What a session does now, for people who look (spec L): the host's figures, not the guest's word.

Pure: it reads what the supervisor holds. The fields are those of ``Status`` in lab/openapi.yaml.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from kernel_provisioner.session.monitor import SessionMonitor
from kernel_provisioner.session.request import Start
from kernel_provisioner.session.telemetry import Telemetry


def describe(
    start: Start,
    receipt: Mapping[str, Any],
    telemetry: Telemetry | None,
    monitor: SessionMonitor | None,
) -> dict[str, Any]:
    """Return the status; ``receipt`` is the session's receipt so far."""
    profile = start.profile
    ended = receipt["ended"]
    phases = {name: ms / 1000 for name, ms in receipt["timings_ms"].items()}
    running = monitor.longest() if monitor and not ended else None
    if ended:
        state = "ended"
    elif telemetry is None:
        state = "starting"
    else:
        state = "busy" if running else "idle"
    sample = telemetry.latest if telemetry and not ended else None
    left = max(0.0, start.started_at + profile.run_deadline_s - time.monotonic())
    return {
        "session": start.session,
        "previous": start.previous,
        "state": state,
        "engine": receipt["backend"],
        "isolation": receipt["isolation"],
        "profile": profile.name,
        "network": "off",
        "limits": receipt["profile"],
        "sources": described_sources(receipt["sources"]),
        "endpoints": list(receipt["endpoints"]),
        "phase": next(reversed(phases), None),
        "phases": phases,
        "memory": sample
        and {
            "used_bytes": sample.memory_bytes,
            "limit_bytes": profile.ram_bytes,
            "peak_bytes": telemetry.peak_bytes if telemetry else sample.peak_memory_bytes,
            "warned": receipt.get("memory_warning") is not None,
        },
        "cell": running
        and {
            "msg_id": running.msg_id,
            "elapsed_s": round(running.elapsed_s, 3),
            "deadline_s": profile.cell_deadline_s,
            "paused": running.paused,
        },
        "run": None if ended else {"left_s": round(left, 3), "deadline_s": profile.run_deadline_s},
        "cells": {
            "count": monitor.cell_counts()["run"] if monitor else 0,
            "limit": profile.cells,
        },
        "ended": ended
        and {
            "reason": ended["reason"],
            "class": ended["class"],
            "message": ended["message"],
            "remedy": "",
            "code": ended.get("code"),
        },
    }


def described_sources(sources: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return sources as people are shown them: all are read-only."""
    return [
        {
            "name": source["name"],
            "path": source["path"],
            "kind": source["kind"],
            "guest_path": f"/sources/{source['name']}",
            "mode": "read-only",
        }
        for source in sources
    ]
