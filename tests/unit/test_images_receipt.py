"""The stat receipt (spec C4): whole trees pass, every kind of change is caught and named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from unprivileged import as_user

from kernel_provisioner.errors import ImageInvalid, ImageMissing
from kernel_provisioner.images import receipt
from kernel_provisioner.images.receipt import Image
from kernel_provisioner.paths import StateDirs


def store(base: Path) -> StateDirs:
    return StateDirs(base, base, base / "run")


def grow(base: Path) -> Path:
    """Make a store with one tiny image that has no receipt yet."""
    home = base / "image/one"
    root = home / "root"
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/lib").mkdir()
    (root / "usr/bin/tool").write_bytes(b"contents")
    (root / "usr/bin/link").symlink_to("tool")
    (base / "image/current").symlink_to("one")
    return home


def write(home: Path) -> None:
    receipt.write_receipt(
        home,
        image_id="sha256:" + "0" * 64,
        python="3.11",
        arch="x86_64",
        created="2026-01-01T00:00:00+00:00",
        source="built",
        recipe="r",
    )


@pytest.fixture(scope="module")
def pool() -> Iterator[Iterator[Path]]:
    """Many stores that settle together: each would need 2 s by itself.

    Every user can reach them (pytest's own directories are private).
    """
    with tempfile.TemporaryDirectory(prefix="receipts-") as place:
        Path(place).chmod(0o755)
        bases = [Path(place) / f"store{number}" for number in range(40)]
        for base in bases:
            base.mkdir(mode=0o755)
        for home in [grow(base) for base in bases]:
            write(home)
        yield iter(bases)


@pytest.fixture
def base(pool: Iterator[Path]) -> Path:
    return next(pool)


@pytest.fixture
def image(base: Path) -> Image:
    return receipt.load_image(store(base))


def test_an_untouched_image_passes(base: Path, image: Image) -> None:
    receipt.check_receipt(image)
    assert image.root == base / "image/one/root"
    assert (image.python, image.arch, image.source) == ("3.11", "x86_64", "built")


def same_size_restored_mtime(root: Path) -> None:
    tool = root / "usr/bin/tool"
    before = tool.stat()
    tool.write_bytes(b"CONTENTS")
    os.utime(tool, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (tool.stat().st_size, tool.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def replaced_link(root: Path) -> None:
    (root / "usr/bin/link").unlink()
    (root / "usr/bin/link").symlink_to("tolo")


def replaced_file(root: Path) -> None:
    other = root / "usr/bin/other"
    other.write_bytes(b"contents")
    other.rename(root / "usr/bin/tool")


CHANGES: list[tuple[Callable[[Path], object], str]] = [
    (same_size_restored_mtime, "/usr/bin/tool changed (ctime)"),
    (lambda root: (root / "usr/bin/tool").chmod(0o755), "/usr/bin/tool changed (mode, ctime)"),
    (lambda root: (root / "usr/lib/new").touch(), "/usr/lib changed"),
    (lambda root: (root / "usr/bin/tool").unlink(), "/usr/bin changed"),
    (lambda root: (root / "usr/lib").rmdir(), "/usr changed"),
    (replaced_link, "/usr/bin changed"),
    (replaced_file, "/usr/bin changed"),
    (lambda root: os.link(root / "usr/bin/tool", root / "../x"), "/usr/bin/tool changed (ctime)"),
    (lambda root: root.chmod(0o700), "/ changed (mode, ctime)"),
]


@pytest.mark.parametrize(("change", "named"), CHANGES)
def test_a_change_is_caught_and_named(
    image: Image, change: Callable[[Path], object], named: str
) -> None:
    change(image.root)
    with pytest.raises(ImageInvalid) as caught:
        receipt.check_receipt(image)
    assert named in caught.value.message
    assert "sandbox prepare" in caught.value.remedy


def test_a_missing_tree_is_invalid(base: Path, image: Image) -> None:
    image.root.rename(base / "elsewhere")
    with pytest.raises(ImageInvalid, match="cannot be examined"):
        receipt.check_receipt(image)


def test_a_receipt_made_too_soon_is_refused(image: Image) -> None:
    facts = json.loads(image.receipt_path.read_text())
    assert facts["made_ns"] - facts["newest_ctime_ns"] >= receipt.SETTLE_NS
    facts["made_ns"] = facts["newest_ctime_ns"] + receipt.SETTLE_NS - 1
    image.receipt_path.write_text(json.dumps(facts))
    with pytest.raises(ImageInvalid, match="less than 2 s"):
        receipt.check_receipt(image)


def test_writing_a_receipt_waits_until_the_tree_has_settled(tmp_path: Path) -> None:
    home = grow(tmp_path)
    began = time.monotonic()
    write(home)
    assert time.monotonic() - began >= 0.9 * receipt.SETTLE_NS / 1e9
    receipt.check_receipt(receipt.load_image(store(tmp_path)))


def test_no_image_is_said_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ImageMissing, match="no analysis image") as caught:
        receipt.load_image(store(tmp_path))
    assert "sandbox prepare" in caught.value.remedy


@pytest.mark.parametrize("target", ["/etc", "../elsewhere", "..", "."])
def test_a_current_link_that_leaves_the_store_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image/current").symlink_to(target)
    with pytest.raises(ImageInvalid, match="outside the image store"):
        receipt.load_image(store(tmp_path))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": "other"}', "[" * 60000, '{"schema":"backintel.image/1"}']
)
def test_a_damaged_receipt_is_refused(base: Path, image: Image, text: str) -> None:
    image.receipt_path.write_text(text)
    with pytest.raises(ImageInvalid, match="receipt"):
        receipt.load_image(store(base))


def test_a_receipt_that_others_may_write_is_refused(image: Image) -> None:
    image.receipt_path.chmod(0o666)
    with pytest.raises(ImageInvalid, match="only its owner"):
        receipt.check_receipt(image)


def test_a_receipt_that_is_a_link_or_a_pipe_is_refused(base: Path, image: Image) -> None:
    moved = base / "moved.json"
    image.receipt_path.rename(moved)
    image.receipt_path.symlink_to(moved)
    with pytest.raises(ImageInvalid, match="cannot be read"):
        receipt.load_image(store(base))
    image.receipt_path.unlink()
    os.mkfifo(image.receipt_path)
    with pytest.raises(ImageInvalid, match="not a file"):
        receipt.load_image(store(base))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_another_users_receipt_is_refused(base: Path, image: Image) -> None:
    os.chown(image.receipt_path, 12345, 12345)
    with pytest.raises(ImageInvalid, match="belongs to user 12345"):
        receipt.load_image(store(base))


def test_without_its_listing_a_changed_tree_is_still_refused(image: Image) -> None:
    (image.receipt_path.parent / "entries.bin").unlink()
    receipt.check_receipt(image)
    (image.root / "usr/bin/tool").chmod(0o755)
    with pytest.raises(ImageInvalid, match="the tree differs"):
        receipt.check_receipt(image)


def test_the_listing_names_what_was_added_or_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    before = receipt.stat_listing(tmp_path)
    (tmp_path / "a/b/c").touch()
    after = receipt.stat_listing(tmp_path)
    assert after.entries == before.entries + 1
    assert "/a/b changed" in receipt.first_difference(before.data, after.data)
    shortened = after.data[: len(before.data)]
    assert receipt.first_difference(shortened, after.data) == "/a/b/c was added"
    assert receipt.first_difference(after.data, shortened) == "/a/b/c is missing"
    assert receipt.first_difference(after.data, after.data) == "the listings are equal"


def test_an_ordinary_user_reads_what_root_prepared(base: Path) -> None:
    as_user(lambda: receipt.check_receipt(receipt.load_image(store(base))))


def test_a_directory_that_a_user_may_not_list_is_named(base: Path) -> None:
    image = receipt.load_image(store(base))
    hidden = image.root / "hidden"
    hidden.mkdir(mode=0o000)
    with pytest.raises(ImageInvalid) as refused:
        as_user(lambda: receipt.check_receipt(image))
    assert f": {hidden} cannot be examined (Permission denied)" in refused.value.message


def test_the_module_is_light() -> None:
    code = (
        "import sys; before = set(sys.modules); import kernel_provisioner.images.receipt;"
        "print(sorted({m.partition('.')[0] for m in set(sys.modules) - before}"
        " - set(sys.stdlib_module_names)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "['kernel_provisioner']"


def test_a_tree_as_large_as_an_image_is_listed_whole(tmp_path: Path) -> None:
    for number in range(280):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in range(99):
            (folder / str(name)).touch()
    listing = receipt.stat_listing(tmp_path)
    assert listing.entries == 28_001
    assert len(listing.digest) == 64
