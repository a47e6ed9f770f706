"""Programs that others wrote run a notebook through the kernel, knowing nothing of the sandbox.

The notebook says where it ran: uid 10001 (shown so to the guest as root and as a user alike), no
network interface but lo, and it computes with what the image holds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

pytestmark = [pytest.mark.sandbox, pytest.mark.filterwarnings("default")]

CELLS = [
    "import json, os\nx = 6",
    "import polars as pl\ntotal = pl.DataFrame({'a': [x, 36]})['a'].sum()",
    "print(json.dumps({'total': total, 'uid': os.getuid(),"
    " 'interfaces': [line.split(':')[0].strip() for line in list(open('/proc/net/dev'))[2:]],"
    " 'cwd': os.getcwd()}))",
]
EXPECTED = {"total": 42, "uid": 10001, "interfaces": ["lo"], "cwd": "/workspace"}


@pytest.fixture
def notebook(tmp_path: Path, installed_kernel: str) -> Path:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in CELLS])
    made.metadata.kernelspec = {
        "name": installed_kernel,
        "display_name": "BackIntel sandbox",
        "language": "python",
    }
    path = tmp_path / "in.ipynb"
    nbformat.write(made, path)
    return path


def _tool(*arguments: str, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _said(executed: Path) -> dict[str, object]:
    cells = nbformat.read(executed, as_version=4).cells
    said: dict[str, object] = json.loads(cells[-1].outputs[0].text)
    return said


def test_nbclient(notebook: Path) -> None:
    from nbclient import NotebookClient

    loaded = nbformat.read(notebook, as_version=4)
    NotebookClient(loaded, timeout=60).execute()
    nbformat.write(loaded, notebook)
    assert _said(notebook) == EXPECTED


def test_jupyter_execute(notebook: Path) -> None:
    _tool("jupyter", "execute", "--inplace", str(notebook), cwd=notebook.parent)
    assert _said(notebook) == EXPECTED


def test_nbconvert_execute(notebook: Path) -> None:
    _tool(
        *("jupyter", "nbconvert", "--execute", "--to", "notebook"),
        *("--output", "converted.ipynb", str(notebook)),
        cwd=notebook.parent,
    )
    assert _said(notebook.parent / "converted.ipynb") == EXPECTED


def test_papermill(notebook: Path) -> None:
    loaded = nbformat.read(notebook, as_version=4)
    loaded.cells[0].metadata.tags = ["parameters"]
    nbformat.write(loaded, notebook)
    out = notebook.parent / "out.ipynb"
    _tool("papermill", str(notebook), str(out), "-p", "x", "64", cwd=notebook.parent)
    assert _said(out) == EXPECTED | {"total": 100}


def test_papermill_reports_the_failing_cell(notebook: Path) -> None:
    loaded = nbformat.read(notebook, as_version=4)
    loaded.cells.append(nbformat.v4.new_code_cell("1 / 0"))
    nbformat.write(loaded, notebook)
    out = notebook.parent / "out.ipynb"
    done = subprocess.run(
        [sys.executable, "-m", "papermill", str(notebook), str(out)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr
    outputs = nbformat.read(out, as_version=4).cells[-1].outputs
    assert [output.ename for output in outputs] == ["ZeroDivisionError"]


def test_jupyter_console(installed_kernel: str, tmp_path: Path) -> None:
    typed = ["x = 6", "import os", "print('said', x * 7, os.getuid())", "1 / 0", "exit"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "jupyter", "console", "--simple-prompt"),
            f"--kernel={installed_kernel}",
        ],
        cwd=tmp_path,
        input="\n".join(typed) + "\n",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "said 42 10001" in done.stdout
    assert "ZeroDivisionError" in done.stderr
