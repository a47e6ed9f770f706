"""The image store (spec C1, C3, C5): idempotent, locked, interruptible, renewed when changed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest
from image_trees import SMALL_IMAGE, docker_files, layer, tar_of

from kernel_provisioner import paths
from kernel_provisioner.errors import (
    ImageInvalid,
    ImageMissing,
    LockTimeout,
    PrepareFailed,
    UsageError,
)
from kernel_provisioner.images.receipt import Image, check_receipt, load_image
from kernel_provisioner.images.store import ImageStore
from kernel_provisioner.paths import StateDirs

Lines = list[str]


def dirs_of(base: Path) -> StateDirs:
    return StateDirs(base / "data", base / "data", base / "run")


def archive_of(path: Path, motd: bytes = b"one") -> Path:
    return tar_of(path, docker_files([layer([*SMALL_IMAGE, ("etc/motd2", motd)])]))


def prepare(dirs: StateDirs, **options: object) -> tuple[Image, Lines]:
    lines: Lines = []
    image = ImageStore(dirs).prepare(lines.append, **options)  # type: ignore[arg-type]
    return image, lines


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[StateDirs, Image]:
    """One image that the tests which change nothing share: each preparation settles for 2 s."""
    base = tmp_path_factory.mktemp("store")
    dirs = dirs_of(base)
    image, _ = prepare(dirs, image_archive=archive_of(base / "a.tar"))
    return dirs, image


def test_an_import_becomes_current(prepared: tuple[StateDirs, Image]) -> None:
    dirs, image = prepared
    assert load_image(dirs) == image
    check_receipt(image)
    assert (image.python, image.source) == ("3.11", "archive")
    assert sorted(path.name for path in dirs.image.iterdir()) == sorted(
        ["current", image.root.parent.name]
    )
    assert image.root.stat().st_mode & 0o777 == 0o755
    assert image.receipt_path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("again", ["nothing", "archive", "demand"])
def test_a_second_preparation_only_checks(prepared: tuple[StateDirs, Image], again: str) -> None:
    dirs, image = prepared
    options: dict[str, object] = {
        "nothing": {},
        "archive": {"image_archive": dirs.data.parent / "a.tar"},
        "demand": {"image_sha256": image.id.removeprefix("sha256:").upper()},
    }[again]
    before = image.receipt_path.stat().st_mtime_ns
    assert prepare(dirs, **options) == (image, [])
    assert image.receipt_path.stat().st_mtime_ns == before


def test_another_digest_than_the_demanded_changes_nothing(
    prepared: tuple[StateDirs, Image], tmp_path: Path
) -> None:
    dirs, image = prepared
    other = archive_of(tmp_path / "other.tar", b"two")
    for options in ({}, {"image_archive": other}):
        with pytest.raises(ImageInvalid, match="not the demanded") as caught:
            prepare(dirs, image_sha256="0" * 64, **options)
        assert "nothing was changed" in caught.value.message
        assert load_image(dirs) == image
    assert len(list(dirs.image.iterdir())) == 2


@pytest.mark.parametrize("digest", ["", "sha256:", "12", "g" * 64])
def test_what_is_no_digest_is_refused(prepared: tuple[StateDirs, Image], digest: str) -> None:
    with pytest.raises(UsageError, match="is not a sha256 digest"):
        prepare(prepared[0], image_sha256=digest)


def test_a_bad_archive_leaves_the_old_image(
    prepared: tuple[StateDirs, Image], tmp_path: Path
) -> None:
    dirs, image = prepared
    os.mkfifo(tmp_path / "pipe")
    bad = tar_of(tmp_path / "bad.tar", docker_files([layer([("../x", b"")])]))
    refusals = {bad: PrepareFailed, tmp_path / "pipe": UsageError, tmp_path / "absent": UsageError}
    for archive, refusal in refusals.items():
        with pytest.raises(refusal):
            prepare(dirs, image_archive=archive)
        assert load_image(dirs) == image
    assert len(list(dirs.image.iterdir())) == 2


def test_a_touched_tree_is_digested_and_kept(tmp_path: Path) -> None:
    dirs = dirs_of(tmp_path)
    image, _ = prepare(dirs, image_archive=archive_of(tmp_path / "a.tar"))
    os.utime(image.root / "etc/motd2")
    again, lines = prepare(dirs)
    assert again == image
    assert any("/etc/motd2 changed" in line for line in lines)
    check_receipt(image)


def test_a_copied_store_is_digested_and_kept(tmp_path: Path) -> None:
    dirs = dirs_of(tmp_path)
    image, _ = prepare(dirs, image_archive=archive_of(tmp_path / "a.tar"))
    other = dirs_of(tmp_path / "copy")
    shutil.copytree(dirs.data, other.data, symlinks=True)
    with pytest.raises(ImageInvalid):
        check_receipt(load_image(other))
    again, _ = prepare(other)
    assert again.id == image.id
    check_receipt(again)


def test_one_changed_byte_is_never_accepted(tmp_path: Path) -> None:
    dirs = dirs_of(tmp_path)
    archive = archive_of(tmp_path / "a.tar")
    image, _ = prepare(dirs, image_archive=archive)
    (image.root / "etc/motd2").write_bytes(b"onE")
    again, lines = prepare(dirs, image_archive=archive)
    assert any("contents changed" in line for line in lines)
    assert again.id == image.id
    assert (again.root / "etc/motd2").read_bytes() == b"one"
    check_receipt(again)


def test_a_replaced_image_stays_while_a_session_has_a_record(tmp_path: Path) -> None:
    dirs = dirs_of(tmp_path)
    first, _ = prepare(dirs, image_archive=archive_of(tmp_path / "a.tar"))
    second, _ = prepare(dirs, image_archive=archive_of(tmp_path / "b.tar", b"two"))
    assert second.id != first.id
    assert load_image(dirs) == second
    dirs.sessions.mkdir()
    (dirs.sessions / "s.json").write_text("{}")
    prepare(dirs)
    assert first.root.is_dir()
    (dirs.sessions / "s.json").unlink()
    prepare(dirs)
    assert not first.root.exists()
    assert load_image(dirs) == second


@contextlib.contextmanager
def lock_held(dirs: StateDirs) -> Iterator[None]:
    """Hold the preparation lock in another process."""
    code = (
        "import sys, filelock\n"
        "with filelock.FileLock(sys.argv[1]):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    dirs.data.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(dirs.prepare_lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            yield
        finally:
            assert holder.stdin is not None
            holder.stdin.close()


def test_the_lock_is_waited_for_as_long_as_remains_and_no_longer(tmp_path: Path) -> None:
    dirs = dirs_of(tmp_path)
    with lock_held(dirs):
        lines: Lines = []
        began = time.monotonic()
        with pytest.raises(LockTimeout, match=r"prepare\.lock for [0-4] s"):
            ImageStore(dirs).prepare(lines.append, deadline=began + 4)
        assert 3.5 < time.monotonic() - began < 60
        assert sum("waiting for another preparation" in line for line in lines) >= 1


def test_the_lock_is_held_while_preparing(tmp_path: Path) -> None:
    dirs = dirs_of(tmp_path)
    seen: Lines = []

    def probe(line: str) -> None:
        with pytest.raises(filelock.Timeout):
            filelock.FileLock(dirs.prepare_lock, is_singleton=False).acquire(timeout=0)
        seen.append(line)

    ImageStore(dirs).prepare(probe, image_archive=archive_of(tmp_path / "a.tar"))
    assert seen
    filelock.FileLock(dirs.prepare_lock, is_singleton=False).acquire(timeout=0).lock.release()


PREPARE = """
import sys
from pathlib import Path
from kernel_provisioner.images.store import ImageStore
from kernel_provisioner.paths import StateDirs
base = Path(sys.argv[1])
def progress(line):
    if line.startswith(sys.argv[3]):
        print("there", flush=True)
        sys.stdin.read()
ImageStore(StateDirs(base, base, base)).prepare(progress, image_archive=Path(sys.argv[2]))
"""


@pytest.mark.parametrize("stop_at", ["reading", "layer 1", "arranging", "digesting", "writing"])
def test_killed_anywhere_it_leaves_the_old_image(tmp_path: Path, stop_at: str) -> None:
    dirs = dirs_of(tmp_path)
    old, _ = prepare(dirs, image_archive=archive_of(tmp_path / "a.tar"))
    new = archive_of(tmp_path / "b.tar", b"two")
    with subprocess.Popen(
        [sys.executable, "-c", PREPARE, str(dirs.data), str(new), stop_at],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "there\n"  # and it stays there until it is killed
        child.send_signal(signal.SIGKILL)
    assert load_image(dirs) == old
    check_receipt(old)
    assert prepare(dirs)[0] == old
    assert len(list(dirs.image.iterdir())) == 2
    assert prepare(dirs, image_archive=new)[0].id != old.id


def test_an_interrupt_cleans_up_at_once(tmp_path: Path) -> None:
    dirs = dirs_of(tmp_path)

    def interrupt(line: str) -> None:
        if line.startswith("digesting"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ImageStore(dirs).prepare(interrupt, image_archive=archive_of(tmp_path / "a.tar"))
    assert list(dirs.image.iterdir()) == []
    with pytest.raises(ImageMissing):
        load_image(dirs)


def test_an_expired_deadline_stops_it(tmp_path: Path) -> None:
    with pytest.raises((PrepareFailed, LockTimeout)):
        prepare(
            dirs_of(tmp_path),
            image_archive=archive_of(tmp_path / "a.tar"),
            deadline=time.monotonic() - 1,
        )
    with pytest.raises(ImageMissing):
        load_image(dirs_of(tmp_path))


def test_without_apt_the_remedy_is_an_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(PrepareFailed, match="no apt-get, dpkg-deb") as caught:
        prepare(dirs_of(tmp_path))
    assert "--image-archive" in caught.value.remedy
    assert list(dirs_of(tmp_path).image.iterdir()) == []


def test_a_store_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    dirs = dirs_of(tmp_path)
    dirs.data.mkdir()
    (dirs.data / "image").write_text("a file where the store should be")
    with pytest.raises(PrepareFailed, match="image"):
        prepare(dirs, image_archive=archive_of(tmp_path / "a.tar"))


def test_the_recipe_follows_the_lists_and_the_guidance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guest = tmp_path / "guest"
    (guest / "image").mkdir(parents=True)
    (guest / "docs").mkdir()
    monkeypatch.setattr(paths, "guest_code_dir", lambda: guest)
    store = ImageStore(dirs_of(tmp_path))
    first = store.recipe(None)
    (guest / "docs/a.md").write_text("guidance")
    second = store.recipe(None)
    (guest / "image/strip.txt").write_text("boot\n")
    third = store.recipe(None)
    assert first.base == second.base != third.base
    assert first.docs != second.docs == third.docs
