"""What an open notebook costs the browser and the server, with a plain kernel and with ours.

The CPU time of all processes of a headless Chromium, and of the Jupyter server without its kernels,
while a notebook is in front with our panel shown: idle, and with a cell that prints ten times a
second. Both kernels take turns in the same JupyterLab with the extension installed. Needs the wheel
(`make lab-wheel`), a prepared image and Debian's Chromium.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from playwright.sync_api import Browser, expect, sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1] / "browser"))

from labs import CHROMIUM, SLOW_MS, Lab, Person, person

KERNELS = {"plain ipykernel": "python3", "BackIntel sandbox": "backintel-sandbox"}
WINDOW_S = 20.0
PRINTING = "import time\nfor n in range(10_000):\n    print(n, flush=True)\n    time.sleep(0.1)"
_TICKS = os.sysconf("SC_CLK_TCK")

Windows = dict[tuple[str, str, str], list[float]]
"""Milliseconds of CPU time for each second, by process, work and kernel."""


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        found.setdefault(parent, []).append(int(name))
    return found


def _tree(root: int) -> Iterator[int]:
    children = _children()
    waiting = [root]
    while waiting:
        waiting += children.get(pid := waiting.pop(), [])
        yield pid


def _cpu_s(pids: Sequence[int]) -> dict[int, float]:
    """Return what these processes have used, without those that are gone."""
    used = {}
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        used[pid] = (int(fields[11]) + int(fields[12])) / _TICKS
    return used


def _browser_pids() -> list[int]:
    """Return the processes of the Chromium that this program started."""
    found = []
    for pid in _tree(os.getpid()):
        try:
            program = os.readlink(f"/proc/{pid}/exe")
        except OSError:
            continue
        if "chrom" in os.path.basename(program):
            found.append(pid)
    return found


def _window(server: Lab) -> dict[str, float]:
    """Return the milliseconds of CPU time for each second that passes now.

    Of a process that begins meanwhile all is counted, of one that ends nothing.
    """
    processes: dict[str, Callable[[], Sequence[int]]] = {
        "browser": _browser_pids,
        "server": lambda: [server.pid],
    }
    before = {name: _cpu_s(pids()) for name, pids in processes.items()}
    began = time.monotonic()
    time.sleep(WINDOW_S)
    passed = time.monotonic() - began
    return {
        name: sum(used - before[name].get(pid, 0.0) for pid, used in _cpu_s(pids()).items())
        / passed
        * 1e3
        for name, pids in processes.items()
    }


def _visit(someone: Person, server: Lab, kernel: str, number: int) -> dict[str, dict[str, float]]:
    """Open a notebook with this kernel and measure it idle, then printing."""
    someone.open(server.notebook(f"{kernel}-{number}.ipynb", kernel, "1 + 1", PRINTING))
    someone.show_panel()
    idle = someone.page.get_by_role("button", name=re.compile(r" \| Idle$"))
    expect(idle).to_be_visible(timeout=SLOW_MS)
    someone.run(0)
    someone.sees_output(0, "2")
    # The page's own start is over when it asks for nothing.
    someone.page.wait_for_load_state("networkidle")
    found = {"idle": _window(server)}
    someone.run(1)
    someone.sees_output(1, "10")
    found["printing ten times a second"] = _window(server)
    return found


def measure(rounds: int, say: Callable[[str], None]) -> Windows:
    """Return all windows of ``rounds`` visits with each kernel."""
    found: Windows = {}
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        raise RuntimeError("Chromium is missing. Run: sudo apt-get install chromium")
    flags = [*CHROMIUM, *(["--no-sandbox"] if os.getuid() == 0 else [])]
    with tempfile.TemporaryDirectory() as home, sync_playwright() as playwright:
        browser: Browser = playwright.chromium.launch(executable_path=program, args=flags)
        with Lab(Path(home) / "lab", {}) as server:
            for number in range(rounds):
                for title, kernel in KERNELS.items():
                    someone = person(browser, server)
                    for work, window in _visit(someone, server, kernel, number).items():
                        for process, cost in window.items():
                            found.setdefault((process, work, title), []).append(cost)
                    someone.leave()
                say(f"pages {number + 1} of {rounds}")
        browser.close()
    return found


def table(found: Windows, percentile: Callable[[Sequence[float], float], float]) -> str:
    """Return a Markdown table: medians (p95), and what ours costs more."""
    plain, ours = KERNELS
    lines = [
        f"| CPU ms for each second, median (p95) | n | {plain} | {ours} | ours more |",
        "|---|---|---|---|---|",
    ]
    for process, work, title in found:
        if title != plain:
            continue
        values = [found[process, work, name] for name in (plain, ours)]
        medians = [statistics.median(each) for each in values]
        cells = [
            f"{median:.1f} ({percentile(each, 0.95):.1f})"
            for median, each in zip(medians, values, strict=True)
        ]
        more = f"{medians[1] - medians[0]:+.1f}"
        lines.append(f"| {process}, {work} | {len(values[0])} | {' | '.join(cells)} | {more} |")
    return "\n".join(lines)
