"""The real SmolVM: ``backintel run --engine smolvm`` from the command line to the receipt."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import nbformat
import proven
import pytest
from jsonschema import Draft202012Validator
from product import (
    ASKING,
    FLIGHTS_PROFILE,
    PROFILE,
    answering,
    left_behind,
    needs_emulation,
    run_notebook,
    write_notebook,
)

from kernel_provisioner.engines.smolvm import release

REPOSITORY = Path(__file__).resolve().parent.parent.parent
_CELLS = (
    """
import pandas as pd
frame = pd.read_csv('/sources/energy/readings.csv')
frame.head(5).to_csv('/artifacts/head.csv', index=False)
print(len(frame))
""",
    """
import matplotlib.pyplot as plt
figure, axes = plt.subplots(figsize=(3, 2))
axes.plot(frame.select_dtypes('number').iloc[:, 0])
figure.savefig('/artifacts/plot.png')
""",
)


def test_a_notebook_runs_to_its_artifacts_and_its_receipt(tmp_path: Path) -> None:
    out = tmp_path / "out"
    energy = REPOSITORY / "notebooks/data/energy"
    with answering() as port:
        notebook = write_notebook(tmp_path / "small.ipynb", [*_CELLS, ASKING.format(port=port)])
        given = ("--source", f"energy={energy}", "--endpoint", f"store=localhost:{port}")
        done = run_notebook(notebook, out, "--profile", PROFILE, *given)
    assert done.status == 0, done.said
    receipt = json.loads((out / "receipt.json").read_text())
    schema = json.loads((REPOSITORY / "docs/receipt.schema.json").read_text())
    Draft202012Validator(schema).validate(receipt)
    assert (receipt["backend"], receipt["backend_requested"]) == ("smolvm", "smolvm")
    assert receipt["isolation"] == "microVM"
    assert receipt["engine"]["version"] == "1.32.2"
    assert receipt["engine"]["digests"] == dict(release.load_pins().files)
    assert receipt["limits"]["guest_kernel"] == receipt["attested"]["vm"]["kernel"]
    assert receipt["ended"]["reason"] == "Shutdown"
    assert receipt["leftovers"] == []
    lines = len((energy / "readings.csv").read_text().splitlines()) - 1
    executed = nbformat.read(out / "small.ipynb", as_version=4)
    assert executed.cells[0].outputs[0].text.strip() == str(lines)
    assert executed.cells[2].outputs[0].text.strip() == "the host, to 'who answers?'"
    (endpoint,) = receipt["endpoints"]
    assert (endpoint["identity"], endpoint["connections"]) == ("stated", 1)
    found = {artifact["name"]: artifact["sha256"] for artifact in receipt["artifacts"]}
    assert sorted(found) == ["head.csv", "plot.png"]
    for name, digest in found.items():
        data = (out / "artifacts" / name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == digest
    assert (out / "artifacts/plot.png").read_bytes().startswith(b"\x89PNG")
    assert left_behind() == []
    vm = receipt["attested"]["vm"]
    proven.note(
        "run of a notebook",
        f"status 0 with pandas and Matplotlib; receipt: {receipt['backend']} "
        f"{receipt['engine']['version']}, {len(receipt['engine']['digests'])} digests, guest "
        f"kernel {vm['kernel']}; ready after {receipt['timings_ms']['ready'] / 1000:.0f} s",
    )
    proven.note("artifacts", f"{', '.join(sorted(found))} exported, digests as in the receipt")


@pytest.mark.full
def test_the_flights_notebook_runs_to_its_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    notebook = REPOSITORY / "notebooks/flights.ipynb"
    source = ("--source", f"flights={REPOSITORY}/.data/flights")
    done = run_notebook(notebook, out, "--profile", FLIGHTS_PROFILE, *source)
    assert done.status == 0, done.said
    receipt = json.loads((out / "receipt.json").read_text())
    assert receipt["backend"] == "smolvm" and receipt["run"]["published"]
    assert sorted(path.name for path in (out / "artifacts").iterdir()) == sorted(
        artifact["name"] for artifact in receipt["artifacts"]
    )
    assert left_behind() == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        # Piece by piece: all at once is refused to the program, as a MemoryError.
        ("x = []\nwhile True: x.append(bytearray(8 << 20))", 5, "OutOfMemory"),
        ("import ctypes\nctypes.string_at(0)", 1, "KernelCrashed"),
    ],
    ids=["memory", "crash"],
)
def test_an_end_has_its_reason_and_its_status(
    code: str, status: int, reason: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    notebook = write_notebook(tmp_path / "ends.ipynb", ["print('begun')", code, "print('no')"])
    done = run_notebook(notebook, out, "--profile", PROFILE)
    assert done.status == status, done.said
    receipt = json.loads((out / "receipt.json").read_text())
    assert receipt["ended"]["reason"] == reason
    cells = nbformat.read(out / "ends.ipynb", as_version=4).cells
    # Before the end for memory there is a warning, too.
    errors = [output for output in cells[1].outputs if output["output_type"] == "error"]
    assert [error["ename"] for error in errors] == [reason]
    assert cells[2].outputs == []
    assert left_behind() == []


@needs_emulation
@pytest.mark.full
def test_the_boot_counts_inside_the_run_deadline(tmp_path: Path) -> None:
    """No machine boots within ten seconds in emulation."""
    out = tmp_path / "out"
    notebook = write_notebook(tmp_path / "late.ipynb", ["print('ran')"])
    deadlines = ("--run-deadline", "10", "--cell-deadline", "10")
    done = run_notebook(notebook, out, "--profile", PROFILE, *deadlines)
    assert done.status == 4, done.said
    assert "run deadline of 10 s" in done.said
    assert left_behind() == []


def test_a_cell_deadline_ends_the_machine_and_says_why(tmp_path: Path) -> None:
    notebook = write_notebook(
        tmp_path / "endless.ipynb",
        ["open('/artifacts/a.csv', 'w').write('a')", "print('begun')\nwhile True: pass"],
    )
    out = tmp_path / "out"
    done = run_notebook(notebook, out, "--profile", PROFILE, "--cell-deadline", "20")
    assert done.status == 4, done.said
    receipt = json.loads((out / "receipt.json").read_text())
    assert receipt["ended"]["reason"] == "CellDeadlineExceeded"
    assert receipt["run"]["error"]["code"] == "CellDeadlineExceeded"
    assert receipt["artifacts"] == [] and not (out / "artifacts").exists()
    outputs = nbformat.read(out / "endless.ipynb", as_version=4).cells[1].outputs
    assert outputs[0].text == "begun\n"
    assert outputs[-1].ename == "CellDeadlineExceeded"
    assert "deadline of 20 s" in outputs[-1].evalue
    assert left_behind() == []
    proven.note("deadline", f"{outputs[-1].ename}, the machine is gone: {outputs[-1].evalue}")
