"""The tar validator: every refusal of spec J1, and that no bytes at all get past or crash it."""

from __future__ import annotations

import io
import os
import tarfile
import threading
import time
import unicodedata

import pytest
import tars
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kernel_provisioner.artifacts.tarstream import (
    MAX_EXTENSION,
    MAX_TRAILER,
    ExportLimits,
    StreamReader,
    read_members,
    shown,
    split_name,
)
from kernel_provisioner.errors import EXIT_EXPORT_REFUSED, ExportRefused

LIMITS = ExportLimits(max_bytes=1_000_000)


def accept(data: bytes, limits: ExportLimits = LIMITS) -> dict[str, bytes]:
    """Return {path: content} of the files, directories as {path/: b""}."""
    found = {}
    for member in read_members(StreamReader(io.BytesIO(data)), limits):
        content = b"".join(member.data)
        assert len(content) == member.size
        found["/".join(member.path) + "/" * (member.kind == "directory")] = content
    return found


def refuse(data: bytes, limits: ExportLimits = LIMITS) -> str:
    with pytest.raises(ExportRefused) as refused:
        accept(data, limits)
    assert "nothing was published" in refused.value.message
    assert refused.value.exit_status == EXIT_EXPORT_REFUSED
    assert refused.value.message.isascii()
    assert refused.value.message.isprintable()
    return refused.value.message


# -- accepted ---------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_formats_of_the_standard_library(form: int) -> None:
    files = {
        "a.csv": b"1",
        "empty.txt": b"",
        "d/e/block.json": b"x" * 512,
        "p" * 90 + "/" + "q" * 60 + ".png": b"long",
        "a..b.csv": b"two dots",
        "..c.csv": b"leading dots",
        ".hidden.csv": b"hidden",
        "UPPER.CSV": b"suffix in upper case",
    }
    if form != tarfile.USTAR_FORMAT:
        files["n" * 200 + "/" + "m" * 200 + "/ünïcödé 表.md"] = b"long name"
    assert accept(tars.tree(files, form=form)) == files


def test_directories_and_leading_dot() -> None:
    stream = (
        tars.header(b"./", kind=b"5")
        + tars.header(b"./d/", kind=b"5")
        + tars.file(b"./d/a.csv", b"x")
        + tars.header(b"late", kind=b"5")
        + tars.END
    )
    assert accept(stream) == {"d/": b"", "d/a.csv": b"x", "late/": b""}


def test_a_directory_entry_after_its_contents() -> None:
    stream = tars.file(b"d/a.csv") + tars.header(b"d/", kind=b"5") + tars.END
    assert accept(stream) == {"d/a.csv": b"", "d/": b""}


def test_empty_tree_and_padding() -> None:
    assert accept(tars.END) == {}
    assert accept(tars.END + b"\0" * 9216) == {}


def test_unread_contents_are_skipped() -> None:
    stream = tars.file(b"a.csv", b"x" * 700) + tars.file(b"b.csv", b"y") + tars.END
    names = [m.path for m in read_members(StreamReader(io.BytesIO(stream)), LIMITS)]
    assert names == [("a.csv",), ("b.csv",)]


def test_pax_size_counts() -> None:
    body = b"0123456789"
    stream = tars.pax((b"size", b"10")) + tars.header(b"a.csv") + tars.padded(body) + tars.END
    assert accept(stream) == {"a.csv": body}


def test_base_256_size() -> None:
    block = bytearray(tars.header(b"a.csv"))
    block[124:136] = b"\x80" + (3).to_bytes(11, "big")
    assert accept(tars.sealed(block) + tars.padded(b"abc") + tars.END) == {"a.csv": b"abc"}


# -- refused ----------------------------------------------------------------------------------

LONG = b"x" * 251 + b".csv"  # 255 bytes


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (b"1", "a hard link"),
        (b"2", "a symbolic link"),
        (b"3", "a character device"),
        (b"4", "a block device"),
        (b"6", "a FIFO"),
        (b"Y", "a socket"),
        (b"7", "a contiguous file"),
        (b"S", "a sparse file"),
        (b"K", "a link"),
        (b"g", "a global header"),
        (b"V", "of type b'V'"),
        (b"\xff", "of type"),
    ],
)
def test_only_regular_files(kind: bytes, what: str) -> None:
    message = refuse(tars.header(b"evil.csv", kind=kind) + tars.END)
    assert "'evil.csv'" in message
    assert what in message


def test_real_links_and_specials_of_the_standard_library() -> None:
    for kind in (
        tarfile.SYMTYPE,
        tarfile.LNKTYPE,
        tarfile.FIFOTYPE,
        tarfile.CHRTYPE,
        tarfile.BLKTYPE,
    ):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            info = tarfile.TarInfo("evil.csv")
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
        assert "not a regular file" in refuse(stream.getvalue())


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (b"/etc/x.csv", "absolute"),
        (b"//x.csv", "absolute"),
        (b"../x.csv", "'..'"),
        (b"a/../x.csv", "'..'"),
        (b"..", "'..'"),
        (b"./../x.csv", "'..'"),
        (b"a//b.csv", "empty or '.'"),
        (b"a/./b.csv", "empty or '.'"),
        (b"././a.csv", "empty or '.'"),
        (b".//a.csv", "empty or '.'"),
        (b"a\nb.csv", "control character"),
        (b"a\x1b[2Jb.csv", "control character"),
        (b"a\x7fb.csv", "control character"),
        ("a\u009bb.csv".encode(), "control character"),
        ("a\u202evsc.exe.csv".encode(), "control character"),
        ("a\u2028b.csv".encode(), "control character"),
        (b"\xff\xfe.csv", "not UTF-8"),
        (b"\xed\xa0\x80.csv", "not UTF-8"),
        (b"", "empty name"),
        (b"x" + LONG, "component of over 255"),
        (b"/".join([LONG] * 5), "bytes; 1024 are allowed"),
        (b"d/" * 16 + b"a.csv", "17 levels deep"),
    ],
)
@pytest.mark.parametrize("how", ["plain", "pax", "gnu"])
def test_bad_names(name: bytes, reason: str, how: str) -> None:
    if how == "plain":
        if len(name) > 100:
            return  # does not fit into a plain header
        stream = tars.file(name)
    elif how == "pax":
        stream = tars.pax((b"path", name)) + tars.file(b"innocent.csv")
    else:
        stream = tars.gnu_name(name) + tars.file(b"innocent.csv")
    assert reason in refuse(stream + tars.END)


def test_nul_in_a_pax_name() -> None:
    stream = tars.pax((b"path", b"a.csv\0.exe")) + tars.file(b"a.csv") + tars.END
    assert "control character" in refuse(stream)


def test_longest_names_are_fine() -> None:
    assert split_name(LONG) == (LONG.decode(),)
    longest = b"/".join([LONG, LONG, LONG, LONG[1:]])
    assert len(longest) == 1022
    assert len(split_name(longest)) == 4
    assert len(split_name(b"d/" * 15 + b"a.csv")) == 16


@pytest.mark.parametrize(
    "name", ["x.exe", "x", "x.csv.exe", "x.csv ", "x.", ".csv", "x.c\u017fv", "d.csv/x", "x.csv~"]
)
def test_suffixes(name: str) -> None:
    message = refuse(tars.file(name.encode()) + tars.END)
    assert "suffix that is not allowed (csv, duckdb," in message


def test_suffixes_are_configurable() -> None:
    limits = ExportLimits(max_bytes=10, suffixes=frozenset({"exe"}))
    assert accept(tars.file(b"x.exe") + tars.END, limits) == {"x.exe": b""}
    assert "not allowed (exe)" in refuse(tars.file(b"x.csv") + tars.END, limits)


def test_the_257th_file() -> None:
    files = {f"{n}.csv": b"" for n in range(256)}
    assert len(accept(tars.tree(files))) == 256
    assert "'last.csv' is one file too many; 256" in refuse(tars.tree({**files, "last.csv": b""}))


def test_too_many_directories() -> None:
    entries = [tars.header(b"d%d/" % n, kind=b"5") for n in range(257)]
    assert len(accept(b"".join(entries[:256]) + tars.END)) == 256
    assert "'d256' needs one directory too many" in refuse(b"".join(entries) + tars.END)
    implicit = [tars.file(b"d%d/e/a.csv" % n) for n in range(129)]
    assert "too many" in refuse(b"".join(implicit) + tars.END)


def test_budget_is_checked_before_anything_is_read() -> None:
    limits = ExportLimits(max_bytes=10)
    assert accept(tars.tree({"a.csv": b"x" * 4, "b.csv": b"x" * 6}), limits)
    # The contents are not even there: the announced size is enough.
    stream = tars.file(b"a.csv", b"x" * 4) + tars.header(b"b.csv", size=7)
    assert "'b.csv' has 7 bytes, with which the export is over its 10 bytes" in refuse(
        stream, limits
    )
    huge = tars.pax((b"size", b"9" * 20)) + tars.header(b"b.csv")
    assert "over its 10 bytes" in refuse(huge, limits)


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["a.csv", "a.csv"], "appears twice"),
        (["a.csv", "./a.csv"], "appears twice"),
        (["a.csv", "A.csv"], "clashes with 'a.csv'"),
        (["d/a.csv", "D/b.csv"], "clashes with 'd'"),
        (["stra\u00dfe.csv", "strasse.csv"], "clashes with"),
        (["\u00e9.csv", "e\u0301.csv"], "clashes with"),
        (["\u00c9.csv", "e\u0301.csv"], "clashes with"),
        (["\u212b.csv", "\u00e5.csv"], "clashes with"),
        (["a.csv/b.csv", "a.csv"], "is a file and a directory"),
        (["a.csv", "a.csv/b.csv"], "which is a file"),
        (["a.csv", "A.csv/b.csv"], "clashes with 'a.csv'"),
    ],
)
def test_duplicates_and_clashes(names: list[str], reason: str) -> None:
    """ray#63696: no name twice, nor one that differs only in case or normalization."""
    stream = b"".join(tars.file(name.encode()) for name in names) + tars.END
    assert reason in refuse(stream)


def test_directory_twice_or_also_a_file() -> None:
    twice = tars.header(b"d/", kind=b"5") + tars.header(b"./d", kind=b"5") + tars.END
    assert "'d' appears twice" in refuse(twice)
    both = tars.header(b"d.csv", kind=b"5") + tars.file(b"d.csv") + tars.END
    assert "is a file and a directory" in refuse(both)
    other = tars.file(b"d.csv") + tars.header(b"d.csv", kind=b"5") + tars.END
    assert "which is a file" in refuse(other)
    assert "appears twice" in refuse(tars.header(b"./", kind=b"5") * 2 + tars.END)
    assert "root, but not a directory" in refuse(tars.file(b".") + tars.END)


def test_odd_entries() -> None:
    assert "contents of its own" in refuse(tars.header(b"d/", kind=b"5", size=5) + tars.END)
    assert "name of a directory" in refuse(tars.file(b"a.csv/") + tars.END)
    assert "format" in refuse(tars.header(b"a.csv", magic=b"\0" * 8) + tars.END)
    stray = tars.header(b"a.csv", size=1) + b"x" + b"y" * 511 + tars.END
    assert "belong to no entry" in refuse(stray)


@pytest.mark.parametrize("size", [b"00000000008\0", b"-0000000001\0", b"\xff" * 12, b"\0" * 12])
def test_sizes_that_are_none(size: bytes) -> None:
    block = bytearray(tars.header(b"a.csv"))
    block[124:136] = size
    assert "not a number" in refuse(tars.sealed(block) + tars.END)


def test_checksum() -> None:
    block = bytearray(tars.header(b"a.csv"))
    block[0] ^= 1
    assert "damaged header" in refuse(bytes(block) + tars.END)
    block = bytearray(tars.header(b"a.csv"))
    block[148:156] = b"\0" * 8
    assert "damaged header" in refuse(bytes(block) + tars.END)


@pytest.mark.parametrize("kind", [b"x", b"L"])
def test_extension_headers_are_bounded(kind: bytes) -> None:
    stream = tars.header(b"ext", kind=kind, size=MAX_EXTENSION + 1)
    assert f"of {MAX_EXTENSION + 1} bytes; {MAX_EXTENSION} are" in refuse(stream)


def test_extension_headers_stand_alone() -> None:
    one = tars.pax((b"path", b"a.csv"))
    assert "more than one" in refuse(one + one + tars.file(b"b.csv") + tars.END)
    assert "more than one" in refuse(tars.gnu_name(b"a.csv") + one + tars.file(b"b.csv"))
    assert "without an entry" in refuse(one + tars.END)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (b"GNU.sparse.major", b"1", "sparse"),
        (b"GNU.sparse.name", b"../x", "sparse"),
        (b"linkpath", b"/etc/passwd", "is a link, not a regular file"),
        (b"hdrcharset", b"BINARY", "'hdrcharset'"),
        (b"SCHILY.xattr.security.capability", b"x", "xattr"),
        (b"size", b"-1", "not a number"),
        (b"size", b"9" * 21, "not a number"),
        (b"size", b"", "not a number"),
    ],
)
def test_pax_keys(key: bytes, value: bytes, reason: str) -> None:
    assert reason in refuse(tars.pax((key, value)) + tars.file(b"a.csv") + tars.END)


def test_a_name_that_is_not_utf_8_is_told_as_such() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo(os.fsdecode(b"caf\xe9.csv")))
    assert b"hdrcharset=BINARY" in stream.getvalue()
    message = refuse(stream.getvalue())
    assert message.startswith(r"artifact 'caf\udce9.csv' has a name that is not UTF-8")


@pytest.mark.parametrize(
    "body", [b"x", b"99 path=a\n", b"3 \n", b"0 a=b\n", b"-5 a=b\n", b"11 path=abc", b"  7 a=b\n"]
)
def test_damaged_pax(body: bytes) -> None:
    stream = tars.header(b"pax", size=len(body), kind=b"x") + tars.padded(body)
    assert "damaged pax" in refuse(stream + tars.file(b"a.csv") + tars.END)


def test_pax_key_twice() -> None:
    stream = tars.pax((b"path", b"a.csv"), (b"path", b"../b.csv")) + tars.file(b"c.csv")
    assert "'path', which is not accepted" in refuse(stream)


def test_truncated_anywhere() -> None:
    stream = tars.pax((b"path", b"d/a.csv")) + tars.file(b"a.csv", b"x" * 600) + tars.END
    assert accept(stream)
    for cut in range(0, len(stream), 64):
        assert "ended in the middle" in refuse(stream[:cut])


def test_end_marker() -> None:
    assert "damaged end marker" in refuse(tars.END[:512] + tars.file(b"a.csv"))
    assert "goes on after" in refuse(tars.END + tars.file(b"a.csv"))
    assert "goes on after" in refuse(tars.END + b"\0" * (MAX_TRAILER + 1))


def test_names_are_harmless_to_show() -> None:
    assert shown(b"\x1b]0;x\x07\n\xff") == r"'\x1b]0;x\x07\n\udcff'"
    assert shown("é" * 500).isascii()
    assert len(shown("a" * 5000)) < 200


# -- waiting ----------------------------------------------------------------------------------


def test_stalled_stream_ends_at_its_deadline() -> None:
    reading, writing = os.pipe()
    os.write(writing, tars.header(b"a.csv", size=100))
    began = time.monotonic()
    with os.fdopen(reading, "rb") as stream, pytest.raises(ExportRefused, match="its deadline"):
        list(read_members(StreamReader(stream, began + 0.3), LIMITS))
    assert 0.25 < time.monotonic() - began < 60
    os.close(writing)


def test_trickling_stream_ends_at_its_deadline() -> None:
    reading, writing = os.pipe()
    stream = os.fdopen(reading, "rb")
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.02):
            os.write(writing, b"\0")

    writer = threading.Thread(target=trickle)
    writer.start()
    try:
        reader = StreamReader(stream, time.monotonic() + 0.3)
        with pytest.raises(ExportRefused, match="deadline"):
            list(read_members(reader, LIMITS))
    finally:
        stop.set()
        writer.join()
        os.close(writing)
        stream.close()


def test_slow_pipe_arrives_in_full() -> None:
    data = tars.tree({"a.csv": bytes(range(256)) * 3000, "b.csv": b"end"})
    reading, writing = os.pipe()

    def pour() -> None:
        with os.fdopen(writing, "wb", buffering=0) as pipe:
            for start in range(0, len(data), 7001):
                pipe.write(data[start : start + 7001])

    writer = threading.Thread(target=pour)
    writer.start()
    with os.fdopen(reading, "rb") as stream:
        reader = StreamReader(stream, time.monotonic() + 30)
        sizes = {m.path[0]: len(b"".join(m.data)) for m in read_members(reader, LIMITS)}
    writer.join()
    assert sizes == {"a.csv": 768000, "b.csv": 3}


def test_closed_stream() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    stream = os.fdopen(reading, "rb")
    reader = StreamReader(stream, time.monotonic() + 5)
    stream.close()
    with pytest.raises(ExportRefused, match="cannot be read"):
        list(read_members(reader, LIMITS))


# -- everything else --------------------------------------------------------------------------

_part = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"], exclude_characters="/"),
    min_size=1,
    max_size=20,
).filter(lambda part: part not in (".", ".."))
_name = st.tuples(st.lists(_part, max_size=3), _part).map(
    lambda parts: "/".join([*parts[0], f"x{parts[1]}.csv"])
)


def _plain(names: list[str]) -> bool:
    """Tell whether no two names share a spelling-insensitive prefix."""
    keys: dict[str, str] = {}
    for name in names:
        parts = name.split("/")
        for depth in range(1, len(parts) + 1):
            prefix = "/".join(parts[:depth])
            folded = unicodedata.normalize("NFD", prefix).casefold()
            key = unicodedata.normalize("NFD", folded)
            if keys.setdefault(key, prefix) != prefix:
                return False
    directories = {name.rsplit("/", n)[0] for name in names for n in range(1, name.count("/") + 1)}
    return not directories & set(names)


@given(
    st.dictionaries(_name, st.binary(max_size=1500), max_size=8).filter(lambda d: _plain(list(d))),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
)
def test_acceptable_trees_come_back_as_they_were(files: dict[str, bytes], form: int) -> None:
    assert accept(tars.tree(files, form=form)) == files


SEED = (
    tars.header(b"./", kind=b"5")
    + tars.header(b"d/", kind=b"5")
    + tars.pax((b"path", b"d/long.csv"), (b"mtime", b"1.5"))
    + tars.file(b"a.csv", b"hello")
    + tars.gnu_name(b"d/e/other.json")
    + tars.file(b"b.json", b"{}" * 300)
    + tars.file(b"plain.png", b"")
    + tars.END
)


def attempt(data: bytes) -> tuple[dict[str, bytes], str]:
    """Return what was accepted, or nothing and why."""
    try:
        return accept(data), ""
    except ExportRefused as error:
        return {}, error.message


def survives(data: bytes) -> None:
    """Nothing but a refusal, or a tree whose every path is plain and inside."""
    found, message = attempt(data)
    assert message.isprintable()
    assert len(message) < 1000
    for path in found:
        parts = path.rstrip("/").split("/")
        assert not path.startswith("/")
        assert not {"", ".", ".."} & set(parts)
        assert path.endswith("/") or path.rsplit(".", 1)[1].lower() in LIMITS.suffixes
        assert not any(unicodedata.category(char) == "Cc" for char in path)
    assert sum(map(len, found.values())) <= LIMITS.max_bytes


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.integers(0, len(SEED) - 1), st.binary(min_size=1, max_size=12)),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
@example([(512 + 156, b"2")], True)
@example([(0, b"../")], True)
def test_mutated_streams_never_get_past(changes: list[tuple[int, bytes]], reseal: bool) -> None:
    data = bytearray(SEED)
    for offset, change in changes:
        data[offset : offset + len(change)] = change
    if reseal:  # with right checksums the mutation reaches the rules behind them
        for start in range(0, len(data) - 511, 512):
            if data[start + 257 : start + 262] == b"ustar":
                data[start : start + 512] = tars.sealed(data[start : start + 512])
    survives(bytes(data))


@given(st.binary(max_size=3000))
def test_arbitrary_bytes_never_get_past(data: bytes) -> None:
    survives(data)
    survives(data + tars.END)


@given(st.binary(min_size=1, max_size=1100))
def test_arbitrary_names_never_get_past(name: bytes) -> None:
    survives(tars.gnu_name(name) + tars.file(b"x.csv") + tars.END)
    survives(tars.pax((b"path", name)) + tars.file(b"x.csv") + tars.END)


@given(st.binary(max_size=300))
def test_arbitrary_pax_bodies_never_get_past(body: bytes) -> None:
    head = tars.header(b"pax", size=len(body), kind=b"x") + tars.padded(body)
    survives(head + tars.file(b"x.csv") + tars.END)
