"""The image that this machine prepared: what spec C2 and C4 promise of it, read from its files."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

from kernel_provisioner.images import tree
from kernel_provisioner.images.digest import tree_digest, walk
from kernel_provisioner.images.receipt import Image, check_receipt, load_image
from kernel_provisioner.paths import guest_code_dir, state_dirs

pytestmark = pytest.mark.sandbox


@pytest.fixture(scope="module")
def image() -> Image:
    """Return the prepared image; without one these tests fail and name the remedy."""
    return load_image(state_dirs())


def test_it_is_what_was_digested(image: Image) -> None:
    check_receipt(image)
    assert tree_digest(image.root) == image.id


def test_modes_owners_and_links(image: Image) -> None:
    owners = set()
    for entry in walk(image.root):
        owners.add((image.root / entry.path).lstat().st_uid)
        assert entry.kind == "l" or entry.mode in (0o755, 0o644), entry.path
        assert not entry.target.startswith("/"), entry.path
    assert owners == {image.root.stat().st_uid}
    for name in tree.MOUNT_POINTS:
        assert list((image.root / name).iterdir()) == []


def test_the_packages_of_the_lock_are_there(image: Image) -> None:
    versions = (image.root / "opt/backintel/package-versions.txt").read_text().splitlines()
    assert versions[0] == f"python=={image.python}"
    site = image.root / f"usr/local/lib/python{image.python}/dist-packages"
    found = {path.name.lower() for path in site.glob("*.dist-info")}
    for pin in versions[1:]:
        name, _, version = pin.partition("==")
        assert f"{name.replace('-', '_')}-{version}.dist-info".lower() in found
    system = (image.root / "opt/backintel/system-packages.txt").read_text()
    for name in ("bash", "ripgrep", "grep", "findutils", "coreutils", "file", "fonts-dejavu-core"):
        assert re.search(rf"^{name} \S+ \S+ sha256:[0-9a-f]{{64}}$", system, re.MULTILINE)


def test_programs_and_fonts_are_there(image: Image) -> None:
    for name in ("bash", "sh", "rg", "grep", "find", "ls", "file", "awk", "python", "python3"):
        assert (image.root / "usr/bin" / name).is_file(), name
    assert not (image.root / "usr/bin/gcc").exists()
    assert (image.root / "etc/ssl/certs/ca-certificates.crt").stat().st_size > 100_000
    plots = list((image.root / "opt/backintel/cache/matplotlib").glob("fontlist-v*.json"))
    names = {entry["fname"] for entry in json.loads(plots[0].read_text())["ttflist"]}
    assert "/usr/share/fonts/truetype/wqy/wqy-zenhei.ttc" in names
    assert all(name.startswith(("/usr/share/fonts/", "fonts/")) for name in names)
    for name in names:
        assert not name.startswith("/") or (image.root / name[1:]).is_file()


def test_modules_are_compiled_and_never_compared_with_their_source(image: Image) -> None:
    compiled = list((image.root / "usr").rglob("__pycache__/*.pyc"))
    assert len(compiled) > 4000
    flags = {path.read_bytes()[4:8] for path in compiled}
    assert flags == {b"\x01\x00\x00\x00"}  # PEP 552: hash-based, unchecked
    source = image.root / f"usr/lib/python{image.python}/json/__init__.py"
    cached = importlib.util.cache_from_source(str(source))
    tag = "cpython-" + image.python.replace(".", "")
    assert Path(re.sub(r"cpython-\d+", tag, cached)).is_file()


def test_no_registry_host_is_in_what_preparation_wrote(image: Image) -> None:
    for top in ("opt", "etc", "var"):
        for path in (image.root / top).rglob("*"):
            if path.is_file() and not path.is_symlink():
                text = path.read_bytes()
                assert b"deb.debian" not in text, path
                assert b"pypi" not in text, path
    site = image.root / f"usr/local/lib/python{image.python}/dist-packages"
    assert list(site.glob("*.dist-info/direct_url.json")) == []


def test_the_guidance_is_in_docs(image: Image) -> None:
    ours = guest_code_dir() / "docs"
    expected = {str(path.relative_to(ours)) for path in ours.rglob("*") if path.is_file()}
    there = image.root / "docs"
    found = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
    assert found == {name for name in expected if "__pycache__" not in name}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's image is shared with other users")
def test_other_users_can_reach_it(image: Image) -> None:
    for path in (image.root, *image.root.parents):
        assert path.stat().st_mode & 0o005 == 0o005, path
