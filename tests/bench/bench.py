"""Measures a plain ipykernel and ours side by side, in one run, through the same client code.

All are started by jupyter_client's `AsyncKernelManager` from a kernelspec: plain ipykernel as the
virtual environment installs it, over TCP (its default) and over Unix sockets (what ours uses), ours
as `backintel kernel install --engine bwrap` makes it. They take turns, so that what else the
machine does hits all. Ours needs a prepared image.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pages
from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager

PLAIN = "plain ipykernel, TCP"
PLAIN_IPC = "plain ipykernel, Unix sockets"
OURS = "BackIntel sandbox"
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    PLAIN: ("python3", {}),
    PLAIN_IPC: ("python3", {"transport": "ipc"}),
    OURS: ("backintel-sandbox", {}),
}
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
TIMEOUT = 120.0

MEGABYTE = 1_000_000
FLOOD_MESSAGES = 100
FLOOD = (
    "from IPython.display import display\n"
    f"_text = 'x' * {MEGABYTE}\n"
    f"for _ in range({FLOOD_MESSAGES}):\n"
    "    display({'text/plain': _text}, raw=True)\n"
)
VERSIONS = "import ipykernel, sys; print(sys.version.split()[0], ipykernel.__version__)"


@dataclass
class Samples:
    """Seconds of one measurement, by kernel."""

    title: str
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in SPECS})


async def _execute(client: AsyncKernelClient, code: str) -> tuple[float, int, str]:
    """Run ``code``; return seconds to reply and idle, characters received, and stream text.

    Raises RuntimeError if the code did not end with status ok.
    """
    started = time.perf_counter()
    msg_id = client.execute(code)

    async def reply() -> str:
        while True:
            message = await client.get_shell_msg(timeout=TIMEOUT)
            if message["parent_header"].get("msg_id") == msg_id:
                return str(message["content"]["status"])

    async def output() -> tuple[int, str]:
        size, text = 0, ""
        while True:
            message = await client.get_iopub_msg(timeout=TIMEOUT)
            if message["parent_header"].get("msg_id") != msg_id:
                continue
            content = message["content"]
            if message["msg_type"] == "display_data":
                size += len(content["data"]["text/plain"])
            elif message["msg_type"] == "stream":
                text += content["text"]
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return size, text

    status, (size, text) = await asyncio.gather(reply(), output())
    seconds = time.perf_counter() - started
    if status != "ok":
        raise RuntimeError(f"a benchmark cell ended with status {status}.")
    return seconds, size, text


@asynccontextmanager
async def _kernel(name: str) -> AsyncIterator[tuple[AsyncKernelClient, float]]:
    """Start a kernel; yield its client and the seconds from the call to kernel_info_reply."""
    started = time.perf_counter()
    spec, traits = SPECS[name]
    manager = AsyncKernelManager(kernel_name=spec, **traits)
    # A plain kernel warns on stderr that TCP is not encrypted.
    await manager.start_kernel(stderr=subprocess.DEVNULL)
    client = manager.client()
    try:
        client.start_channels()
        client.kernel_info()
        while (await client.get_shell_msg(timeout=TIMEOUT))["msg_type"] != "kernel_info_reply":
            pass
        yield client, time.perf_counter() - started
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)


async def measure(
    starts: int, trips: int, floods: int, say: Callable[[str], None]
) -> tuple[list[Samples], dict[str, str]]:
    """Return the three measurements, and what each kernel says that it is."""
    start = Samples("start to kernel_info_reply")
    trip = Samples("round trip of `pass` (reply and idle)")
    flood = Samples(f"{FLOOD_MESSAGES} MB of IOPub in messages of 1 MB")
    for name in SPECS:  # warms files and caches; not counted
        async with _kernel(name):
            pass
    for number in range(starts):
        for name in SPECS:
            async with _kernel(name) as (_client, seconds):
                start.seconds[name].append(seconds)
        say(f"start {number + 1} of {starts}")

    versions = {}
    async with AsyncExitStack() as stack:
        clients = {name: (await stack.enter_async_context(_kernel(name)))[0] for name in SPECS}
        for name, client in clients.items():
            versions[name] = (await _execute(client, VERSIONS))[2].strip()
            for _ in range(10):
                await _execute(client, "pass")
        for _ in range(trips):
            for name, client in clients.items():
                trip.seconds[name].append((await _execute(client, "pass"))[0])
        say(f"{trips} round trips")
        for number in range(floods):
            for name, client in clients.items():
                seconds, size, _text = await _execute(client, FLOOD)
                if size != FLOOD_MESSAGES * MEGABYTE:
                    raise RuntimeError(f"{name} delivered {size} characters.")
                flood.seconds[name].append(seconds)
            say(f"flood {number + 1} of {floods}")
    return [start, trip, flood], versions


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile; ``share`` is in (0, 1]."""
    ordered = sorted(values)
    return ordered[math.ceil(share * len(ordered)) - 1]


def table(results: Sequence[Samples]) -> str:
    """Return a Markdown table: medians (p95) in milliseconds, and the ratios of the medians."""
    lines = [
        f"| median (p95), ms | n | {' | '.join(SPECS)} | ours / plain TCP | ours / plain Unix |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        medians = {name: statistics.median(values) for name, values in result.seconds.items()}
        cells = [
            f"{medians[name] * 1e3:.1f} ({percentile(values, 0.95) * 1e3:.1f})"
            for name, values in result.seconds.items()
        ]
        cells += [f"{medians[OURS] / medians[plain]:.2f}" for plain in (PLAIN, PLAIN_IPC)]
        lines.append(f"| {result.title} | {len(result.seconds[OURS])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def machine() -> str:
    """Name the machine by processor, usable cores and kernel; never by host name."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    cores = len(os.sched_getaffinity(0))
    user = "root" if os.geteuid() == 0 else "an ordinary user"
    return (
        f"{model}, {cores} cores usable, Linux {platform.release()}, as {user}; "
        f"load average before the run {os.getloadavg()[0]:.2f}"
    )


def update(document: Path, text: str) -> None:
    """Replace what stands between the markers. Raises ValueError if they are missing."""
    before, begin, rest = document.read_text().partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document} lacks the markers {BEGIN} and {END}.")
    document.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main() -> None:
    """Measure, print the table, and update a document if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=25, help="starts of each kernel")
    parser.add_argument("--trips", type=int, default=200, help="round trips of each kernel")
    parser.add_argument("--floods", type=int, default=5, help="floods of each kernel")
    parser.add_argument(
        "--pages", type=int, default=5, help="visits of JupyterLab with each kernel"
    )
    parser.add_argument("--update", type=Path, metavar="FILE", help="put the table into FILE")
    options = parser.parse_args()
    if min(options.starts, options.trips, options.floods, options.pages) < 5:
        parser.error("medians need at least 5 of each.")
    named = machine()

    def say(text: str) -> None:
        print(f"bench: {text}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as prefix:
        command = [sys.executable, "-m", "kernel_provisioner.cli.main", "kernel", "install"]
        command += ["--engine", "bwrap", "--prefix", prefix]
        subprocess.run(command, check=True, timeout=60)
        os.environ["JUPYTER_PATH"] = f"{prefix}/share/jupyter"
        results, versions = asyncio.run(measure(options.starts, options.trips, options.floods, say))
    stated = "; ".join(
        f"{name}: Python {python}, ipykernel {ipykernel}"
        for name, (python, ipykernel) in ((n, versions[n].split()) for n in (PLAIN, OURS))
    )
    today = datetime.now(UTC).date().isoformat()
    shown = pages.table(pages.measure(options.pages, say), percentile)
    text = f"{table(results)}\n\n{shown}\n\n{today}. {named}. {stated}."
    print(text)
    if options.update:
        update(options.update, text)


if __name__ == "__main__":
    main()
