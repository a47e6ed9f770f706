"""Publication: all or nothing, by real files, real tar programs, real disks that are full."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tars
from unprivileged import UID, as_user

from kernel_provisioner.artifacts import Artifact, ExportLimits, Owner, publish
from kernel_provisioner.artifacts.publish import STAGING_PREFIX
from kernel_provisioner.errors import (
    EXIT_EXPORT_REFUSED,
    EXIT_USAGE,
    ExportRefused,
    OutputRefused,
)

LIMITS = ExportLimits(max_bytes=50_000_000)
FILES = {"a.csv": b"x,y\n1,2\n", "plots/b.png": os.urandom(70_000), "plots/deep/c.json": b"{}"}


@pytest.fixture
def out() -> Iterator[Path]:
    """Return a directory that every user can write to (pytest's own are private)."""
    path = Path(tempfile.mkdtemp(prefix="publish-")).resolve()
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


def run(data: bytes, destination: Path, limits: ExportLimits = LIMITS) -> list[Artifact]:
    return publish(io.BytesIO(data), destination, limits)


def content(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def nothing_in(out: Path) -> bool:
    return not list(out.iterdir())


# -- published --------------------------------------------------------------------------------


def test_files_digests_modes_and_owner(out: Path) -> None:
    mask = os.umask(0o077)
    try:
        artifacts = run(tars.tree(FILES), out / "artifacts")
    finally:
        os.umask(mask)
    assert content(out / "artifacts") == FILES
    assert [a.as_dict() for a in artifacts] == [
        {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in sorted(FILES.items())
    ]
    for path in [out / "artifacts", *(out / "artifacts").rglob("*")]:
        info = path.lstat()
        assert stat.S_IMODE(info.st_mode) == (0o755 if path.is_dir() else 0o644)
        assert (info.st_uid, info.st_gid) == (os.geteuid(), os.getegid())
    assert [p.name for p in out.iterdir()] == ["artifacts"]


def test_files_belong_to_the_user_who_exports(out: Path) -> None:
    """docker-stacks#2093: exported files belong to the user."""
    artifacts = as_user(lambda: run(tars.tree(FILES), out / "artifacts"))
    assert len(artifacts) == 3
    expected = UID if os.geteuid() == 0 else os.geteuid()
    assert {p.stat().st_uid for p in (out / "artifacts").rglob("*")} == {expected}


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_root_publishes_for_another_owner(out: Path) -> None:
    publish(io.BytesIO(tars.tree(FILES)), out / "a", LIMITS, Owner(UID, UID))
    owners = {(p.stat().st_uid, p.stat().st_gid) for p in [out / "a", *(out / "a").rglob("*")]}
    assert owners == {(UID, UID)}


def test_empty_destination_is_taken(out: Path) -> None:
    (out / "a").mkdir()
    assert run(tars.tree({"x.csv": b"1"}), out / "a")
    assert content(out / "a") == {"x.csv": b"1"}


def test_no_artifacts_are_an_empty_directory(out: Path) -> None:
    assert run(tars.END, out / "a") == []
    assert nothing_in(out / "a")


@pytest.mark.parametrize("form", ["gnu", "pax", "ustar"])
def test_stream_of_gnu_tar(out: Path, form: str) -> None:
    source = out / "source"
    for name, data in FILES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    if form != "ustar":
        (source / ("long" * 50 + ".txt")).write_bytes(b"long")
    (source / "empty").mkdir()
    with subprocess.Popen(
        ["tar", f"--format={form}", "-C", source, "-cf", "-", "."], stdout=subprocess.PIPE
    ) as tar:
        assert tar.stdout is not None
        publish(tar.stdout, out / "a", LIMITS, deadline=time.monotonic() + 30)
    assert tar.returncode == 0
    assert content(out / "a") == content(source)
    assert (out / "a/empty").is_dir()


def test_gnu_tar_of_every_forbidden_thing(out: Path) -> None:
    """ray#63696, sos#4460: links and all else that is no regular file refuse the export."""

    def link(path: Path) -> None:
        path.symlink_to("/etc/passwd")

    def hard(path: Path) -> None:
        (path.parent / "0.csv").write_text("x")
        os.link(path.parent / "0.csv", path)

    def sparse(path: Path) -> None:
        path.touch()
        os.truncate(path, 10_000_000)

    for number, make in enumerate((link, hard, sparse, os.mkfifo)):
        source = out / f"source{number}"
        source.mkdir()
        make(source / "evil.csv")
        stream = subprocess.run(
            ["tar", "--sparse", "--sort=name", "-C", source, "-cf", "-", "."],
            check=True,
            capture_output=True,
        ).stdout
        with pytest.raises(ExportRefused, match=r"evil\.csv' is a .*not a regular file"):
            run(stream, out / "a")
        assert not (out / "a").exists()


def test_a_hundred_megabytes_by_a_pipe(out: Path) -> None:
    script = (
        "import sys,tarfile,io\n"
        "t=tarfile.open(fileobj=sys.stdout.buffer,mode='w|')\n"
        "i=tarfile.TarInfo('big.parquet'); i.size=100<<20\n"
        "t.addfile(i,open('/dev/zero','rb')); t.close()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        limits = ExportLimits(max_bytes=128 << 20)
        (artifact,) = publish(child.stdout, out / "a", limits, deadline=time.monotonic() + 60)
    assert artifact.size == 100 << 20
    assert (out / "a/big.parquet").stat().st_size == 100 << 20


# -- refused: nothing is left -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("stream", "entry"),
    [
        (tars.header(b"l.csv", kind=b"2"), "l.csv"),
        (tars.header(b"l.csv", kind=b"1"), "l.csv"),
        (tars.header(b"l.csv", kind=b"6"), "l.csv"),
        (tars.header(b"l.csv", kind=b"3"), "l.csv"),
        (tars.file(b"../x.csv"), "../x.csv"),
        (tars.file(b"/tmp/x.csv"), "/tmp/x.csv"),
        (tars.file(b"x.exe"), "x.exe"),
        (tars.file(b"GOOD.csv"), "GOOD.csv"),
        (tars.file(b"good.csv"), "good.csv"),
        (tars.header(b"big.csv", size=60_000_000), "big.csv"),
        (b"".join(tars.file(b"%d.csv" % n) for n in range(256)), "255.csv"),
    ],
)
def test_one_bad_entry_rejects_all(out: Path, stream: bytes, entry: str) -> None:
    with pytest.raises(ExportRefused) as refused:
        run(tars.file(b"good.csv", b"x" * 5000) + stream + tars.END, out / "a")
    assert f"'{entry}'" in refused.value.message
    assert refused.value.exit_status == EXIT_EXPORT_REFUSED
    assert nothing_in(out)


def test_truncated_or_stalled_stream(out: Path) -> None:
    with pytest.raises(ExportRefused, match="ended in the middle"):
        run(tars.tree(FILES)[:5000], out / "a")
    reading, writing = os.pipe()
    os.write(writing, tars.file(b"a.csv", b"x"))
    with os.fdopen(reading, "rb") as stream, pytest.raises(ExportRefused, match="deadline"):
        publish(stream, out / "a", LIMITS, deadline=time.monotonic() + 0.2)
    os.close(writing)
    assert nothing_in(out)


def test_an_interrupt_leaves_nothing(out: Path) -> None:
    class Interrupted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            data = super().read(size)
            if self.tell() > 20_000:
                raise KeyboardInterrupt
            return data

    with pytest.raises(KeyboardInterrupt):
        publish(Interrupted(tars.tree(FILES)), out / "a", LIMITS)
    assert nothing_in(out)


def test_file_too_large_for_the_process(out: Path) -> None:
    def attempt() -> None:
        # In a forked child: the limit of the test process itself must stay.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        run(tars.tree(FILES), out / "a")

    with pytest.raises(ExportRefused, match="no space is left"):
        as_user(attempt)
    assert nothing_in(out)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a small file system")
@pytest.mark.parametrize("options", ["size=64k", "nr_inodes=4"])
def test_full_disk(out: Path, options: str) -> None:
    disk = out / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", disk], check=True)
    try:
        with pytest.raises(ExportRefused, match=r"no space is left .*No space left on device"):
            run(tars.tree(FILES), disk / "a")
        assert nothing_in(disk)
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts read-only")
def test_read_only_disk(out: Path) -> None:
    disk = out / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", disk], check=True)
    try:
        with pytest.raises(OutputRefused, match="Read-only file system"):
            run(tars.tree(FILES), disk / "a")
    finally:
        subprocess.run(["umount", disk], check=True)


# -- destinations -----------------------------------------------------------------------------


def test_destinations_that_cannot_be_used(out: Path) -> None:
    (out / "full").mkdir()
    (out / "full/precious").write_text("x")
    (out / "file").write_text("x")
    (out / "target").mkdir()
    (out / "link").symlink_to(out / "target")
    (out / "dangling").symlink_to("gone")
    before = sorted(p.name for p in out.rglob("*"))
    for name, reason in {
        "full": "is not empty",
        "file": "not a directory",
        "link": "not a directory",
        "dangling": "not a directory",
        "gone/a": "cannot be opened",
        "file/a": "cannot be opened",
        "..": "names no directory",
        "a\0b": "names no directory",
        "n" * 300: "cannot be used",
    }.items():
        with pytest.raises(OutputRefused, match=reason) as refused:
            run(tars.tree(FILES), out / name)
        assert refused.value.exit_status == EXIT_USAGE
        assert refused.value.remedy
    assert sorted(p.name for p in out.rglob("*")) == before


def test_refused_destination_leaves_the_stream_unread(out: Path) -> None:
    (out / "file").write_text("x")
    stream = io.BytesIO(tars.tree(FILES))
    with pytest.raises(OutputRefused):
        publish(stream, out / "file", LIMITS)
    assert stream.tell() == 0


def test_directory_that_the_user_cannot_write_to(out: Path) -> None:
    out.chmod(0o555)
    with pytest.raises(OutputRefused, match="cannot be written to"):
        as_user(lambda: run(tars.tree(FILES), out / "a"))
    out.chmod(0o755)


def test_destination_filled_meanwhile_is_not_replaced(out: Path) -> None:
    class Filling(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            (out / "a").mkdir(exist_ok=True)
            (out / "a/other").write_text("precious")
            return super().read(size)

    with pytest.raises(OutputRefused, match="cannot be replaced"):
        publish(Filling(tars.tree(FILES)), out / "a", LIMITS)
    assert content(out) == {"a/other": b"precious"}


# -- after a crash ----------------------------------------------------------------------------

CRASH = """
import os, sys
from pathlib import Path
from kernel_provisioner.artifacts import ExportLimits, publish
publish(sys.stdin.buffer, Path(sys.argv[1]), ExportLimits(max_bytes=10**6))
"""


def _crash(out: Path, repository: Path) -> Path:
    """SIGKILL a real publication in the middle; return the staging directory that it leaves."""
    with subprocess.Popen(
        [sys.executable, "-c", CRASH, out / "a"],
        stdin=subprocess.PIPE,
        env={"PYTHONPATH": str(repository)},
    ) as child:
        assert child.stdin is not None
        child.stdin.write(tars.file(b"a.csv", b"x" * 9000) + tars.header(b"b.csv", size=9000))
        child.stdin.flush()
        end = time.monotonic() + 30
        while not list(out.glob(f"{STAGING_PREFIX}*/tree/b.csv")):
            assert child.poll() is None
            assert time.monotonic() < end
        assert not (out / "a").exists()
        # A publication at work is nobody's leftover.
        run(tars.END, out / "other")
        assert len(list(out.glob(f"{STAGING_PREFIX}*"))) == 1
        child.kill()
    (left,) = out.glob(f"{STAGING_PREFIX}*")
    assert [p.name for p in out.iterdir() if p != left] == ["other"]
    return left


def test_a_crash_leaves_only_staging_which_the_next_publication_sweeps(
    out: Path, repository: Path
) -> None:
    left = _crash(out, repository)
    run(tars.tree(FILES), out / "a")
    assert not left.exists()
    assert content(out / "a") == FILES


def test_only_what_is_provably_ours_is_swept(out: Path) -> None:
    def lookalike(digit: str, mode: int = 0o700) -> Path:
        path = out / f"{STAGING_PREFIX}{digit * 32}"
        path.mkdir()
        (path / "precious").write_text("x")
        path.chmod(mode)
        return path

    unrecorded = lookalike("a")
    copied = lookalike("b")
    (copied / "staging.json").write_text('{"v": 1, "staging": "another"}')
    public = lookalike("c", 0o755)
    (public / "staging.json").write_text(f'{{"v": 1, "staging": "{public.name}"}}')
    named = out / f"{STAGING_PREFIX}notes"
    named.mkdir()
    link = out / f"{STAGING_PREFIX}{'d' * 32}"
    link.symlink_to(unrecorded)
    ours = lookalike("e")
    (ours / "staging.json").write_text(f'{{"v": 1, "staging": "{ours.name}"}}')
    busy = lookalike("f")
    (busy / "staging.json").write_text(f'{{"v": 1, "staging": "{busy.name}"}}')
    held = os.open(busy, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    empty = out / f"{STAGING_PREFIX}{'0' * 32}"
    empty.mkdir(mode=0o700)
    try:
        run(tars.END, out / "a")
    finally:
        os.close(held)
    for path in (unrecorded, copied, public, named, busy):
        assert path.is_dir()
    assert link.is_symlink()
    assert not ours.exists()
    assert not empty.exists()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users")
def test_another_user_s_staging_is_left_alone(out: Path) -> None:
    name = f"{STAGING_PREFIX}{'a' * 32}"

    def make() -> None:
        (out / name).mkdir(mode=0o700)
        (out / name / "staging.json").write_text(f'{{"v": 1, "staging": "{name}"}}')

    as_user(make)
    run(tars.END, out / "a")
    assert (out / name).is_dir()
