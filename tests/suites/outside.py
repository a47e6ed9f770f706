"""Runs suites and programs that others wrote through our kernel, and writes their counts down.

``JUPYTER_DEFAULT_PROVISIONER_NAME`` sends every plain kernelspec of a suite to the sandbox;
``routed.py`` counts and fails what would start a kernel elsewhere. The suites are trusted code at
pinned hashes (``tools/fetch_suites.py``); what they leave behind is checked by session id.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import fetch_suites  # noqa: E402 - a module of tools/, not of a package
import routed  # noqa: E402 - likewise, of this directory

from kernel_provisioner.paths import state_dirs  # noqa: E402 - follows the two above

BEGIN, END = "<!-- begin: made by make test-suites -->", "<!-- end -->"
SUITE_TIMEOUT_S = 600
LEFT_WITHIN_S = 60.0
"""A kernel that a test never shut down ends with the suite's process: orderly, not at once."""


@dataclass(frozen=True, slots=True)
class Suite:
    """What is run: pytest arguments relative to a directory, and the distribution it tests."""

    name: str
    tests: tuple[str, ...]
    shown: str
    asyncio: bool = False

    @property
    def foreign(self) -> bool:
        """Whether it comes from a source distribution, or is a file of ours that runs others'."""
        return self.name in fetch_suites.pins(fetch_suites.PINS.read_text())


# The longest first: two at a time end soonest so.
SUITES = (
    Suite(
        "jupyter_server",
        ("tests/services/kernels/test_api.py", "tests/services/sessions"),
        "kernels API, sessions",
    ),
    Suite("nbclient", ("tests",), "all", asyncio=True),
    Suite(
        "jupyter_client",
        ("tests/test_client.py", "tests/test_kernelmanager.py", "tests/test_runapp.py"),
        "client, kernel manager, `jupyter run`",
    ),
    Suite(
        "ipykernel",
        ("tests/test_message_spec.py", "tests/test_kernel.py", "tests/test_subshells.py"),
        "message specification, kernel, subshells",
        asyncio=True,
    ),
    Suite("jupyter_kernel_test", ("tests/suites/test_conformance.py",), "all"),
    Suite(
        "programs",
        ("tests/suites/test_clients.py",),
        "nbclient, `jupyter execute`, `nbconvert --execute`, papermill, `jupyter console`",
    ),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One suite's counts; ``problem`` is empty where all is well."""

    suite: Suite
    seconds: float
    version: str = ""
    passed: int = 0
    skipped: int = 0
    clauses: tuple[tuple[str, int], ...] = ()
    sandboxes: int = 0
    problem: str = ""


def environment(suite: Suite, scratch: Path) -> dict[str, str]:
    """Return the variables of a suite's run: the caller's, with Jupyter's files moved away."""
    dirs = state_dirs()
    moved = {
        **{f"JUPYTER_{name}_DIR": str(scratch / name) for name in ("CONFIG", "DATA", "RUNTIME")},
        "IPYTHONDIR": str(scratch / "ipython"),
        "JUPYTER_PLATFORM_DIRS": "1",
        "PATH": f"{fetch_suites.PLACE / 'venv/bin'}:{os.environ.get('PATH', os.defpath)}",
        "PYTHONPATH": str(Path(__file__).parent),
        # Each host of the tests has this engine; the suites' kernelspecs name none.
        "BACKINTEL_SANDBOX": "bwrap",
        routed.SUITE_VARIABLE: suite.name,
        routed.REPORT_VARIABLE: str(scratch / "report.json"),
    }
    if os.geteuid() != 0:
        # Suites move HOME; the prepared image stays where it is.
        moved |= {"XDG_DATA_HOME": str(dirs.data.parent), "XDG_STATE_HOME": str(dirs.state.parent)}
    if suite.foreign:
        moved["JUPYTER_DEFAULT_PROVISIONER_NAME"] = "backintel-provisioner"
    dropped = ("CI", "JUPYTER_PATH", "JUPYTER_CONFIG_PATH", "PYTEST_ADDOPTS", "VIRTUAL_ENV")
    return {k: v for k, v in os.environ.items() if k not in dropped} | moved


def command(suite: Suite, scratch: Path) -> list[str]:
    """Return the command of one suite. A foreign one keeps its own options but for warnings."""
    python = fetch_suites.PLACE / "venv/bin/python"
    options = ["-p", "routed", "-p", "no:cacheprovider", f"--basetemp={scratch / 't'}", "-q"]
    if not suite.asyncio:
        options += ["-p", "no:asyncio"]
    if suite.foreign:
        # Their warnings are about themselves, their display options about their own CI.
        options += ["-o", "filterwarnings=", "-o", "addopts=--strict-markers", "-o", "timeout=100"]
        options += ["-o", "log_cli_level="]
    return [str(python), "-m", "pytest", *options, *suite.tests]


def run(suite: Suite) -> Result:
    """Run one suite; its output goes to stderr as a whole if something is wrong with it."""
    started = time.monotonic()
    place = fetch_suites.PLACE / suite.name if suite.foreign else ROOT
    # Short, for sockets below it must fit into 107 bytes.
    with tempfile.TemporaryDirectory(prefix="bs-") as name:
        scratch = Path(name)
        for directory in ("CONFIG", "DATA", "RUNTIME", "ipython"):
            (scratch / directory).mkdir(mode=0o700)
        process = subprocess.Popen(
            command(suite, scratch),
            cwd=place,
            env=environment(suite, scratch),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=SUITE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"\nended after {SUITE_TIMEOUT_S} s\n"
        report = scratch / "report.json"
        facts = json.loads(report.read_text()) if report.is_file() else {}
    result = judge(suite, process.returncode, facts, time.monotonic() - started)
    if result.problem:
        print(f"---- {suite.name}: {result.problem}\n{output}", file=sys.stderr, flush=True)
    return result


def judge(suite: Suite, status: int, facts: dict[str, Any], seconds: float) -> Result:
    """Turn a run's exit status and report into counts and, where something is wrong, a problem."""
    if not facts:
        return Result(suite, seconds, problem=f"exit status {status} and no report")
    outcomes, sessions = facts["outcomes"], list(facts["sessions"])
    problem = ""
    if status or outcomes.get("failed"):
        problem = f"{outcomes.get('failed', 0)} failed (exit status {status})"
    elif facts["elsewhere"]:
        problem = f"{facts['elsewhere']} kernels would have started outside a sandbox"
    elif suite.foreign and not sessions:
        problem = "no sandbox was started"
    elif left := left_behind(sessions):
        problem = f"left behind: {left}"
    return Result(
        suite,
        seconds,
        version=str(facts["version"]),
        passed=outcomes.get("passed", 0),
        skipped=outcomes.get("skipped", 0),
        clauses=tuple(sorted(facts["deselected"].items())),
        sandboxes=len(sessions),
        problem=problem,
    )


def left_behind(sessions: list[str]) -> list[str]:
    """Return the sessions of a finished suite that still have a record after a while."""
    records = state_dirs().sessions
    deadline = time.monotonic() + LEFT_WITHIN_S
    while left := [name for name in sessions if (records / f"{name}.json").exists()]:
        if time.monotonic() >= deadline:
            return left
        time.sleep(0.1)
    return []


def tables(results: list[Result]) -> str:
    """Return the counts as Markdown: by suite, and the deselected ones by clause."""
    lines = [
        "| suite | version | part | passed | skipped | deselected |",
        "|---|---|---|---|---|---|",
    ]
    clauses: dict[str, Counter[str]] = {}
    for result in results:
        name = result.suite.name
        for clause, count in result.clauses:
            clauses.setdefault(clause, Counter())[name] += count
        lines.append(
            f"| {name} | {result.version} | {result.suite.shown} | {result.passed} "
            f"| {result.skipped} | {sum(count for _, count in result.clauses)} |"
        )
    lines += ["", "| clause of the spec | deselected tests |", "|---|---|"]
    for clause, counts in sorted(clauses.items()):
        told = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
        lines.append(f"| {clause} | {told} |")
    return "\n".join(lines)


def update(document: Path, text: str) -> None:
    """Replace what stands between the markers. Raises ValueError if they are missing."""
    before, begin, rest = document.read_text().partition(BEGIN)
    _old, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document} lacks the markers {BEGIN} and {END}.")
    document.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def main() -> None:
    """Fetch, run, tell, and update a document if asked; exit status 1 if anything is wrong."""
    names = [suite.name for suite in SUITES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(names)}")
    parser.add_argument("--jobs", type=int, default=2, help="suites at a time")
    parser.add_argument("--update", type=Path, metavar="FILE", help="put the counts into FILE")
    options = parser.parse_args()
    if unknown := set(options.suites) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(names)}.")
    if options.update and options.suites:
        parser.error("--update needs all suites.")
    chosen = [suite for suite in SUITES if not options.suites or suite.name in options.suites]
    fetch_suites.fetch()
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(run, chosen))
    for result in results:
        deselected = sum(count for _, count in result.clauses)
        print(
            f"test-suites: {result.suite.name}: {result.passed} passed, {result.skipped} skipped, "
            f"{deselected} deselected, {result.sandboxes} sandboxes, {result.seconds:.0f} s"
            f"{'; ' + result.problem if result.problem else ''}"
        )
    if any(result.problem for result in results):
        raise SystemExit(1)
    if options.update:
        update(options.update, tables(results))


if __name__ == "__main__":
    main()
