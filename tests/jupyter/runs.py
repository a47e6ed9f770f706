"""Helpers of the tests of ``backintel run``: write a notebook, run it, look at what came out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_code_cell, new_notebook

from kernel_provisioner.paths import state_dirs

COMMAND = [sys.executable, "-m", "kernel_provisioner.cli.main"]


@dataclass
class Run:
    """A finished ``backintel run --json``."""

    status: int
    report: dict[str, Any]
    progress: str
    out: Path
    finished: float
    """When it was over (wall time)."""

    @property
    def cells(self) -> list[Any]:
        """The executed notebook's code cells."""
        return list(nbformat.read(self.out / "n.ipynb", 4).cells)

    @property
    def receipt(self) -> dict[str, Any]:
        """What DIR/receipt.json holds."""
        data: dict[str, Any] = json.loads((self.out / "receipt.json").read_text())
        return data

    @property
    def errors(self) -> list[str]:
        """The names of all errors that the executed notebook shows."""
        outputs = [output for cell in self.cells for output in cell.outputs]
        return [output.ename for output in outputs if output.output_type == "error"]


class Bench:
    """Writes a notebook, runs it, and checks what must hold after every run."""

    def __init__(self, directory: Path) -> None:
        self.notebook = directory / "n.ipynb"
        self.out = directory / "out"

    def write(self, *sources: str, tags: dict[int, str] | None = None, **metadata: Any) -> None:
        """Write code cells; ``tags`` gives some of them a tag, by index."""
        cells = [new_code_cell(source) for source in sources]
        for index, tag in (tags or {}).items():
            cells[index].metadata["tags"] = [tag]
        nbformat.write(new_notebook(cells=cells, metadata=metadata), self.notebook)

    def run(self, *words: str, **environ: str) -> Run:
        """Run the notebook."""
        done = subprocess.run(
            [*COMMAND, "run", str(self.notebook), "--out", str(self.out), "--json", *words],
            env=os.environ | environ,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        finished = time.time()
        report = json.loads(done.stdout)
        assert report["exit_status"] == done.returncode
        run = Run(done.returncode, report, done.stderr, self.out, finished)
        nothing_is_left(report["session"], run)
        return run


def control_groups(session: str) -> list[str]:
    """Return the session's control groups; those of others may come and go meanwhile."""
    walk = os.walk("/sys/fs/cgroup")  # unlike glob(), it passes over what vanished
    return [f"{place}/{name}" for place, names, _ in walk for name in names if session in name]


def nothing_is_left(session: str, run: Run) -> None:
    """Check that the session left no record, no cgroup, no process and no half-written file."""
    assert run.receipt["leftovers"] == []
    assert not (state_dirs().sessions / f"{session}.json").exists()
    assert control_groups(session) == []
    assert {path.name for path in run.out.iterdir()} <= {"n.ipynb", "artifacts", "receipt.json"}
