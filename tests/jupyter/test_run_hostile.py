"""``backintel run`` keeps a notebook's work whatever the guest, the reader or the disk does."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
from pathlib import Path

import pytest
from runs import COMMAND, Bench

from kernel_provisioner.runmodel import RunRequest
from kernel_provisioner.runner import run as run_notebook

pytestmark = pytest.mark.sandbox

# Any code of a cell, a library included, can send messages with the kernel's own key.
SEND = """
from ipykernel.kernelapp import IPKernelApp
app = IPKernelApp.instance()
kernel = app.kernel
session = kernel.session
def publish(kind, content):
    session.send(kernel.iopub_socket, kind, content, parent=kernel.get_parent("shell"))
def reply(content):
    ident = kernel._shell_parent_ident.get()
    session.send(app.shell_socket, "execute_reply", content, kernel.get_parent("shell"), ident)
"""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.mark.parametrize(
    "attack",
    [
        "publish('stream', {})",
        "publish('status', {})",
        "publish('error', {'ename': {'a': 1}, 'evalue': [1], 'traceback': []})",
        "publish('comm_msg', {'comm_id': [1], 'data': {'state': 1}})",
        "import time; reply({}); time.sleep(1)",
    ],
)
def test_a_malformed_message_is_the_notebooks_failure(bench: Bench, attack: str) -> None:
    bench.write("print('precious')", f"{SEND}\n{attack}", "print('no')")
    run = bench.run()
    assert run.status == 1
    assert run.report["error"]["code"] == "MalformedMessage"
    assert "Traceback" not in run.progress
    assert run.cells[0].outputs[0].text == "precious\n"
    assert run.errors == ["MalformedMessage"]
    assert run.receipt["run"]["error"]["code"] == "MalformedMessage"
    assert not (run.out / "artifacts").exists()


def test_the_sandboxs_own_end_outranks_a_malformed_message(bench: Bench) -> None:
    bench.write(f"{SEND}\npublish('stream', {{}})\nwhile True: pass")
    run = bench.run("--cell-deadline", "3")
    assert (run.status, run.report["error"]["code"]) == (4, "CellDeadlineExceeded")


def test_a_number_that_is_none_leaves_a_valid_notebook(bench: Bench) -> None:
    output = "{'name': 'stdout', 'text': 'kept', 'execution_count': 'x'}"
    bench.write(f"{SEND}\npublish('stream', {output})\nreply({{'status': 'ok'}})")
    run = bench.run()
    assert run.status == 0
    assert run.cells[0].outputs[0].text == "kept"
    assert run.cells[0].execution_count is None


def test_output_that_comes_long_after_the_reply_is_kept(bench: Bench) -> None:
    # As when thousands of messages are still on their way; nbclient itself waits 4 s.
    early = "reply({'status': 'ok', 'execution_count': 1, 'payload': [], 'user_expressions': {}})"
    bench.write(f"{SEND}\nimport time\n{early}\ntime.sleep(5.5)\nprint('late')", "print('next')")
    run = bench.run()
    assert run.status == 0
    assert [cell.outputs[0].text for cell in run.cells] == ["late\n", "next\n"]


def test_a_cells_error_can_neither_control_a_terminal_nor_forge_lines(bench: Bench) -> None:
    name = r"\x1b]0;title\x07\x1b[31mE\nremedy     none"
    bench.write(
        f"class E(Exception): pass\nE.__name__ = '{name}'\nraise E('\\x1b[2J\\nnotebook   no')"
    )
    command = [*COMMAND, "run", str(bench.notebook), "--out", str(bench.out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "\x1b" not in done.stdout + done.stderr
    assert "\nremedy" not in done.stdout
    assert done.stdout.count("\nnotebook") == 1
    assert "\\u001b" not in (bench.out / "receipt.json").read_text()


@pytest.mark.parametrize(
    "redirection", [">&- 2>&-", ">/dev/full 2>/dev/full", "2>&1 | true", "<&- >&- 2>/dev/null"]
)
def test_no_reader_is_needed_for_a_run_to_end_as_it_does(bench: Bench, redirection: str) -> None:
    bench.write("print('precious')", "1/0")
    shell = f'set -o pipefail; "$@" {redirection}'
    command = [*COMMAND, "run", str(bench.notebook), "--out", str(bench.out), "--json"]
    done = subprocess.run(["bash", "-c", shell, "bash", *command], timeout=100, check=False)
    assert done.returncode == 1
    assert json.loads((bench.out / "receipt.json").read_text())["run"]["exit_status"] == 1
    saved = json.loads((bench.out / "n.ipynb").read_text())
    assert saved["cells"][0]["outputs"][0]["text"] == ["precious\n"]


def test_a_result_that_cannot_be_printed_is_told_and_the_run_stays_done(bench: Bench) -> None:
    bench.write("open('/artifacts/a.txt', 'w').write('x')")
    command = [*COMMAND, "run", str(bench.notebook), "--out", str(bench.out), "--json"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100, check=False
        )
    assert done.returncode == 0
    assert "could not be written to standard output (No space left on device)" in done.stderr
    assert (bench.out / "artifacts/a.txt").read_text() == "x"


def test_a_stalled_reader_does_not_hold_up_a_run(bench: Bench) -> None:
    bench.write("print('precious')")
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writable, b"x" * 4096):
            pass
    os.set_blocking(writable, True)
    command = [*COMMAND, "run", str(bench.notebook), "--out", str(bench.out)]
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=writable, timeout=100, check=False
    )
    os.close(readable)
    os.close(writable)
    assert done.returncode == 0


def test_a_notebooks_name_may_be_as_long_as_a_name_can_be(bench: Bench) -> None:
    bench.write("print('precious')")
    name = "ü" * 124 + "n.ipynb"
    assert len(name.encode()) == 255
    bench.notebook = bench.notebook.rename(bench.notebook.with_name(name))
    command = [*COMMAND, "run", str(bench.notebook), "--out", str(bench.out)]
    assert subprocess.run(command, capture_output=True, timeout=100, check=False).returncode == 0
    assert (bench.out / name).is_file()


def test_a_longer_name_is_refused_before_anything_runs(bench: Bench) -> None:
    bench.write("print('precious')")
    bench.notebook = bench.notebook.rename(bench.notebook.with_name("x" * 253))
    command = [*COMMAND, "run", str(bench.notebook), "--out", str(bench.out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert "File name too long" in done.stderr
    assert "start" not in done.stderr
    assert not bench.out.exists()


def test_a_disk_that_fills_up_costs_only_what_does_not_fit(bench: Bench, tmp_path: Path) -> None:
    signs = tmp_path / "signs"
    signs.mkdir()
    signs.chmod(0o755)
    bench.write(
        "open('/artifacts/a.txt', 'w').write('x'); print('x' * 100_000)",
        "import os, time\nwhile not os.path.exists('/sources/signs/go'): time.sleep(0.05)",
    )
    command = [*COMMAND, "run", str(bench.notebook), "--out", str(bench.out), "--json"]
    command += ["--source", f"signs={signs}"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stderr is not None
        assert any("cell 1/2" in line for line in child.stderr)
        # As a full disk does, the kernel refuses this process every byte beyond these.
        resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (50_000, 50_000))
        (signs / "go").touch()
        printed, _ = child.communicate(timeout=60)
    report = json.loads(printed)
    assert (child.returncode, report["error"]["code"]) == (3, "not_saved")
    assert "n.ipynb' cannot be written (File too large)" in report["error"]["message"]
    assert {path.name for path in bench.out.iterdir()} == {"artifacts", "receipt.json"}
    facts = json.loads((bench.out / "receipt.json").read_text())["run"]
    assert facts["error"] == report["error"]
    assert (facts["published"], facts["executed_sha256"]) == (True, None)


def test_a_defect_of_this_side_is_told_after_everything_is_saved(bench: Bench) -> None:
    class Defective:
        """A caller's progress that fails in the second cell."""

        def note(self, text: str) -> None:
            pass

        def starting(self) -> None:
            pass

        def ending(self) -> None:
            pass

        def over(self) -> None:
            pass

        def phase(self, name: str, seconds: float) -> None:
            pass

        def cell_started(self, number: int, total: int, source: str) -> None:
            if number == 2:
                raise ZeroDivisionError

        def cell_ended(self, number: int, total: int, seconds: float, state: str) -> None:
            pass

        def cell_skipped(self, number: int, total: int, source: str) -> None:
            pass

    bench.write("print('precious')", "print('no')")
    with pytest.raises(ZeroDivisionError):
        run_notebook(RunRequest(bench.notebook, bench.out), Defective())
    saved = json.loads((bench.out / "n.ipynb").read_text())
    assert saved["cells"][0]["outputs"][0]["text"] == ["precious\n"]
    facts = json.loads((bench.out / "receipt.json").read_text())["run"]
    assert (facts["exit_status"], facts["error"]["code"]) == (3, "internal")
    assert {path.name for path in bench.out.iterdir()} == {"n.ipynb", "receipt.json"}
