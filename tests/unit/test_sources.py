"""Sources: each refusal of spec E4, staging beside a writer (E2), path variables (E3)."""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import sqlite3
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path, PurePosixPath

import pytest
from unprivileged import UID, as_user

from kernel_provisioner import sources
from kernel_provisioner.errors import EXIT_USAGE, SourceRefused
from kernel_provisioner.paths import StateDirs
from kernel_provisioner.sources import Reader, Source, check_source
from kernel_provisioner.sqlite_copy import stage_sqlite

GUEST = Reader((10001, 10001))


@pytest.fixture
def place() -> Iterator[Path]:
    """Return a directory that every user can reach (pytest's own are private)."""
    path = Path(tempfile.mkdtemp(prefix="sources-")).resolve()
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def dirs(place: Path) -> StateDirs:
    return StateDirs(place / "product/data", place / "product/state", place / "product/run")


@pytest.fixture
def home(place: Path) -> Path:
    path = place / "home/ann"
    path.mkdir(parents=True)
    return path


@pytest.fixture
def csv(place: Path) -> Path:
    return write(place / "data/sales.csv")


def write(path: Path, content: bytes = b"a,b\n1,2\n", mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    path.chmod(mode)
    return path


def refusal(path: Path | str, dirs: StateDirs, home: Path, reader: Reader = GUEST) -> str:
    with pytest.raises(SourceRefused) as refused:
        check_source("src", path, [dirs], reader=reader, homes=[home])
    assert refused.value.remedy
    assert refused.value.exit_status == EXIT_USAGE
    assert "'src'" in refused.value.message
    return refused.value.message


def digest(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in root.rglob("*")
        if p.is_file()
    }


# -- names ------------------------------------------------------------------------------------


def test_name_and_path() -> None:
    assert sources.parse_source("a.b-c_1=/x=y") == ("a.b-c_1", "/x=y")
    assert sources.parse_sources(["a=1", "b=2"]) == {"a": "1", "b": "2"}


@pytest.mark.parametrize("text", ["", "a", "a=", "=b", "a/b=c", ".=c", "..=c", "ä=c", "a b=c"])
def test_bad_name_is_refused(text: str) -> None:
    with pytest.raises(SourceRefused):
        sources.parse_source(text)


@pytest.mark.parametrize("name", ["a\n", "a\x1b[31m", "x" * 101, "", "a\0"])
def test_bad_name_is_refused_by_check_too(name: str) -> None:
    with pytest.raises(SourceRefused) as refused:
        sources.check_name(name)
    assert "\x1b" not in str(refused.value)


def test_two_sources_of_one_name() -> None:
    with pytest.raises(SourceRefused, match="two sources are named 'a'"):
        sources.parse_sources(["a=1", "b=2", "a=1"])


# -- accepted ---------------------------------------------------------------------------------


def test_file_directory_and_database(place: Path, csv: Path, dirs: StateDirs, home: Path) -> None:
    database = place / "x.db"
    sqlite3.connect(database).execute("CREATE TABLE t (x)").connection.close()
    database.chmod(0o644)
    found = [
        check_source("s", path, [dirs], reader=GUEST, homes=[home])
        for path in (csv, csv.parent, database)
    ]
    assert [(s.path, s.kind) for s in found] == [
        (csv, "file"),
        (csv.parent, "dir"),
        (database, "sqlite"),
    ]
    assert found[0].guest_path == PurePosixPath("/sources/s")


def test_data_below_home_is_an_ordinary_source(home: Path, dirs: StateDirs) -> None:
    file = write(home / "data/x.csv")
    assert check_source("s", file, [dirs], reader=GUEST, homes=[home]).path == file


def test_named_link_becomes_canonical(csv: Path, place: Path, dirs: StateDirs, home: Path) -> None:
    (place / "link").symlink_to(csv)
    assert check_source("s", place / "link", [dirs], reader=GUEST, homes=[home]).path == csv


def test_links_inside_are_left_alone(csv: Path, dirs: StateDirs, home: Path) -> None:
    (csv.parent / "out").symlink_to("/etc/shadow")
    (csv.parent / "gone").symlink_to("nowhere")
    (csv.parent / "loop").symlink_to("loop")
    assert check_source("s", csv.parent, [dirs], reader=GUEST, homes=[home]).kind == "dir"


def test_private_ancestors_do_not_matter(csv: Path, dirs: StateDirs, home: Path) -> None:
    above = csv.parent.parent / "locked"
    above.mkdir(mode=0o700)
    shutil.move(csv.parent, above)
    found = check_source("s", above / "data/sales.csv", [dirs], reader=GUEST, homes=[home])
    assert found.kind == "file"


# -- refused ----------------------------------------------------------------------------------


def test_missing(place: Path, dirs: StateDirs, home: Path) -> None:
    assert "does not exist" in refusal(place / "gone", dirs, home)
    (place / "dangling").symlink_to("gone")
    assert "does not exist" in refusal(place / "dangling", dirs, home)
    (place / "loop").symlink_to("loop")
    assert "loop" in refusal(place / "loop", dirs, home).lower() or "symbolic" in refusal(
        place / "loop", dirs, home
    )
    assert "is not a path" in refusal("", dirs, home)
    assert "is not a path" in refusal("a\0b", dirs, home)


def test_special_files(place: Path, csv: Path, dirs: StateDirs, home: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place / "s"))
        assert "is a socket" in refusal(place / "s", dirs, home)
        os.mkfifo(place / "f")
        assert "is a FIFO" in refusal(place / "f", dirs, home)
    # A read-only mount does not keep anybody from connecting to a socket in it.
    for kind, make in (("socket", place / "s"), ("FIFO", place / "f")):
        make.rename(csv.parent / "deep")
        message = refusal(csv.parent, dirs, home)
        assert f"is a {kind}" in message
        assert "deep" in message
        (csv.parent / "deep").unlink()


@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero", "/dev", "/dev/shm"])
def test_devices(path: str, dirs: StateDirs, home: Path) -> None:
    assert "/dev" in refusal(path, dirs, home)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
def test_device_elsewhere(csv: Path, dirs: StateDirs, home: Path) -> None:
    os.mknod(csv.parent / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    assert "is a character device" in refusal(csv.parent / "null", dirs, home)
    assert "is a character device" in refusal(csv.parent, dirs, home)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/etc",
        "/etc/passwd",
        "/proc",
        "/proc/self/environ",
        "/sys",
        "/dev",
        "/run",
        "/var",
        "/../",
        "/usr/../etc",
        "/var/run",
    ],
)
def test_system_places(path: str, dirs: StateDirs, home: Path) -> None:
    message = refusal(path, dirs, home)
    assert any(word in message for word in ("lies below", "is /", "is /var"))


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="others cannot look into /root")
def test_root_s_home(dirs: StateDirs, home: Path) -> None:
    assert "is /root" in refusal("/root", dirs, home)


def test_home_itself_and_what_contains_it(home: Path, dirs: StateDirs, place: Path) -> None:
    assert "is a home directory" in refusal(home, dirs, home)
    assert "~/.ssh" in refusal(home.parent, dirs, home)
    assert "~/.ssh" in refusal(place, dirs, home)
    (place / "alias").symlink_to(home)
    assert "is a home directory" in refusal(place / "alias", dirs, home)


def test_own_home_by_default(dirs: StateDirs, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(SourceRefused, match="is a home directory"):
        check_source("s", home, [dirs])
    # HOME may be moved, the account's home stays protected.
    account = Path(os.path.expanduser(f"~{os.environ.get('USER', 'root')}"))
    assert account in sources._homes() or os.geteuid() != 0


@pytest.mark.parametrize(
    "secret",
    [".ssh", ".aws", ".gnupg", ".config", ".docker", ".kube", ".local/share/keyrings"],
)
def test_credentials(secret: str, home: Path, dirs: StateDirs, csv: Path) -> None:
    file = write(home / secret / "deep/key")
    for path in (file, home / secret, file.parent):
        assert f"~/{secret}" in refusal(path, dirs, home)
    (csv.parent / "alias").symlink_to(home / secret)
    assert f"~/{secret}" in refusal(csv.parent / "alias", dirs, home)


def test_netrc_also_by_hard_link(home: Path, dirs: StateDirs, csv: Path) -> None:
    netrc = write(home / ".netrc")
    assert "~/.netrc" in refusal(netrc, dirs, home)
    os.link(netrc, csv.parent / "innocent.csv")
    assert "~/.netrc" in refusal(csv.parent / "innocent.csv", dirs, home)
    assert "~/.netrc" in refusal(csv.parent, dirs, home)


def test_keyrings_parent_is_refused(home: Path, dirs: StateDirs) -> None:
    (home / ".local/share").mkdir(parents=True)
    assert "keyrings" in refusal(home / ".local", dirs, home)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root bind-mounts")
def test_credentials_under_another_mount(
    home: Path, dirs: StateDirs, csv: Path, place: Path
) -> None:
    import subprocess

    write(home / ".ssh/deep/id_ed25519")
    point = place / "data/mnt"
    point.mkdir()
    subprocess.run(["mount", "--bind", home / ".ssh", point], check=True)
    try:
        for path in (point, point / "deep", point / "deep/id_ed25519", csv.parent):
            assert "~/.ssh" in refusal(path, dirs, home)
    finally:
        subprocess.run(["umount", point], check=True)


def test_product_state(dirs: StateDirs, home: Path, place: Path) -> None:
    file = write(dirs.data / "image/x")
    for path in (file, dirs.data, place / "product"):
        assert "overlaps the product's own state" in refusal(path, dirs, home)


# -- permissions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "owner", "allowed"),
    [
        (stat.S_IFREG | 0o644, (0, 0), True),
        (stat.S_IFREG | 0o640, (0, 0), False),
        (stat.S_IFREG | 0o640, (0, 10001), True),
        (stat.S_IFREG | 0o400, (10001, 0), True),
        # The first class that matches decides: the owner may have less than others.
        (stat.S_IFREG | 0o044, (10001, 0), False),
        (stat.S_IFREG | 0o604, (0, 10001), False),
        (stat.S_IFDIR | 0o755, (0, 0), True),
        (stat.S_IFDIR | 0o754, (0, 0), False),
        (stat.S_IFDIR | 0o711, (0, 0), False),
        (stat.S_IFDIR | 0o750, (0, 10001), True),
    ],
)
def test_permission_bits(mode: int, owner: tuple[int, int], allowed: bool) -> None:
    assert sources.mode_allows(mode, owner, (10001, 10001)) is allowed


def test_unreadable_for_the_guest(csv: Path, dirs: StateDirs, home: Path) -> None:
    csv.chmod(0o600)
    for path in (csv, csv.parent):
        message = refusal(path, dirs, home)
        assert "sales.csv' cannot be read by the guest's user (uid 10001" in message
    csv.chmod(0o644)
    csv.parent.chmod(0o750)
    assert "cannot be read by the guest's user" in refusal(csv.parent, dirs, home)
    assert check_source("s", csv, [dirs], reader=GUEST, homes=[home]).kind == "file"


def test_permission_bits_agree_with_the_kernel(place: Path) -> None:
    """Each mode of a file is opened for real by the unprivileged user."""
    owner = (os.geteuid(), os.getegid())
    reader = (UID, UID) if os.geteuid() == 0 else owner
    for mode in (0o400, 0o440, 0o444, 0o404, 0o040, 0o004, 0o000):
        file = write(place / "f", mode=mode)

        def readable(path: Path = file) -> bool:
            try:
                path.read_bytes()
            except PermissionError:
                return False
            return True

        assert as_user(readable) is sources.mode_allows(file.stat().st_mode, owner, reader)
        file.unlink()


def test_unreadable_for_an_ordinary_user(csv: Path, dirs: StateDirs, home: Path) -> None:
    csv.chmod(0o000)

    def attempt() -> list[str]:
        return [refusal(path, dirs, home, Reader(None)) for path in (csv, csv.parent)]

    for message in as_user(attempt):
        assert "sales.csv' cannot be read by this user" in message


def test_an_ordinary_user_gives_its_own_private_data(place: Path, dirs: StateDirs) -> None:
    place.chmod(0o777)

    def attempt() -> str:
        folder = place / "mine"
        folder.mkdir(mode=0o700)
        write(folder / "x.csv", mode=0o600)
        return check_source("s", folder, [dirs]).kind

    assert as_user(attempt) == "dir"


def test_unlistable_directory(csv: Path, dirs: StateDirs, home: Path) -> None:
    (csv.parent / "closed").mkdir(mode=0o000)

    def attempt() -> str:
        return refusal(csv.parent, dirs, home, Reader(None))

    assert "closed' cannot be read by this user" in as_user(attempt)
    (csv.parent / "closed").chmod(0o700)


def test_too_many_entries(
    csv: Path, dirs: StateDirs, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "MAX_ENTRIES", 3)
    for number in range(3):
        write(csv.parent / str(number))
    assert "more than 3 entries" in refusal(csv.parent, dirs, home)


# -- path variables ---------------------------------------------------------------------------


def test_path_variables(csv: Path, place: Path) -> None:
    folder = Source("files", csv.parent, "dir")
    file = Source("sales", csv, "file")
    (place / "link").symlink_to(csv.parent)
    environ = {
        "BACKINTEL_SQLITE_PATH": str(csv),
        "BACKINTEL_FILES_DIR": str(place / "link"),
        "BACKINTEL_PARQUET_DIR": "",
        "OTHER": "/x",
    }
    assert sources.guest_environment(environ, [folder, file]) == {
        "BACKINTEL_SQLITE_PATH": "/sources/sales",
        "BACKINTEL_FILES_DIR": "/sources/files",
    }
    inside = {"BACKINTEL_SQLITE_PATH": str(csv)}
    assert sources.guest_environment(inside, [folder]) == {
        "BACKINTEL_SQLITE_PATH": "/sources/files/sales.csv"
    }


def test_path_variable_outside_every_source(csv: Path, place: Path) -> None:
    for value in (str(place), str(csv) + "x", str(csv / "../../other")):
        with pytest.raises(SourceRefused, match="lies in no declared source"):
            sources.guest_environment(
                {"BACKINTEL_FILES_DIR": value}, [Source("files", csv.parent / "sub", "dir")]
            )
    with pytest.raises(SourceRefused):
        sources.guest_environment(
            {"BACKINTEL_FILES_DIR": str(csv / "below")}, [Source("sales", csv, "file")]
        )


# -- SQLite -----------------------------------------------------------------------------------


def database(path: Path, mode: str, rows: int = 1000) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute(f"PRAGMA journal_mode={mode}")
    connection.execute("CREATE TABLE a (x INTEGER)")
    connection.execute("CREATE TABLE b (x INTEGER)")
    connection.execute("BEGIN")
    for number in range(rows):
        connection.execute("INSERT INTO a VALUES (?)", (number,))
        connection.execute("INSERT INTO b VALUES (?)", (number,))
    connection.execute("COMMIT")
    return connection


def read_copy(path: Path) -> tuple[int, int]:
    """Read as a guest does: no write permission anywhere, read-only."""

    def read() -> tuple[int, int]:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        with pytest.raises(sqlite3.OperationalError):
            connection.execute("CREATE TABLE c (x)")
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return (
            connection.execute("SELECT count(*) FROM a").fetchone()[0],
            connection.execute("SELECT count(*) FROM b").fetchone()[0],
        )

    return as_user(read)


@pytest.mark.parametrize("mode", ["delete", "wal"])
@pytest.mark.parametrize("held", [True, False], ids=["open elsewhere", "closed"])
def test_staging_leaves_the_original_and_its_directory_alone(
    place: Path, mode: str, held: bool
) -> None:
    folder = place / "db"
    folder.mkdir()
    connection = database(folder / "x y#?.db", mode)
    if not held:
        connection.close()
    before = digest(folder)
    stage_sqlite(folder / "x y#?.db", place / "copy")
    after = digest(folder)
    # The -shm file is the readers' and writers' shared index: a reader marks itself in it.
    before.pop("x y#?.db-shm", None)
    after.pop("x y#?.db-shm", None)
    assert after == before
    assert read_copy(place / "copy") == (1000, 1000)
    assert stat.S_IMODE((place / "copy").stat().st_mode) == 0o444
    assert [p.name for p in place.glob("copy*")] == ["copy"]
    connection.close()


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_staging_beside_an_active_writer_is_of_one_moment(place: Path, mode: str) -> None:
    folder = place / "db"
    folder.mkdir()
    connection = database(folder / "x.db", mode, rows=20000)
    connection.execute("PRAGMA busy_timeout=60000")
    stop, written = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("INSERT INTO a VALUES (1)")
                connection.execute("INSERT INTO b VALUES (1)")
                connection.execute("COMMIT")
                written.set()
        except BaseException as error:
            failures.append(error)
            written.set()

    writer = threading.Thread(target=work)
    writer.start()
    try:
        assert written.wait(30)
        for number in range(5):
            stage_sqlite(folder / "x.db", place / f"copy{number}", deadline=time.monotonic() + 60)
    finally:
        stop.set()
        writer.join()
        connection.close()
    assert not failures
    counts = [read_copy(place / f"copy{number}") for number in range(5)]
    assert all(a == b >= 20000 for a, b in counts)
    assert counts == sorted(counts)


def test_staging_a_damaged_database_is_refused(place: Path) -> None:
    (place / "x.db").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    with pytest.raises(SourceRefused, match="cannot be copied as a SQLite database"):
        stage_sqlite(place / "x.db", place / "copy")
    assert not (place / "copy").exists()


def test_staging_respects_its_deadline(place: Path) -> None:
    database(place / "x.db", "delete").close()
    with pytest.raises(SourceRefused, match="before the deadline"):
        stage_sqlite(place / "x.db", place / "copy", deadline=time.monotonic() - 1)
    assert not (place / "copy").exists()


def test_staging_a_locked_database_ends(place: Path) -> None:
    connection = database(place / "x.db", "delete")
    connection.execute("BEGIN EXCLUSIVE")
    with pytest.raises(SourceRefused, match="before the deadline"):
        stage_sqlite(place / "x.db", place / "copy", deadline=time.monotonic() + 0.2)
    connection.close()
    assert not (place / "copy").exists()


def test_staging_never_overwrites(place: Path) -> None:
    database(place / "x.db", "delete").close()
    target = write(place / "precious")
    (place / "copy").symlink_to(target)
    with pytest.raises(SourceRefused, match="cannot be staged"):
        stage_sqlite(place / "x.db", place / "copy")
    assert target.read_bytes() == b"a,b\n1,2\n"
    assert (place / "copy").is_symlink()


@pytest.mark.parametrize("where", ["file", "folder"])
def test_a_database_that_became_a_link_is_not_copied(place: Path, where: str) -> None:
    folder = place / "data"
    private = place / "private"
    for each in (folder, private):
        each.mkdir()
        with closing(sqlite3.connect(each / "x.db")) as connection:
            connection.execute("CREATE TABLE t (a)")
    if where == "file":
        (folder / "x.db").unlink()
        (folder / "x.db").symlink_to(private / "x.db")
    else:
        shutil.rmtree(folder)
        folder.symlink_to(private)
    with pytest.raises(SourceRefused):
        stage_sqlite(folder / "x.db", place / "copy")
    assert not (place / "copy").exists()
