"""``backintel run`` end to end, in a real sandbox: what comes out, and how each end is told."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from runs import COMMAND, Bench

from kernel_provisioner.paths import state_dirs

pytestmark = pytest.mark.sandbox


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_notebook_on_a_source_gives_artifacts_and_a_receipt(bench: Bench, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.csv").write_text("1,2\n")
    before = hashlib.sha256((data / "a.csv").read_bytes()).hexdigest()
    for path in (data, data / "a.csv"):
        path.chmod(0o755)
    bench.write(
        "factor = 1",
        "rows = open('/sources/sales/a.csv').read().split(',')",
        "total = factor * sum(map(int, rows))\nprint(total)",
        "import json, pathlib\npathlib.Path('/artifacts/d').mkdir()\n"
        "json.dump({'total': total}, open('/artifacts/d/found.json', 'w'))",
        "raise ValueError('meant')",
        "this is not Python",
        tags={0: "parameters", 4: "raises-exception", 5: "skip-execution"},
        kernelspec={"name": "conda-x", "display_name": "mine", "language": "python"},
        backintel={
            "requires": [
                {
                    "artifact": "d/found.json",
                    "schema": {"properties": {"total": {"const": 30}}, "required": ["total"]},
                }
            ]
        },
    )
    run = bench.run("--source", f"sales={data}", "--param", "factor=10")
    assert run.status == 0
    assert run.report["complete"]
    assert run.report["cells"] == {"total": 7, "run": 7, "failed": None}
    content = (run.out / "artifacts/d/found.json").read_bytes()
    assert json.loads(content) == {"total": 30}
    (artifact,) = run.receipt["artifacts"]
    assert artifact["name"] == "d/found.json"
    assert artifact["sha256"] == hashlib.sha256(content).hexdigest()
    assert run.report["artifacts"] == [artifact]
    assert run.cells[3].outputs[0].text == "30\n"
    assert run.errors == ["ValueError"]
    facts = run.receipt["run"]
    assert facts["notebook_sha256"] == hashlib.sha256(bench.notebook.read_bytes()).hexdigest()
    assert (
        facts["executed_sha256"] == hashlib.sha256((run.out / "n.ipynb").read_bytes()).hexdigest()
    )
    assert (facts["complete"], facts["published"], facts["parameters"]) == (True, True, ["factor"])
    assert run.receipt["profile"]["name"] == "analysis"
    assert run.receipt["ended"]["reason"] == "Shutdown"
    assert hashlib.sha256((data / "a.csv").read_bytes()).hexdigest() == before


def test_a_failing_cell_ends_the_run_and_its_outputs_are_kept(bench: Bench) -> None:
    bench.write("open('/artifacts/a.txt', 'w').write('x')", "print('before')\n1/0", "print('no')")
    run = bench.run()
    assert run.status == 1
    assert run.report["cells"] == {"total": 3, "run": 1, "failed": 2}
    assert run.errors == ["ZeroDivisionError"]
    assert run.cells[1].outputs[0].text == "before\n"
    assert run.cells[2].outputs == []
    assert not (run.out / "artifacts").exists()
    assert run.receipt["artifacts"] == []


def test_a_cell_deadline_is_told_in_the_cell(bench: Bench) -> None:
    bench.write("print('before', flush=True)\nwhile True: pass", "print('no')")
    run = bench.run("--cell-deadline", "2")
    assert run.status == 4
    assert run.errors == ["CellDeadlineExceeded"]
    assert run.cells[0].outputs[0].text == "before\n"
    assert run.report["ended"]["reason"] == "CellDeadlineExceeded"
    assert run.report["ended"]["class"] == "limit"
    assert "cell deadline" in run.progress or "its deadline of 2 s" in run.progress


def test_a_deadline_ends_also_a_cell_that_may_raise(bench: Bench) -> None:
    bench.write("while True: pass", "print('no')", tags={0: "raises-exception"})
    run = bench.run("--cell-deadline", "2")
    assert (run.status, run.report["error"]["code"]) == (4, "CellDeadlineExceeded")
    assert not (run.out / "artifacts").exists()


def test_an_interrupted_cell_is_a_deadline_too(bench: Bench) -> None:
    bench.write("import time; time.sleep(60)")
    run = bench.run("--profile", "interactive", "--cell-deadline", "2")
    assert run.status == 4
    assert run.report["error"]["code"] == "CellDeadlineExceeded"
    assert run.errors == ["KeyboardInterrupt", "CellDeadlineExceeded"]


def test_a_run_deadline_ends_the_run(bench: Bench) -> None:
    """nbclient#212: the whole notebook has a deadline, and what it printed until then is saved."""
    sleep = "import time\nfor _ in range(60): time.sleep(1)"
    bench.write("print('first')", "print('second', flush=True)\n" + sleep, "print('no')")
    run = bench.run("--run-deadline", "15")
    assert run.status == 4
    assert run.errors == ["RunDeadlineExceeded"]
    assert [cell.outputs[0].text for cell in run.cells[:2]] == ["first\n", "second\n"]
    assert run.cells[2].outputs == []


def test_a_kernel_that_kills_itself_is_the_notebooks_failure(bench: Bench) -> None:
    bench.write("print('before', flush=True)", "import os; os.kill(os.getpid(), 9)")
    run = bench.run()
    assert run.status == 1
    assert run.errors == ["KernelCrashed"]


def test_too_much_memory_is_a_limit(bench: Bench) -> None:
    bench.write("x = bytearray(3 << 30)")
    run = bench.run()
    assert run.status == 5
    assert run.errors == ["OutOfMemory"]


def test_the_41st_cell_is_refused(bench: Bench) -> None:
    bench.write(*[str(number) for number in range(41)])
    run = bench.run()
    assert run.status == 5
    assert run.errors == ["CellLimitExceeded"]
    assert run.report["cells"] == {"total": 41, "run": 40, "failed": 41}


@pytest.mark.parametrize("name", ["CellDeadlineExceeded", "CellLimitExceeded", "GuestLost"])
def test_a_forged_reason_is_the_notebooks_failure(bench: Bench, name: str) -> None:
    bench.write(f"class {name}(Exception): pass\nraise {name}('forged')")
    run = bench.run()
    assert run.status == 1
    assert run.errors == [name]


def test_a_notebook_without_code_is_not_complete(bench: Bench) -> None:
    bench.write()
    run = bench.run()
    assert run.status == 1
    assert run.report["error"]["code"] == "no_code_cells"
    assert not (run.out / "artifacts").exists()


@pytest.mark.parametrize(
    ("requires", "reason"),
    [
        (["absent.png"], "requires the artifact 'absent.png'"),
        ([{"artifact": "a.json", "schema": {"type": "array"}}], "breaks its schema"),
    ],
)
def test_an_unmet_requirement_publishes_nothing(
    bench: Bench, requires: list[Any], reason: str
) -> None:
    bench.write("open('/artifacts/a.json', 'w').write('{}')", backintel={"requires": requires})
    run = bench.run()
    assert run.status == 6
    assert reason in run.report["error"]["message"]
    assert not (run.out / "artifacts").exists()
    assert run.receipt["artifacts"] == []
    assert run.receipt["run"]["published"] is False


def test_a_refused_artifact_publishes_nothing(bench: Bench) -> None:
    bench.write("open('/artifacts/ok.txt', 'w').write('x')\nopen('/artifacts/x.exe', 'w')")
    run = bench.run()
    assert run.status == 6
    assert "x.exe" in run.report["error"]["message"]
    assert not (run.out / "artifacts").exists()


def test_what_the_notebook_says_of_itself_changes_nothing(bench: Bench) -> None:
    config = {"engine": "docker", "profile": "benchmark", "sources": {"etc": "/etc"}}
    bench.write(
        "import os\nprint(os.getcwd(), os.listdir('/sources'), os.environ.get('CANARY'))",
        backintel=config,
        kernel_provisioner={"provisioner_name": "local-provisioner", "config": config},
        kernelspec={"name": "python3", "display_name": "x", "language": "python", "env": config},
    )
    bench.notebook.parent.chmod(0o700)
    run = bench.run(CANARY="seen")
    assert run.status == 0
    assert run.cells[0].outputs[0].text == "/workspace [] None\n"
    assert run.receipt["profile"]["name"] == "analysis"
    assert "seen" not in (run.out / "receipt.json").read_text()


def test_progress_on_a_terminal_is_one_line_that_changes(bench: Bench) -> None:
    bench.write("import time; time.sleep(3)")
    leader, follower = pty.openpty()
    command = [*COMMAND, "run", str(bench.notebook), "--out", str(bench.out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=follower) as child:
        os.close(follower)
        shown = b""
        while True:
            try:
                chunk = os.read(leader, 65536)
            except OSError:  # EIO: the other end is closed
                break
            if not chunk:
                break
            shown += chunk
        assert child.wait(timeout=60) == 0
    os.close(leader)
    # Each is drawn over the one before; a busy host may leave one out.
    drawn = re.findall(rb"\r\x1b\[2K  cell 1/1  import time; time\.sleep\(3\)  (\d+) s", shown)
    assert len(set(drawn)) >= 2
    assert drawn == sorted(drawn, key=int)
    assert re.search(rb"time\.sleep\(3\)  done in [3-9]\.\d s\r?\n", shown)


def test_a_run_that_names_no_engine_is_of_smolvm_or_refused(bench: Bench, tmp_path: Path) -> None:
    """In a home with the image, but without a prepared smolvm; all other tests here have bwrap."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "image").symlink_to(state_dirs().image)
    bench.write("1 + 1")
    run = bench.run(BACKINTEL_HOME=str(home), BACKINTEL_SANDBOX="")
    error = run.report["error"]
    assert (run.status, error["code"]) == (3, "engine_unavailable")
    assert "smolvm" in error["message"] or "/dev/kvm" in error["message"]
    assert run.report["cells"]["run"] == 0
