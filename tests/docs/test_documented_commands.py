"""Each command block of the documents that is marked `run` works in a fresh copy of this checkout.

The blocks of one document run in order, in one copy, each as one `bash -e` script. Jupyter's own
directories are moved into the test's, so that nothing is installed into the person's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import mdfile
import pytest

DOCUMENTS = [
    document
    for document in mdfile.documents()
    if any(block.mark == "run" for block in mdfile.blocks(document.read_text()))
]


@pytest.fixture(scope="module")
def fresh_copy(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what git tracks or would add, and nothing that was built here."""
    command = ["git", "-C", str(repository), "ls-files", "-z", "--cached", "--others"]
    command.append("--exclude-standard")
    listed = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    copy = tmp_path_factory.mktemp("copy") / "backintel-sandbox"
    for name in {name.decode() for name in listed.split(b"\0") if name}:
        source, target = repository / name, copy / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return copy


def test_something_is_documented() -> None:
    assert "README.md" in {document.name for document in DOCUMENTS}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_documented_commands_work(document: Path, fresh_copy: Path, tmp_path: Path) -> None:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("BACKINTEL_", "JUPYTER"))}
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        environ[name] = str(tmp_path / name.lower())
    if "BACKINTEL_HOME" in os.environ:
        environ["BACKINTEL_HOME"] = os.environ["BACKINTEL_HOME"]
    for block in mdfile.blocks(document.read_text()):
        if block.mark != "run":
            continue
        script = "\n".join(line.removeprefix("$ ") for line in block.text.splitlines())
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=fresh_copy,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=850,
            check=False,
        )
        where = f"{document.name}:{block.line}"
        assert done.returncode == 0, f"{where} ended with {done.returncode}:\n{done.stdout}"
