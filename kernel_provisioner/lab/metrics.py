"""Figures for Prometheus, on Jupyter's own ``/metrics`` (spec K). Labels name no kernel or person.

Sessions that run are counted when the page is asked for; nothing is asked of a sandbox.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from prometheus_client import REGISTRY, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:

    class Running(Protocol):
        """A ledger, as far as it is looked at here."""

        def running(self) -> list[tuple[str, str]]:
            """Return (engine, state) of each session that is not over."""


MIB = 1024 * 1024

_STARTS = Histogram(
    "backintel_start_seconds",
    "From asking for a sandbox to its kernel being ready",
    ["engine"],
    buckets=(0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 40, 60),
)
_ENDS = Counter("backintel_ends", "Sandboxes that ended, by reason", ["reason"])
_DEADLINES = Counter("backintel_deadlines", "Deadlines that passed, of a cell or a run", ["clock"])
_PEAKS = Histogram(
    "backintel_memory_peak_bytes",
    "Peak memory of sandboxes that ended",
    ["engine"],
    buckets=tuple(size * MIB for size in (64, 128, 256, 512, 768, 1024, 2048, 4096, 8192)),
)
_EXPORTS = Counter(
    "backintel_exports", "Exports of running sandboxes: published, refused or failed", ["result"]
)


class _Sessions(Collector):
    """Counts the sessions of all ledgers of this process when asked."""

    def __init__(self) -> None:
        self.ledgers: list[Running] = []

    def collect(self) -> Iterable[Metric]:
        """Called by Prometheus' client."""
        family = GaugeMetricFamily(
            "backintel_sessions", "Sandboxes now, by engine and state", labels=["engine", "state"]
        )
        tally = Tally(found for ledger in self.ledgers for found in ledger.running())
        for labels, number in sorted(tally.items()):
            family.add_metric(labels, number)
        return [family]


_SESSIONS = _Sessions()
REGISTRY.register(_SESSIONS)


def watch(ledger: Running) -> None:
    """Count this ledger's sessions."""
    _SESSIONS.ledgers.append(ledger)


def started(engine: str, seconds: float) -> None:
    """A sandbox is ready, ``seconds`` after it was asked for."""
    _STARTS.labels(engine).observe(seconds)


def ended(reason: str) -> None:
    """A sandbox ended, or its start failed."""
    _ENDS.labels(reason).inc()


def late(clock: str) -> None:
    """A deadline passed: ``cell`` or ``run``."""
    _DEADLINES.labels(clock).inc()


def peaked(engine: str, peak_bytes: int) -> None:
    """A sandbox that is gone used at most so much."""
    _PEAKS.labels(engine).observe(peak_bytes)


def exported(result: str) -> None:
    """An export was ``published``, ``refused`` or ``failed``."""
    _EXPORTS.labels(result).inc()
