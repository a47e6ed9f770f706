"""The pinned smolmachines: nothing is booted whose bytes are not the reviewed ones."""

from __future__ import annotations

import hashlib
import json
import os
import time
import zipfile
from pathlib import Path

import pytest

from kernel_provisioner.engines.smolvm import pin, prepare, release
from kernel_provisioner.errors import EngineUnavailable
from kernel_provisioner.images.receipt import settle, stat_listing
from kernel_provisioner.paths import StateDirs
from kernel_provisioner.records import write_json

PLATFORM = "linux-x86_64"


@pytest.fixture
def dirs(tmp_path: Path) -> StateDirs:
    return StateDirs(tmp_path / "data", tmp_path / "state", tmp_path / "run")


def sparse(path: Path, data: bytes, at: int, size: int) -> None:
    """Write a file of ``size`` that is all holes but for ``data``."""
    with path.open("wb") as file:
        file.truncate(size)
        file.seek(at)
        file.write(data)


def change(path: Path) -> None:
    """Flip one bit of the data of a file, and nothing else."""
    with path.open("r+b") as file:
        file.seek(os.lseek(file.fileno(), 0, os.SEEK_DATA))
        block = file.read(1 << 16)
        file.seek(-len(block), os.SEEK_CUR)
        at = len(block) - len(block.lstrip(b"\0"))
        file.write(block[:at] + bytes([block[at] ^ 1]) + block[at + 1 :])


def believe(place: Path) -> None:
    """Rewrite the receipt's stat facts alone: as bit rot, or root's tampering with inode times."""
    receipt = release.receipt_path(place)
    facts = json.loads(receipt.read_text())
    write_json(receipt, {**facts, "stat": stat_listing(place).digest})


EXPANDED = (*release.TEMPLATES, "agent-root/bin/agent")


@pytest.fixture
def prepared(dirs: StateDirs, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prepared release of small files, with pins and a receipt that fit."""
    monkeypatch.setattr(prepare, "settle", lambda _: 0)
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
    for name in release.TEMPLATES:
        sparse(place / name, f"disk of {name}".encode(), at=5 << 20, size=12 << 20)
    prepare.write_receipt(release.receipt_path(place), place, pins)
    return place


@pytest.fixture
def settled(prepared: Path) -> Path:
    """The same, so long ago that every change shows in a time, as after a real preparation."""
    time.sleep(settle(stat_listing(prepared)))
    return prepared


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


@pytest.mark.parametrize("name", ["smol-vmm", "libkrun.so", "libkrunfw.so.5", *EXPANDED])
def test_changed_file_is_refused(settled: Path, dirs: StateDirs, name: str) -> None:
    change(settled / name)
    with pytest.raises(EngineUnavailable, match="changed since it was prepared") as caught:
        release.load_prepared(dirs)
    assert "prepare" in caught.value.remedy
    assert caught.value.permanent


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, "differs from its pin") for name in ("smol-vmm", "libkrun.so", "libkrunfw.so.5")),
        *((name, "differs from what was prepared") for name in EXPANDED),
    ],
)
def test_change_that_no_time_shows_is_refused_by_the_deep_check(
    prepared: Path, dirs: StateDirs, name: str, said: str
) -> None:
    change(prepared / name)
    believe(prepared)
    release.load_prepared(dirs)
    with pytest.raises(EngineUnavailable, match=said) as caught:
        release.load_prepared(dirs, deep=True)
    assert "backintel sandbox prepare" in caught.value.remedy


@pytest.mark.parametrize("where", ["hole", "longer", "mode", "link"])
def test_deep_check_sees_more_than_data(prepared: Path, dirs: StateDirs, where: str) -> None:
    template = prepared / release.TEMPLATES[0]
    if where == "hole":
        with template.open("r+b") as file:
            file.seek(9 << 20)
            file.write(b"x")
    elif where == "longer":
        os.truncate(template, template.stat().st_size + 1)
    elif where == "mode":
        (prepared / EXPANDED[-1]).chmod(0o4755)
    else:
        (prepared / EXPANDED[-1]).unlink()
        (prepared / EXPANDED[-1]).symlink_to("/agent")
    believe(prepared)
    with pytest.raises(EngineUnavailable, match="differs from what was prepared"):
        release.load_prepared(dirs, deep=True)


def test_zeros_in_place_of_a_hole_are_the_same_disk(prepared: Path, dirs: StateDirs) -> None:
    template = prepared / release.TEMPLATES[0]
    template.write_bytes(template.read_bytes())
    believe(prepared)
    assert release.load_prepared(dirs, deep=True).directory == prepared


def test_receipt_that_does_not_cover_what_was_expanded_is_refused(
    prepared: Path, dirs: StateDirs
) -> None:
    receipt = release.receipt_path(prepared)
    facts = json.loads(receipt.read_text())
    del facts["expanded"]
    write_json(receipt, facts)
    with pytest.raises(EngineUnavailable, match="does not cover") as caught:
        release.load_prepared(dirs)
    assert "backintel sandbox prepare" in caught.value.remedy


def test_added_file_is_refused(prepared: Path, dirs: StateDirs) -> None:
    (prepared / "libkrunfw.so").write_text("found first?")
    with pytest.raises(EngineUnavailable, match="changed"):
        release.load_prepared(dirs)


def test_what_a_killed_preparation_left_is_removed_and_nothing_else(
    prepared: Path, dirs: StateDirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare.host, "check_host", lambda: None)
    engines, others = prepared.parent, tmp_path / "others"
    others.mkdir()
    (others / "file").write_text("not ours")
    left = [engines / f".1.32.2-{'0a' * 6}.{'1b' * 4}{end}" for end in ("", ".warm")]
    for path in left:
        (path / "below").mkdir(parents=True)
        (path / "below" / "link").symlink_to(others)
    kept = [
        engines / f".1.32.2-{'0a' * 6}.{'2c' * 4}",
        engines / f".1.32.2-{'0a' * 6}.{'3d' * 4}.warm",
        engines / f".1.32.2-{'0a' * 6}.{'4e' * 4}.other",
        engines / f"1.32.1-{'0a' * 6}",
    ]
    kept[0].symlink_to(others)
    kept[1].write_text("a file")
    for path in kept[2:]:
        path.mkdir()
    assert prepare.prepare(dirs, print).directory == prepared
    assert [path for path in left if path.exists()] == []
    assert [path for path in kept if not os.path.lexists(path)] == []
    assert (others / "file").read_text() == "not ours"


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


@pytest.mark.parametrize("beside", [False, True], ids=["as root", "as a user"])
def test_templates_are_found_where_the_program_may_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    """An ordinary user may write where the program lies, so that it expands them in place."""
    staged = tmp_path / "staged"
    staged.mkdir()

    def stand_in(staged: Path, warm: Path, user: int | None) -> str:
        cache = warm / ".cache/smolvm"
        root = cache / "rootfs/1"
        root.mkdir(parents=True)
        (root / ".extracted").touch()
        for name in release.TEMPLATES:
            ((staged if beside else cache) / name).write_text(name)
        return "nothing to boot"

    monkeypatch.setattr(prepare, "_run_once", stand_in)
    prepare._expand(staged)
    assert {path.name for path in staged.iterdir()} == {*release.TEMPLATES, release.AGENT_ROOT}
    for name in release.TEMPLATES:
        assert (staged / name).read_text() == name
    assert list(tmp_path.iterdir()) == [staged]
