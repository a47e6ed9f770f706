"""Sampling of the guest from the host's side (spec K): at least each second, peak kept.

The guest cannot influence the figures: they come from the engine's cgroup or VM accounting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kernel_provisioner.engines.base import Guest, Sample

INTERVAL_S = 1.0


class Telemetry:
    """Latest sample and peak of one guest."""

    def __init__(self, guest: Guest, on_sample: Callable[[Sample], None] | None = None) -> None:
        self._guest = guest
        self._on_sample = on_sample
        self.latest: Sample | None = None
        self.peak_bytes = 0

    def take(self) -> Sample | None:
        """Sample now; None (and the last figures stay) when the guest's accounting is gone."""
        try:
            sample = self._guest.sample()
        except OSError:
            return None
        self.latest = sample
        self.peak_bytes = max(self.peak_bytes, sample.peak_memory_bytes, sample.memory_bytes)
        if self._on_sample:
            self._on_sample(sample)
        return sample

    async def run(self) -> None:
        """Sample each second until cancelled."""
        while True:
            self.take()
            await asyncio.sleep(INTERVAL_S)
