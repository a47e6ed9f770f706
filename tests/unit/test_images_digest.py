"""The tree digest and the tree's final form (spec C4): every fact counts, bad links are refused."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_provisioner.errors import ImageInvalid, PrepareFailed
from kernel_provisioner.images import tree
from kernel_provisioner.images.digest import escapes, tree_digest


def small_tree(root: Path) -> Path:
    (root / "usr/bin").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "usr/bin/a").write_bytes(b"aa")
    (root / "usr/bin/b").write_bytes(b"")
    (root / "bin").symlink_to("usr/bin")
    return root


CHANGES: list[Callable[[Path], object]] = [
    lambda root: (root / "usr/bin/a").write_bytes(b"ab"),
    lambda root: (root / "usr/bin/a").chmod(0o755),
    lambda root: (root / "empty").chmod(0o700),
    lambda root: (root / "usr/bin/a").rename(root / "usr/bin/c"),
    lambda root: (root / "usr/bin/b").unlink(),
    lambda root: (root / "empty").rmdir(),
    lambda root: (root / "new").touch(),
    lambda root: ((root / "bin").unlink(), (root / "bin").symlink_to("usr")),
    lambda root: ((root / "bin").unlink(), (root / "bin").write_text("usr/bin")),
]


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_changes_the_digest(tmp_path: Path, change: Callable[[Path], object]) -> None:
    root = small_tree(tmp_path / "root")
    before = tree_digest(root)
    change(root)
    assert tree_digest(root) != before


def test_the_digest_is_of_the_tree_alone(tmp_path: Path) -> None:
    first, second = small_tree(tmp_path / "one"), small_tree(tmp_path / "two")
    os.utime(second / "usr/bin/a", (1, 1))
    digest = tree_digest(first)
    assert digest == tree_digest(second)
    assert digest.startswith("sha256:")
    assert len(digest) == 71


def test_special_files_are_refused(tmp_path: Path) -> None:
    root = small_tree(tmp_path / "root")
    os.mkfifo(root / "usr/pipe")
    with pytest.raises(ImageInvalid, match="/usr/pipe in the image is a special file"):
        tree_digest(root)
    (root / "usr/pipe").unlink()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(root / "s"))
        with pytest.raises(ImageInvalid, match="/s in the image is a special file"):
            tree_digest(root)


@pytest.mark.parametrize("target", ["/etc/passwd", "../../etc/passwd", "usr/../../x", ".."])
def test_a_link_that_leaves_is_refused(tmp_path: Path, target: str) -> None:
    root = small_tree(tmp_path / "root")
    (root / "leak").symlink_to(target)
    with pytest.raises(ImageInvalid, match="/leak in the image links to"):
        tree_digest(root)


@pytest.mark.parametrize(
    ("links", "path", "bad"),
    [
        ({"a": "b"}, "a", False),
        ({"d/a": "../b"}, "d/a", False),
        ({"d/a": "../../b"}, "d/a", True),
        # Lexically "d/../x" stays inside; through the link d -> . it does not.
        ({"d": ".", "a": "d/../x"}, "a", True),
        ({"d": "e/f", "a": "d/../../x"}, "a", False),
        ({"d": "e/f", "a": "d/../../../x"}, "a", True),
        ({"a": "b", "b": "a"}, "a", True),
        ({"a": "a/x"}, "a", True),
        ({"d": "/abs", "a": "d/x"}, "a", True),
        ({"a": ".//./b/"}, "a", False),
    ],
)
def test_links_are_resolved_as_in_the_image(links: dict[str, str], path: str, bad: bool) -> None:
    assert escapes(path, links) is bad


names = st.sampled_from(["a", "b", "c", "d"])
targets = st.lists(st.sampled_from(["a", "b", "c", "..", ".", ""]), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(
    links=st.dictionaries(
        st.lists(names, min_size=1, max_size=3).map("/".join), targets.map("/".join), max_size=5
    ),
    depth=st.integers(0, 3),
)
def test_what_is_accepted_stays_inside_on_a_real_file_system(
    tmp_path_factory: pytest.TempPathFactory, links: dict[str, str], depth: int
) -> None:
    """The kernel's own resolution is the judge of the one in memory."""
    base = tmp_path_factory.mktemp("fs")
    root = base / "outside" / "root"
    root.mkdir(parents=True)
    made: dict[str, str] = {}
    for path, target in links.items():
        place = root / path
        if not target or any(place.is_relative_to(root / other) for other in made):
            continue
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(target)
        except FileExistsError:
            continue
        made[path] = target
    for path in made:
        if not escapes(path, made):
            real = Path(os.path.realpath(root / path))
            assert real.is_relative_to(root)


@pytest.mark.parametrize(
    ("path", "target", "relative"),
    [
        ("bin", "/usr/bin", "usr/bin"),
        ("usr/lib/x", "/etc/x", "../../etc/x"),
        ("usr/lib/x", "/", "../../."),
    ],
)
def test_absolute_links_become_relative(
    tmp_path: Path, path: str, target: str, relative: str
) -> None:
    place = tmp_path / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(target)
    tree.relativize_links(tmp_path)
    assert os.readlink(place) == relative
    assert tree_digest(tmp_path)


def test_finish_sets_plain_modes_and_times(tmp_path: Path) -> None:
    root = small_tree(tmp_path / "root")
    (root / "usr/bin/a").chmod(0o4711)
    (root / "usr/bin/b").chmod(0o600)
    (root / "empty").chmod(0o1777)
    tree.finish(root, os.geteuid(), os.getegid())
    modes = {
        name: oct((root / name).stat().st_mode & 0o7777)
        for name in ("usr/bin/a", "usr/bin/b", "empty", ".")
    }
    assert modes == {
        "usr/bin/a": "0o755",
        "usr/bin/b": "0o644",
        "empty": "0o755",
        ".": "0o755",
    }
    assert {path.lstat().st_mtime for path in root.rglob("*")} == {float(tree.MODIFIED)}


def test_stripping_removes_links_and_never_follows_them(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    root = small_tree(tmp_path / "root")
    (root / "usr/share").symlink_to(outside)
    tree.strip(root, ["usr/share", "usr/bin/*", "absent/*"])
    assert (outside / "kept").exists()
    assert not os.path.lexists(root / "usr/share")
    assert list((root / "usr/bin").iterdir()) == []


@pytest.mark.parametrize("pattern", ["/etc", "../x", "usr/../../x"])
def test_a_strip_pattern_cannot_leave(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(PrepareFailed, match="leaves the image"):
        tree.strip(tmp_path, [pattern])


def test_mount_points_are_emptied(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp/left").touch()
    (tmp_path / "dev").symlink_to("tmp")
    tree.make_mount_points(tmp_path)
    for name in tree.MOUNT_POINTS:
        assert not (tmp_path / name).is_symlink()
        assert list((tmp_path / name).iterdir()) == []
