"""Writes ``energy/readings.csv``: synthetic meter readings with exactly known answers.

The load is drawn from a fixed seed, then calibrated: whole watts are added to single readings
until the trapezoidal energy over gaps of at most 15 minutes is exactly 7,845,000 W s
(2.1791666667 kWh), and readings stop once 127 of the 540 five-minute intervals hold one. So the
notebook's answers can be checked without trusting the notebook. Run it as
``python make_energy.py FILE``; the committed file is its output.
"""

from __future__ import annotations

import csv
import datetime as dt
import itertools
import math
import random
import sys
from pathlib import Path

SEED = 20240209
START = dt.datetime(2024, 2, 9, 15, tzinfo=dt.UTC)
INTERVAL_S = 300
INTERVALS = 540
MAX_GAP_S = 900
TARGET_INTERVALS = 127
TARGET_WS = 7_845_000
SPELLS = ((0.0, 2.6), (4.25, 1.4), (7.5, 0.9), (15.8, 2.3), (21.0, 0.4), (26.5, 2.4), (38.2, 7.0))
"""When the radio link worked: (start, longest duration) in hours after START."""
MEASURED_EDGES = (MAX_GAP_S, MAX_GAP_S + 10)
"""Two gaps in the first spell: the longest that is bridged, and the shortest that is not."""


def times(rng: random.Random) -> list[int]:
    """Return seconds after START, multiples of ten, ascending, in TARGET_INTERVALS intervals."""
    found: list[int] = []
    hit: set[int] = set()
    for number, (start_h, hours) in enumerate(SPELLS):
        now = int(start_h * 360) * 10 + 40
        end = now + hours * 3600
        step = 0
        while now < end:
            hit.add(now // INTERVAL_S)
            found.append(now)
            if len(hit) == TARGET_INTERVALS:
                return found
            edge = number == 0 and step in (6, 13)
            gap = MEASURED_EDGES[step == 13] if edge else 80 + int(rng.random() * 44) * 10
            now += gap
            step += 1
    raise ValueError(f"the spells are too short: {len(hit)} intervals")


def load(second: int, rng: random.Random) -> float:
    """Return a plausible household load in watts: base, refrigerator, evening, cooking."""
    hour = (START + dt.timedelta(seconds=second)).hour + second % 3600 / 3600
    fridge = 70 if second % 2700 < 1000 else 0
    evening = 170 * math.exp(-(((hour - 19.5) / 2.2) ** 2))
    morning = 110 * math.exp(-(((hour - 8.0) / 1.2) ** 2))
    cooking = 700 if rng.random() < 0.04 else 0
    return 85 + fridge + evening + morning + cooking + 25 * rng.random()


def weights(seconds: list[int]) -> list[int]:
    """Return for each reading twice the seconds that it stands for in the trapezoidal rule."""
    result = [0] * len(seconds)
    for i, (a, b) in enumerate(itertools.pairwise(seconds)):
        if b - a <= MAX_GAP_S:
            result[i] += b - a
            result[i + 1] += b - a
    return result


def calibrate(watts: list[int], weight: list[int]) -> list[int]:
    """Return ``watts`` changed by whole watts so that the energy is TARGET_WS exactly."""
    result = list(watts)
    missing = 2 * TARGET_WS - sum(w * p for w, p in zip(weight, result, strict=True))
    order = sorted(range(len(result)), key=lambda i: (-weight[i], i))
    sign = 1 if missing > 0 else -1
    while abs(missing) >= weight[order[0]]:
        for i in order:
            if weight[i] and weight[i] <= abs(missing):
                result[i] += sign
                missing -= sign * weight[i]
    for i in order:
        for j in order:
            if weight[i] - weight[j] == missing:
                result[i] += 1
                result[j] -= 1
                return result
    raise ValueError(f"{missing / 2} W s cannot be placed")


def rows() -> list[tuple[str, str]]:
    """Return the lines of the file: as a meter's log is, not sorted and not clean."""
    rng = random.Random(SEED)
    seconds = times(rng)
    raw = [load(second, rng) for second in seconds]
    weight = weights(seconds)
    scale = 2 * TARGET_WS / sum(w * p for w, p in zip(weight, raw, strict=True))
    watts = calibrate([int(scale * p) for p in raw], weight)
    stamps = [(START + dt.timedelta(seconds=s)).strftime("%Y-%m-%dT%H:%M:%SZ") for s in seconds]
    lines = [(stamp, str(value)) for stamp, value in zip(stamps, watts, strict=True)]
    lines[40], lines[43] = lines[43], lines[40]  # late delivery
    lines.insert(60, lines[59])  # sent twice
    lines.insert(90, ("2024-02-10T12:34:50Z", ""))  # a heartbeat without a value
    return lines


def main(path: Path) -> None:
    """Write the file."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("time", "power_w"))
        writer.writerows(rows())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
