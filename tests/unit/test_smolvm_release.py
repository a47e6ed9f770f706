"""The pinned smolmachines: nothing is booted whose bytes are not the reviewed ones."""

from __future__ import annotations

import hashlib
import json
import time
import zipfile
from pathlib import Path

import pytest

from kernel_provisioner.engines.smolvm import pin, release
from kernel_provisioner.errors import EngineUnavailable
from kernel_provisioner.images.receipt import settle, stat_listing
from kernel_provisioner.paths import StateDirs
from kernel_provisioner.records import write_json

PLATFORM = "linux-x86_64"


@pytest.fixture
def dirs(tmp_path: Path) -> StateDirs:
    return StateDirs(tmp_path / "data", tmp_path / "state", tmp_path / "run")


@pytest.fixture
def prepared(dirs: StateDirs, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prepared release of small files, with pins and a receipt that fit."""
    contents = {name: f"bytes of {name}".encode() for name in release.load_pins(PLATFORM).files}
    pins = release.Pins(
        "1.32.2", {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    )
    monkeypatch.setattr(release, "load_pins", lambda: pins)
    place = release.release_dir(dirs, pins)
    (place / release.AGENT_ROOT / "bin").mkdir(parents=True)
    (place / release.AGENT_ROOT / "bin" / "agent").write_text("agent")
    for name, data in contents.items():
        (place / name).write_bytes(data)
    listing = stat_listing(place)
    time.sleep(settle(listing))
    write_json(
        place.parent / f"{place.name}.{release.RECEIPT}",
        {
            "schema": release.SCHEMA,
            "version": pins.version,
            "files": dict(pins.files),
            "stat": listing.digest,
        },
    )
    return place


def test_every_platform_of_the_release_is_pinned() -> None:
    lock = json.loads(Path(release.__file__).with_name("pins.json").read_text())
    assert lock["version"] == "1.32.2"
    assert set(lock["files"]) == {"linux-x86_64", "linux-aarch64", "darwin-arm64"}
    for files in lock["files"].values():
        assert {"smol/smol-vmm", "smol/agent-rootfs.tar.zst"} <= set(files)
        assert all(len(digest) == 64 for digest in files.values())


def test_platform_without_an_engine_is_refused() -> None:
    with pytest.raises(EngineUnavailable, match="does not run on linux-riscv64") as caught:
        release.load_pins("linux-riscv64")
    assert "bwrap" in caught.value.remedy


def test_lock_is_made_from_wheels(tmp_path: Path) -> None:
    name = "smolmachines-1.2.3-cp39-abi3-manylinux_2_28_aarch64.whl"
    with zipfile.ZipFile(tmp_path / name, "w") as wheel:
        wheel.writestr("smol/smol-vmm", "program")
        wheel.writestr("smolmachines-1.2.3.dist-info/RECORD", "rewritten by installers")
    lock = pin.pins_of([tmp_path / name])
    digest = hashlib.sha256(b"program").hexdigest()
    assert lock["version"] == "1.2.3"
    assert lock["files"] == {"linux-aarch64": {"smol/smol-vmm": digest}}


def test_lock_of_another_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a wheel of smolmachines"):
        pin.pins_of([tmp_path / "smolvm-1.0-py3-none-any.whl"])


def test_prepared_release_is_accepted(prepared: Path, dirs: StateDirs) -> None:
    found = release.load_prepared(dirs, deep=True)
    assert found.directory == prepared
    assert found.program == prepared / "smol-vmm"


@pytest.mark.parametrize("name", ["smol-vmm", "libkrunfw.so.5", "agent-root/bin/agent"])
def test_changed_file_is_refused(prepared: Path, dirs: StateDirs, name: str) -> None:
    data = bytearray((prepared / name).read_bytes())
    data[-1] ^= 1
    (prepared / name).write_bytes(data)
    with pytest.raises(EngineUnavailable, match="changed since it was prepared") as caught:
        release.load_prepared(dirs)
    assert "prepare" in caught.value.remedy
    assert caught.value.permanent


def test_added_file_is_refused(prepared: Path, dirs: StateDirs) -> None:
    (prepared / "libkrunfw.so").write_text("found first?")
    with pytest.raises(EngineUnavailable, match="changed"):
        release.load_prepared(dirs)


def test_release_that_is_not_prepared_is_refused(dirs: StateDirs) -> None:
    with pytest.raises(EngineUnavailable, match="is not prepared") as caught:
        release.load_prepared(dirs)
    assert "backintel sandbox prepare" in caught.value.remedy


def test_tampered_wheel_file_is_never_copied(tmp_path: Path) -> None:
    (tmp_path / "smol-vmm").write_bytes(b"another program")
    with pytest.raises(EngineUnavailable, match="differs from the pinned file") as caught:
        release.copy_verified(tmp_path / "smol-vmm", tmp_path / "copy", "0" * 64)
    assert "pip install --force-reinstall smolmachines==" in caught.value.remedy
    assert not (tmp_path / "copy").exists()


def test_link_in_place_of_a_wheel_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"x")
    (tmp_path / "smol-vmm").symlink_to(tmp_path / "target")
    with pytest.raises(EngineUnavailable, match="cannot be opened"):
        release.copy_verified(tmp_path / "smol-vmm", tmp_path / "copy", "0" * 64)
