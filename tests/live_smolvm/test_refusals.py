"""The real SmolVM where it cannot run: each refusal has words and a remedy of its own.

All are permanent: an autorestart does not try again what cannot help.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_guest import PACE, LiveGuest
from product import PROFILE, backintel, left_behind, needs_emulation, write_notebook

from kernel_provisioner.engines.registry import CHOOSE_WEAKER
from kernel_provisioner.engines.smolvm import monitor, release
from kernel_provisioner.errors import EngineUnavailable, HostRefused
from kernel_provisioner.images.receipt import load_image
from kernel_provisioner.paths import StateDirs, state_dirs

KVM = Path("/dev/kvm")


@pytest.fixture
def without_kvm() -> Iterator[None]:
    """A machine without the device; it is there again afterwards."""
    away = KVM.with_name("kvm-away")
    KVM.rename(away)
    yield
    away.rename(KVM)


@needs_emulation
@pytest.mark.usefixtures("without_kvm")
def test_missing_device_is_refused(tmp_path: Path) -> None:
    notebook = write_notebook(tmp_path / "a.ipynb", ["1"])
    done = backintel("run", notebook, "--profile", "benchmark", "--out", tmp_path / "out")
    assert done.status == 3
    error = done.report["error"]
    assert error["code"] == EngineUnavailable.code and EngineUnavailable.permanent
    assert "/dev/kvm does not exist" in error["message"]
    assert "firmware" in error["remedy"] and error["remedy"].endswith(CHOOSE_WEAKER)
    assert left_behind() == []


@needs_emulation
def test_device_without_permission_is_refused(tmp_path: Path) -> None:
    """The doctor of an ordinary user, who is not in the device's group."""
    home = tmp_path.parent / "nobody"
    home.mkdir()
    os.chown(home, 65534, 65534)
    for path in (tmp_path.parent, tmp_path.parent.parent):
        path.chmod(0o755)
    environment = {**os.environ, "BACKINTEL_HOME": str(home), "HOME": str(home)}
    options = {"user": 65534, "group": 65534, "extra_groups": [], "env": environment}
    done = backintel("sandbox", "check", **options)
    checks = {check["name"]: check for check in done.report["checks"]}
    found = checks["engine smolvm"]
    assert "may not use /dev/kvm" in found["found"]
    assert "give" in found["remedy"] and "access to the device" in found["remedy"]


def test_machine_without_progress_is_refused(own: LiveGuest) -> None:
    """A KVM that does not run the guest looks like a monitor that stands still."""
    own.guest = own.do(own.engine.launch(own.spec).claim())
    launcher = own.guest.leftovers.processes[0]

    async def stop() -> None:
        while (machine := monitor.find(launcher)) is None:
            await asyncio.sleep(0.005)
        os.kill(machine.pid, signal.SIGSTOP)

    own.do(stop())
    with pytest.raises(HostRefused) as refused:
        # The program itself gives up after 30 s.
        own.do(own.guest.wait_attested(60 * PACE), 90)
    assert refused.value.permanent
    assert "this host's KVM cannot boot it" in refused.value.message
    assert "nested virtualization" in refused.value.remedy


_PREPARE = """
import sys
from pathlib import Path
from kernel_provisioner.engines.smolvm.prepare import prepare
from kernel_provisioner.errors import BackIntelError
from kernel_provisioner.paths import StateDirs
home = Path(sys.argv[1])
try:
    prepare(StateDirs(home, home, home), print)
except BackIntelError as error:
    print(error.code, "|", error.message, "|", error.remedy)
"""


def test_tampered_file_of_the_wheel_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "site" / release.PACKAGE
    shutil.copytree(release.find_package(), package)
    with (package / "libkrunfw.so.5").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        (last,) = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    done = subprocess.run(
        [sys.executable, "-c", _PREPARE, str(tmp_path / "home")],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        timeout=30 * PACE,
        check=True,
    )
    code, message, remedy = done.stdout.splitlines()[-1].split(" | ")
    assert code == EngineUnavailable.code
    assert "libkrunfw.so.5 differs from the pinned file" in message
    assert "pip install --force-reinstall smolmachines==1.32.2" in remedy


@pytest.mark.full
def test_image_of_another_digest_is_refused(tmp_path: Path) -> None:
    """The receipt of a tree that is not this one: no user code runs, the machine is ended."""
    dirs = state_dirs()
    home = tmp_path / "home"
    shutil.copytree(
        dirs.image, home / "image", symlinks=True, ignore=shutil.ignore_patterns("root")
    )
    image = load_image(dirs)
    place = home / image.receipt_path.parent.relative_to(dirs.data)
    (place / "root").symlink_to(image.root)
    (home / "engines").symlink_to(dirs.engines)
    receipt = place / image.receipt_path.name
    told = json.loads(receipt.read_text())
    told["stat_sha256"] = "0" * 64
    receipt.write_text(json.dumps(told))
    notebook = write_notebook(tmp_path / "a.ipynb", ["open('/artifacts/ran.csv', 'w')"])
    done = backintel(
        *("run", notebook, "--engine", "smolvm", "--profile", PROFILE, "--out", tmp_path / "out"),
        env={**os.environ, "BACKINTEL_HOME": str(home)},
    )
    assert done.status == 3
    assert done.report["error"]["code"] == "image_invalid"
    assert "backintel sandbox prepare" in done.report["error"]["remedy"]
    assert left_behind(StateDirs(home, home, dirs.runtime)) == []
