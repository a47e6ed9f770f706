"""Kernelspecs that know nothing of the sandbox, sent to it by the server's default provisioner.

Each test is a client process of its own: Jupyter reads the variable once a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sandbox

PYTHON = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]

# One execution in the parent first: a fork then inherits an event loop and an executor in use.
POOL = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
import nbformat
from nbclient import execute

def run(number):
    cell = nbformat.v4.new_code_cell(f"import os; print({number}, os.getuid())")
    made = execute(nbformat.v4.new_notebook(cells=[cell]), kernel_name="plain", timeout=60)
    return made.cells[0].outputs[0].text

print(run(0), end="")
with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
    try:
        print(*pool.map(run, range(1, 5), timeout=70), sep="", end="")
    except TimeoutError:
        for worker in multiprocessing.active_children():
            worker.kill()
        raise
"""


@pytest.fixture
def routed(tmp_path: Path) -> dict[str, str]:
    """Install two kernelspecs; return the environment of a client that finds only them."""
    for name, argv in {"plain": PYTHON, "other": ["no-such-kernel", "hunter2"]}.items():
        place = tmp_path / "kernels" / name
        place.mkdir(parents=True)
        spec = {"argv": argv, "display_name": name, "language": "python"}
        (place / "kernel.json").write_text(json.dumps(spec))
    return {
        **os.environ,
        "JUPYTER_DEFAULT_PROVISIONER_NAME": "backintel-provisioner",
        "JUPYTER_PATH": str(tmp_path),
        "JUPYTER_RUNTIME_DIR": str(tmp_path),
        "PYTHONWARNINGS": "ignore",
    }


def _client(
    *arguments: str, env: dict[str, str], cwd: Path, typed: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=env,
        cwd=cwd,
        input=typed,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_plain_kernelspec_runs_in_the_sandbox(routed: dict[str, str], tmp_path: Path) -> None:
    done = _client(
        *("-m", "jupyter", "run", "--kernel=plain"),
        env=routed,
        cwd=tmp_path,
        typed="import os; print(os.getuid(), os.getcwd())",
    )
    assert (done.returncode, done.stdout.strip()) == (0, "10001 /workspace"), done.stderr


def test_a_kernelspec_of_another_program_is_refused(routed: dict[str, str], tmp_path: Path) -> None:
    done = _client(
        "-m", "jupyter", "run", "--kernel=other", env=routed, cwd=tmp_path, typed="print(1)"
    )
    assert done.returncode != 0
    assert "the kernel 'other' starts 'no-such-kernel'" in done.stderr
    assert "hunter2" not in done.stdout + done.stderr


def test_required_encryption_is_refused(routed: dict[str, str], tmp_path: Path) -> None:
    place = tmp_path / "kernels/plain/kernel.json"
    spec = json.loads(place.read_text()) | {"metadata": {"supported_encryption": "curve"}}
    place.write_text(json.dumps(spec))
    start = (
        "from jupyter_client.manager import KernelManager\n"
        "KernelManager(kernel_name='plain', transport_encryption='required').start_kernel()\n"
    )
    done = _client("-c", start, env=routed, cwd=tmp_path)
    assert done.returncode != 0
    assert "ConfigError: transport_encryption: 'required' asks for CurveZMQ" in done.stderr


def test_a_forked_pool_executes_notebooks(routed: dict[str, str], tmp_path: Path) -> None:
    done = _client("-c", POOL, env=routed, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [f"{number} 10001" for number in range(5)]
