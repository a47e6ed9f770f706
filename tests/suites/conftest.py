"""The kernel as `backintel kernel install` makes it, found by Jupyter through JUPYTER_PATH."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def installed_kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Install the kernel below a prefix of the tests' own; yield its name."""
    prefix = tmp_path_factory.mktemp("prefix")
    command = [sys.executable, "-m", "kernel_provisioner.cli.main", "kernel", "install"]
    command += ["--engine", "bwrap", "--prefix", str(prefix)]
    subprocess.run(command, check=True, timeout=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", f"{prefix}/share/jupyter")
        patch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        # The tools warn about themselves; their warnings are not ours.
        patch.setenv("PYTHONWARNINGS", "ignore")
        assert os.path.isfile(f"{prefix}/share/jupyter/kernels/backintel-sandbox/kernel.json")
        yield "backintel-sandbox"
