"""``backintel run`` that is ended from outside: signals, and the loss of what it depends on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from runs import COMMAND, Bench, control_groups

from kernel_provisioner.paths import state_dirs
from kernel_provisioner.processes import is_running
from kernel_provisioner.records import Record, live_sessions, sweep

pytestmark = pytest.mark.sandbox


@contextmanager
def running(tmp_path: Path, *starter: str) -> Iterator[tuple[subprocess.Popen[str], Record]]:
    """Yield a run whose first cell is done and whose second one sleeps, and its record.

    ``starter`` is a command that becomes the run.
    """
    notebook = tmp_path / "n.ipynb"
    sources = ["print('first')", "print('second', flush=True)\nimport time; time.sleep(90)"]
    nbformat.write(new_notebook(cells=[new_code_cell(source) for source in sources]), notebook)
    # Whatever runs the tests may ignore SIGHUP, and its children inherit that.
    command = ["env", "--default-signal=HUP", *starter, *COMMAND, "run", str(notebook)]
    command += ["--out", str(tmp_path / "out"), "--json"]
    before = {record.session for record in live_sessions(state_dirs())}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stderr is not None
            for line in child.stderr:
                if "cell 1/2" in line:
                    break
            else:
                pytest.fail(f"the run ended early: {child.communicate()}")
            record = _record_of(child.pid, before)
            yield child, record
        finally:
            child.kill()


def _record_of(pid: int, before: set[str]) -> Record:
    for record in live_sessions(state_dirs()):
        stat = Path(f"/proc/{record.supervisor.pid}/stat").read_text()
        if record.session not in before and int(stat.rpartition(")")[2].split()[1]) == pid:
            return record
    pytest.fail("the run has no session")


def _report(child: subprocess.Popen[str]) -> dict[str, Any]:
    printed, _ = child.communicate(timeout=30)
    report: dict[str, Any] = json.loads(printed)
    assert report["exit_status"] == child.returncode
    return report


def _left(record: Record) -> list[object]:
    """Return what there still is of a session; an unreaped zombie runs no code and is nothing."""
    left: list[object] = list(control_groups(record.session))
    left += filter(is_running, (record.supervisor, *record.leftovers.processes))
    left += filter(Path.exists, (record.socket_dir, *record.leftovers.directories))
    return left


@pytest.mark.parametrize(
    ("signum", "times", "status"),
    [
        (signal.SIGINT, 1, 130),
        (signal.SIGTERM, 1, 143),
        (signal.SIGHUP, 1, 129),
        (signal.SIGINT, 5, 130),
    ],
)
def test_a_signal_ends_the_sandbox_and_saves_the_notebook(
    tmp_path: Path, signum: signal.Signals, times: int, status: int
) -> None:
    with running(tmp_path) as (child, record):
        for _ in range(times):
            child.send_signal(signum)
        report = _report(child)
    assert child.returncode == status
    assert report["cells"] == {"total": 2, "run": 1, "failed": None}
    saved = nbformat.read(tmp_path / "out/n.ipynb", 4)
    assert saved.cells[0].outputs[0].text == "first\n"
    assert json.loads((tmp_path / "out/receipt.json").read_text())["run"]["exit_status"] == status
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"n.ipynb", "receipt.json"}
    assert _left(record) == []


def test_nohup_is_heard(tmp_path: Path) -> None:
    ignoring = ("sh", "-c", "trap '' HUP; exec \"$@\"", "sh")
    with running(tmp_path, *ignoring) as (child, _):
        child.send_signal(signal.SIGHUP)
        child.send_signal(signal.SIGTERM)
        _report(child)
    assert child.returncode == 143


def test_a_killed_supervisor_is_the_infrastructures_failure(tmp_path: Path) -> None:
    """nbclient#88, papermill#125: the run ends with its reason instead of hanging."""
    with running(tmp_path) as (child, record):
        os.kill(record.supervisor.pid, signal.SIGKILL)
        report = _report(child)
    assert child.returncode == 3
    assert report["error"]["code"] == "GuestLost"
    saved = nbformat.read(tmp_path / "out/n.ipynb", 4)
    assert [output.get("ename") for output in saved.cells[1].outputs][-1] == "GuestLost"
    assert _left(record) == []


def test_a_killed_run_leaves_nothing_after_two_seconds_and_a_sweep(tmp_path: Path) -> None:
    with running(tmp_path) as (child, record):
        child.kill()
        child.wait(timeout=10)
        deadline = time.monotonic() + 2.0
        while is_running(record.supervisor) and time.monotonic() < deadline:
            time.sleep(0.02)
        sweep(state_dirs())
        assert _left(record) == []
        # The run had made it.
        assert not (tmp_path / "out").exists()


def test_the_directory_of_a_run_that_was_killed_with_its_supervisor_is_free_after_a_sweep(
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with running(tmp_path) as (child, record):
        again = [*COMMAND, "run", str(tmp_path / "n.ipynb"), "--out", str(out)]
        second = subprocess.run(again, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
        assert second.returncode == 2
        assert "another run uses" in second.stderr
        # Stopped, the run sees nothing of its supervisor's end.
        child.send_signal(signal.SIGSTOP)
        os.kill(record.supervisor.pid, signal.SIGKILL)
        child.kill()
        child.wait(timeout=10)
        assert [path.name for path in out.iterdir()] == [".backintel-run"]
        deadline = time.monotonic() + 10.0
        while is_running(record.supervisor) and time.monotonic() < deadline:
            time.sleep(0.02)
        sweep(state_dirs())
        assert list(out.iterdir()) == []


ALLOCATE = "held = []\nwhile True: held.append(b'x' * (64 << 20))"
LOOP = "import time; print(time.time(), flush=True)\nwhile True: pass"
PRINT = """
import time
try:
    while True: print('x' * 100_000)
except KeyboardInterrupt:
    raise KeyboardInterrupt(time.time()) from None
"""
SEGFAULT = "import ctypes; ctypes.string_at(0)"
EXIT = "import os; os._exit(3)"
KILL_GROUP = "import os; os.killpg(0, 9)"


@pytest.mark.parametrize(
    ("code", "status", "reason", "text"),
    [
        (ALLOCATE, 5, "OutOfMemory", "killed for memory: limit 2048 MiB, peak "),
        (LOOP, 4, "CellDeadlineExceeded", "longer than its deadline of 8 s"),
        (PRINT, 5, "OutputLimitExceeded", "more output than is allowed"),
        (SEGFAULT, 1, "KernelCrashed", "signal SIGSEGV"),
        (EXIT, 1, "KernelCrashed", "exit status 3"),
        (KILL_GROUP, 1, "KernelCrashed", "signal SIGKILL"),
    ],
    ids=["allocate", "loop", "print", "segfault", "exit", "kill-group"],
)
def test_each_way_to_end_badly_has_its_reason_status_and_speed(
    tmp_path: Path, code: str, status: int, reason: str, text: str
) -> None:
    """Each end has the reason in the notebook, the exit status, 5 s after the event.

    The event is the receipt's ``ended.at``, except for a deadline, which is known beforehand, and
    for a flood of output that an interrupt stopped.
    """
    bench = Bench(tmp_path)
    bench.write("print('precious')", code, "print('no')")
    # Long enough for memory or 64 MiB of text on a slow machine, where neither is the event.
    deadline = 8 if code is LOOP else 90
    run = bench.run("--cell-deadline", str(deadline))
    assert run.status == status
    assert run.report["error"]["code"] == reason
    assert run.errors[-1] == reason
    assert text in run.cells[1].outputs[-1].evalue
    assert run.cells[0].outputs[0].text == "precious\n"
    assert run.cells[2].outputs == []
    event = run.receipt["ended"]["at"]
    if code is LOOP:
        event = float(run.cells[1].outputs[0].text) + deadline
    elif code is PRINT and run.report["ended"] is None:
        event = float(run.cells[1].outputs[-2].evalue)
    else:
        assert run.report["ended"]["reason"] == reason
    assert run.finished - event < 5
