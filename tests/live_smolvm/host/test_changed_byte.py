"""A changed byte in any file that a session executes or boots refuses the start."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from product import backintel, left_behind, write_notebook

from kernel_provisioner.engines.smolvm import prepare
from kernel_provisioner.engines.smolvm.release import (
    AGENT_ROOT,
    TEMPLATES,
    load_pins,
    load_prepared,
    receipt_path,
)
from kernel_provisioner.errors import EngineUnavailable
from kernel_provisioner.images.receipt import settle, stat_listing
from kernel_provisioner.paths import StateDirs
from kernel_provisioner.records import write_json

# The whole engine is copied, which takes its time in emulation.
pytestmark = pytest.mark.full
_BOOTED = (*sorted(load_pins().files), *TEMPLATES, f"{AGENT_ROOT}/usr/local/bin/smolvm-agent")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, dirs: StateDirs) -> Path:
    """The prepared engine in a home of its own, where the image is that of this host."""
    home = tmp_path_factory.mktemp("home")
    (home / "image").symlink_to(dirs.image)
    prepared = load_prepared(dirs).directory
    copied = home / prepared.relative_to(dirs.data)
    copied.parent.mkdir(parents=True)
    subprocess.run(["cp", "-a", "--sparse=always", prepared, copied], check=True)
    prepare.write_receipt(receipt_path(copied), copied, load_pins())
    return copied


@pytest.fixture
def unchanged(place: Path) -> Path:
    """The same, whose receipt has the times of now."""
    listing = stat_listing(place)
    time.sleep(settle(listing))
    receipt = receipt_path(place)
    write_json(receipt, {**json.loads(receipt.read_text()), "stat": listing.digest})
    return place


def flip(path: Path) -> None:
    """Change the last bit of the first data of a file."""
    with path.open("r+b") as file:
        at = os.lseek(file.fileno(), 0, os.SEEK_DATA)
        (byte,) = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte ^ 1]), at)


@pytest.mark.parametrize("name", _BOOTED)
def test_a_changed_byte_refuses_the_start(
    unchanged: Path, dirs: StateDirs, tmp_path: Path, name: str
) -> None:
    home = unchanged.parents[2]
    here = StateDirs(home, home, dirs.runtime)
    assert load_prepared(here).directory == unchanged
    notebook = write_notebook(tmp_path / "a.ipynb", ["print('ran')"])
    flip(unchanged / name)
    try:
        done = backintel(
            *("run", notebook, "--engine", "smolvm", "--profile", "benchmark"),
            *("--out", tmp_path / "out"),
            env={**os.environ, "BACKINTEL_HOME": str(home)},
        )
    finally:
        flip(unchanged / name)
    assert done.status == 3
    error = done.report["error"]
    assert error["code"] == EngineUnavailable.code and EngineUnavailable.permanent
    assert f"a file below {unchanged} changed since it was prepared" in error["message"]
    assert "backintel sandbox prepare" in error["remedy"]
    assert left_behind(here) == []
