"""Extraction of tar streams into an image root: what is hostile is refused by name."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_trees import directory, layer, link, special

from kernel_provisioner.errors import PrepareFailed
from kernel_provisioner.images.digest import walk
from kernel_provisioner.images.extract import Budget, Extractor

Entries = Sequence[tarfile.TarInfo | tuple[str, bytes]]


def extract(base: Path, *layers: Entries, whiteouts: bool = True) -> Path:
    root = base / "root"
    root.mkdir(exist_ok=True)
    extractor = Extractor(root, whiteouts=whiteouts)
    for entries in layers:
        extractor.apply(io.BytesIO(layer(entries)))
    return root


HOSTILE: list[tuple[Entries, str]] = [
    ([("../x", b"")], "leaves the archive"),
    ([("a/../../x", b"")], "leaves the archive"),
    ([("/etc/x", b"")], "absolute"),
    ([link("a", "/etc/passwd", hard=True)], "absolute"),
    ([link("a", "../../etc/passwd", hard=True)], "leaves the archive"),
    ([link("a", "missing", hard=True)], "hard link to 'missing', not a file"),
    ([link("a", "no/where", hard=True)], "links to a file that is not there"),
    ([directory("d"), link("a", "d", hard=True)], "hard link to 'd', not a file"),
    ([link("s", "x"), link("a", "s", hard=True)], "hard link to 's', not a file"),
    ([special("dev/null", tarfile.CHRTYPE)], "neither a file"),
    ([special("disk", tarfile.BLKTYPE)], "neither a file"),
    ([special("pipe", tarfile.FIFOTYPE)], "neither a file"),
    ([special("odd", b"Z")], "neither a file"),
    ([("a", b""), ("a/b", b"")], "'a' on its path is not a directory"),
    ([link("a", "b"), link("b", "a"), ("a/x", b"")], "links on its path loop"),
    ([("x" * 256, b"")], "name is not valid"),
    ([("d/" * 65 + "x", b"")], "name is not valid"),
    ([(".wh.", b"")], "whiteout of nothing"),
    ([(".wh...", b"")], "whiteout of nothing"),
    ([("d/.wh..", b"")], "whiteout of nothing"),
]


@pytest.mark.parametrize(("entries", "why"), HOSTILE)
def test_a_hostile_entry_is_refused_by_name(tmp_path: Path, entries: Entries, why: str) -> None:
    with pytest.raises(PrepareFailed, match="is refused: ") as caught:
        extract(tmp_path, entries)
    assert why in caught.value.message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root"]


@pytest.mark.parametrize("target", ["/outside", "../outside", "../../../../../outside"])
def test_links_are_followed_only_inside_the_root(tmp_path: Path, target: str) -> None:
    (tmp_path / "outside").mkdir()
    root = extract(tmp_path, [link("evil", target), ("evil/x", b"caught")])
    assert list((tmp_path / "outside").iterdir()) == []
    assert (root / "outside/x").read_bytes() == b"caught"


def test_a_file_never_goes_through_a_link_at_its_own_name(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"safe")
    root = extract(tmp_path, [link("x", str(victim)), ("x", b"new")])
    assert victim.read_bytes() == b"safe"
    assert not (root / "x").is_symlink()
    assert (root / "x").read_bytes() == b"new"


def test_a_hard_link_never_reaches_outside_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_bytes(b"secret")
    entries = [link("d", str(tmp_path / "outside")), link("x", "d/secret", hard=True)]
    with pytest.raises(PrepareFailed, match="links to a file that is not there"):
        extract(tmp_path, entries)


def test_replacing_a_directory_by_a_link_is_noticed(tmp_path: Path) -> None:
    """The remembered meaning of a path must not outlive the directory."""
    (tmp_path / "outside").mkdir()
    root = extract(
        tmp_path,
        [directory("d"), ("d/one", b"1"), link("d", str(tmp_path / "outside")), ("d/two", b"2")],
    )
    assert list((tmp_path / "outside").iterdir()) == []
    assert (root / "d").is_symlink()


def test_setuid_and_owners_are_not_taken_over(tmp_path: Path) -> None:
    info = tarfile.TarInfo("su")
    info.mode, info.uid = 0o6755, 4242
    root = extract(tmp_path, [info])
    found = (root / "su").stat()
    assert (found.st_mode & 0o7777, found.st_uid) == (0o755, os.geteuid())


def test_hard_links_share_content_and_later_layers_do_not_write_through(tmp_path: Path) -> None:
    root = extract(tmp_path, [("a", b"one"), link("b", "a", hard=True)], [("a", b"two")])
    assert ((root / "a").read_bytes(), (root / "b").read_bytes()) == (b"two", b"one")


def test_whiteouts_hide_lower_layers(tmp_path: Path) -> None:
    root = extract(
        tmp_path,
        [("d/old", b""), ("d/sub/x", b""), ("e/old", b""), ("keep", b""), ("gone", b"")],
        [(".wh.gone", b""), ("d/new", b""), ("d/.wh..wh..opq", b""), ("e/.wh.old", b"")],
    )
    found = sorted(entry.path for entry in walk(root))
    assert found == ["d", "d/new", "e", "keep"]


def test_a_whiteout_removes_a_link_not_its_target(tmp_path: Path) -> None:
    root = extract(tmp_path, [directory("d"), ("d/x", b""), link("l", "d")], [(".wh.l", b"")])
    assert sorted(entry.path for entry in walk(root)) == ["d", "d/x"]


def test_a_layers_directory_replaces_a_link_but_a_packages_does_not(tmp_path: Path) -> None:
    entries = [directory("usr/bin"), link("bin", "usr/bin"), directory("bin"), ("bin/x", b"")]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    layered = extract(tmp_path / "a", entries)
    assert not (layered / "bin").is_symlink()
    package = extract(tmp_path / "b", entries, whiteouts=False)
    assert (package / "bin").is_symlink()
    assert (package / "usr/bin/x").is_file()


def test_size_and_count_are_bounded(tmp_path: Path) -> None:
    with pytest.raises(PrepareFailed, match="over 8 GiB"):
        Extractor(tmp_path, Budget(bytes_left=3)).apply(io.BytesIO(layer([("a", b"1234")])))
    with pytest.raises(PrepareFailed, match="400,000 entries"):
        Extractor(tmp_path, Budget(entries_left=1)).apply(
            io.BytesIO(layer([("b", b""), ("c", b"")]))
        )


def test_a_giant_extension_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 40
    with pytest.raises(PrepareFailed, match="extension header"):
        Extractor(tmp_path).apply(io.BytesIO(info.tobuf(tarfile.GNU_FORMAT)))


def test_sparse_files_are_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type = tarfile.GNUTYPE_SPARSE
    with pytest.raises(PrepareFailed):
        Extractor(tmp_path).apply(io.BytesIO(info.tobuf(tarfile.GNU_FORMAT) + b"\0" * 1024))


def test_a_truncated_stream_is_refused(tmp_path: Path) -> None:
    data = layer([("a", b"x" * 5000)])
    with pytest.raises(PrepareFailed, match=r"damaged|ends early"):
        Extractor(tmp_path).apply(io.BytesIO(data[:3000]))


part = st.sampled_from(["a", "b", "..", ".", "", ".wh.a", ".wh..wh..opq", "c"])
name = st.lists(part, min_size=1, max_size=4).map("/".join)
entry = st.one_of(
    st.tuples(name, st.just(b"data")),
    name.map(directory),
    st.builds(link, name, name),
    st.builds(lambda a, b: link(a, b, hard=True), name, name),
    st.builds(lambda a: link(a, "/a"), name),
)


@settings(max_examples=200, deadline=None)
@given(entries=st.lists(entry, max_size=12), whiteouts=st.booleans())
def test_nothing_outside_the_root_is_ever_touched(
    tmp_path_factory: pytest.TempPathFactory,
    entries: list[tarfile.TarInfo | tuple[str, bytes]],
    whiteouts: bool,
) -> None:
    base = tmp_path_factory.mktemp("x")
    (base / "a").write_bytes(b"outside")
    (base / "b").mkdir()
    root = base / "root"
    root.mkdir()
    with contextlib.suppress(PrepareFailed):
        Extractor(root, whiteouts=whiteouts).apply(io.BytesIO(layer(entries)))
    assert sorted(path.name for path in base.iterdir()) == ["a", "b", "root"]
    assert (base / "a").read_bytes() == b"outside"
    assert (base / "a").stat().st_nlink == 1
    assert list((base / "b").iterdir()) == []
