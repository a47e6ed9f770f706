"""A pytest plugin for suites that others wrote: what is deselected, what ran, and where.

Loaded by ``outside.py`` into the run of one suite. It leaves out the tests of ``deselected.txt``,
refuses lines that name no test, turns every kernel that would start outside a sandbox into a
failure, and reports outcomes and session ids as JSON. It trusts the suites.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).with_name("deselected.txt")
SUITE_VARIABLE = "BACKINTEL_SUITE"
REPORT_VARIABLE = "BACKINTEL_SUITE_REPORT"
STAND_IN = "echo"
"""jupyter_client's client tests ask for a kernel of this name, of the host's Python, that does
nothing but answer; a sandbox answers in its place."""

_CLAUSE = re.compile(r"[A-N]\d{0,2}")


@dataclass(frozen=True, slots=True)
class Deselected:
    """One line: a suite's test (or all below a node), and the clause that it conflicts with."""

    suite: str
    node: str
    clause: str
    reason: str

    def holds(self, node: str) -> bool:
        """Tell whether the line names this test, its parameters or what is below it."""
        return node == self.node or node.startswith((f"{self.node}[", f"{self.node}::"))


def read(text: str) -> list[Deselected]:
    """Parse ``suite | test | clause | reason`` lines. Raises ValueError naming a bad line."""
    found = []
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        fields = [field.strip() for field in line.split(" | ")]
        if len(fields) != 4 or not all(fields) or not _CLAUSE.fullmatch(fields[2]):
            raise ValueError(f"{FILE.name}: {line!r} is not `suite | test | clause | reason`.")
        found.append(Deselected(*fields))
    return found


class Routed:
    """Counts one suite's run and writes the report at its end."""

    def __init__(self, suite: str, report: Path) -> None:
        self.lines = [line for line in read(FILE.read_text()) if line.suite == suite]
        self.report = report
        self.clauses: Counter[str] = Counter()
        self.outcomes: dict[str, str] = {}
        self.skips: dict[str, str] = {}
        self.sessions: list[str] = []
        self.elsewhere = 0
        try:
            self.version = metadata.version(suite)
        except metadata.PackageNotFoundError:  # programs of several distributions
            self.version = ""

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out what the file names. Raises UsageError for a line that names nothing."""
        used = set()
        kept, left = [], []
        for item in items:
            line = next((line for line in self.lines if line.holds(item.nodeid)), None)
            if line is None:
                kept.append(item)
            else:
                used.add(line)
                left.append(item)
                self.clauses[line.clause] += 1
        if stale := [line.node for line in self.lines if line not in used]:
            raise pytest.UsageError(f"{FILE.name} names no test of this suite: {stale}")
        config.hook.pytest_deselected(items=left)
        items[:] = kept

    def pytest_collection_finish(self) -> None:
        """Watch where kernels start; only now, for suites set variables before they import."""
        from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
        from jupyter_client.provisioning.local_provisioner import LocalProvisioner

        from kernel_provisioner.provisioner import SandboxProvisioner

        launch = SandboxProvisioner.launch_kernel

        async def sandboxed(provisioner: Any, *args: Any, **kwargs: Any) -> Any:
            info = await launch(provisioner, *args, **kwargs)
            self.sessions.append(provisioner.session_id)
            return info

        async def refused(*_args: Any, **_kwargs: Any) -> Any:
            self.elsewhere += 1
            raise AssertionError("a kernel would have started outside a sandbox")

        find = KernelSpecManager.get_kernel_spec

        def stood_in(manager: KernelSpecManager, name: str) -> KernelSpec:
            spec = find(manager, name)
            if name == STAND_IN:
                spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
            return spec

        KernelSpecManager.get_kernel_spec = stood_in  # type: ignore[method-assign, assignment]
        SandboxProvisioner.launch_kernel = sandboxed  # type: ignore[method-assign, assignment]
        LocalProvisioner.launch_kernel = refused  # type: ignore[method-assign]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a test's worst phase."""
        node = report.nodeid
        if report.failed:
            self.outcomes[node] = "failed"
        elif report.skipped and self.outcomes.get(node) != "failed":
            self.outcomes[node] = "skipped"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            self.skips[node] = str(reason).removeprefix("Skipped: ")
        elif report.when == "call":
            self.outcomes.setdefault(node, "passed")

    def pytest_sessionfinish(self) -> None:
        """Write what ``outside.py`` reads."""
        facts = {
            "outcomes": Counter(self.outcomes.values()),
            "deselected": self.clauses,
            "skips": self.skips,
            "sessions": self.sessions,
            "elsewhere": self.elsewhere,
            "version": self.version,
        }
        self.report.write_text(json.dumps(facts))


def pytest_configure(config: pytest.Config) -> None:
    """Register the counter for the suite that the environment names."""
    plugin = Routed(os.environ[SUITE_VARIABLE], Path(os.environ[REPORT_VARIABLE]))
    config.pluginmanager.register(plugin, "routed-counter")
