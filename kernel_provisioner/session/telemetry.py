"""Sampling of the guest from the host's side (spec K): at least each second, peak kept.

The guest cannot influence the figures: they come from the engine's cgroup or VM accounting. Also
decides when a person is warned of the memory limit, once for each guest (spec D4, K).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kernel_provisioner.engines.base import Guest, Sample

INTERVAL_S = 1.0
OOM_EVIDENCE_S = 3.0
"""How long after a kill for memory the end of the kernel may be that kill's: a process of some GiB
takes a while to die. Later, the kill was another process's."""
WATCHFUL_S = 0.1
"""The interval from half of the limit on, until the warning: a cell fills the rest in moments."""
WARN_SHARE = 0.9


class MemoryWatch:
    """Whether memory that cannot be taken back reached 90 % of the limit for the first time.

    Pages of files do not count: the kernel drops them before it kills, and the image alone could
    fill a small limit with them.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._warned = False

    def due(self, sample: Sample) -> bool:
        """Return whether this sample is the one to warn of; True once at most."""
        if self._warned or sample.held_bytes < WARN_SHARE * self._limit:
            return False
        self._warned = True
        return True

    def interval_s(self, sample: Sample | None) -> float:
        """Return how long the next sample may wait, in seconds."""
        if self._warned or sample is None or sample.held_bytes < self._limit / 2:
            return INTERVAL_S
        return WATCHFUL_S


class Telemetry:
    """Latest sample and peak of one guest; ``warn`` is called with the sample to warn of."""

    def __init__(self, guest: Guest, limit_bytes: int, warn: Callable[[Sample], None]) -> None:
        self._guest = guest
        self._watch = MemoryWatch(limit_bytes)
        self._warn = warn
        self.latest: Sample | None = None
        self.peak_bytes = 0
        self._oom_kills = 0
        self._oom_seen_at = -OOM_EVIDENCE_S

    @property
    def oom_lately(self) -> bool:
        """Whether the kernel counted a kill for this guest's limit just now (colabtools#3070)."""
        return time.monotonic() - self._oom_seen_at < OOM_EVIDENCE_S

    def take(self) -> Sample | None:
        """Sample now; None (and the last figures stay) when the guest's accounting is gone."""
        try:
            sample = self._guest.sample()
        except OSError:
            return None
        self.latest = sample
        if sample.oom_kills > self._oom_kills:
            self._oom_kills = sample.oom_kills
            self._oom_seen_at = time.monotonic()
        self.peak_bytes = max(self.peak_bytes, sample.peak_memory_bytes, sample.memory_bytes)
        if self._watch.due(sample):
            self._warn(sample)
        return sample

    async def run(self) -> None:
        """Sample until cancelled: each second, and more often on the way to the limit."""
        while True:
            await asyncio.sleep(self._watch.interval_s(self.take()))
