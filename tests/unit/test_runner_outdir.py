"""The output directory: what is taken, what is refused, and what is left when nothing ran."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

import pytest

from kernel_provisioner import outdir
from kernel_provisioner.errors import OutputRefused


def test_an_absent_directory_is_made_and_removed_again_if_it_stays_empty(tmp_path: Path) -> None:
    claimed = outdir.claim(tmp_path / "a" / "out")
    assert claimed.path.is_dir()
    claimed.release()
    assert not claimed.path.exists()


def test_an_empty_directory_is_taken_and_kept(tmp_path: Path) -> None:
    claimed = outdir.claim(tmp_path)
    claimed.release()
    assert list(tmp_path.iterdir()) == []


def test_written_files_stay(tmp_path: Path) -> None:
    claimed = outdir.claim(tmp_path / "out")
    claimed.write("n.ipynb", b"1")
    claimed.release()
    assert [path.name for path in claimed.path.iterdir()] == ["n.ipynb"]


def test_a_directory_that_is_not_empty_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(OutputRefused, match=r"is not empty.*Remedy"):
        outdir.claim(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(OutputRefused, match="is not a directory"):
        outdir.claim(tmp_path / "out")


def test_a_parent_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputRefused, match="is not a directory"):
        outdir.claim(tmp_path / "file" / "out")


def test_a_directory_that_cannot_be_written_is_refused() -> None:
    # Not even root writes here.
    with pytest.raises(OutputRefused, match="cannot be written"):
        outdir.claim(Path("/proc/self/out"))


def test_two_runs_cannot_share_a_directory(tmp_path: Path) -> None:
    first = outdir.claim(tmp_path / "out")
    first.write("n.ipynb", b"1")
    with pytest.raises(OutputRefused, match=r"another run uses '.*/out'\. Remedy: .* wait until"):
        outdir.claim(first.path)
    outdir.remove_abandoned(first.path)
    assert {path.name for path in first.path.iterdir()} == {".backintel-run", "n.ipynb"}
    first.release()
    assert [path.name for path in first.path.iterdir()] == ["n.ipynb"]


CLAIM = """
import os, subprocess, sys
from pathlib import Path
from kernel_provisioner import outdir
out = outdir.claim(Path(sys.argv[1]))
out.path.joinpath(".unchecked/artifacts").mkdir(parents=True)
out.path.joinpath(".backintel-0123456789abcdef.partial").touch()
for name in sys.argv[2:]:
    out.path.joinpath(name).touch()
# A child of the run outlives it, and keeps no lock.
child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
sys.stdin.read()
"""


@contextmanager
def _killed_run(out: Path, *names: str) -> Iterator[None]:
    """Leave ``out`` as a run does that was killed while a child of it goes on."""
    command = [sys.executable, "-c", CLAIM, str(out), *names]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        child = os.pidfd_open(int(run.stdout.readline()))
        try:
            with pytest.raises(OutputRefused, match="another run uses"):
                outdir.claim(out)
            run.kill()
            run.wait()
            yield
        finally:
            signal.pidfd_send_signal(child, signal.SIGKILL)
            os.close(child)


@pytest.mark.parametrize("made", [True, False])
def test_the_directory_of_a_killed_run_is_taken_over(tmp_path: Path, made: bool) -> None:
    out = tmp_path / "out"
    if not made:
        out.mkdir()
    with _killed_run(out):
        claimed = outdir.claim(out)
        assert [path.name for path in out.iterdir()] == [".backintel-run"]
        with pytest.raises(OutputRefused, match="another run uses"):
            outdir.claim(out)
        claimed.release()
    assert out.exists() is not made


@pytest.mark.parametrize("made", [True, False])
def test_what_a_killed_run_left_can_be_removed(tmp_path: Path, made: bool) -> None:
    out = tmp_path / "out"
    if not made:
        out.mkdir()
    with _killed_run(out):
        assert outdir.remove_abandoned(out) == []
        assert out.exists() is not made
        assert made or list(out.iterdir()) == []
        assert outdir.remove_abandoned(out) == []


def test_results_of_a_killed_run_are_kept_and_not_mixed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with _killed_run(out, "n.ipynb"):
        with pytest.raises(OutputRefused, match=r"is not empty \(it has 'n\.ipynb'\)"):
            outdir.claim(out)
        assert [path.name for path in out.iterdir()] == ["n.ipynb"]
    with _killed_run(tmp_path / "other", "n.ipynb"):
        assert outdir.remove_abandoned(tmp_path / "other") == []
        assert [path.name for path in (tmp_path / "other").iterdir()] == ["n.ipynb"]


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "socket", "text"])
def test_what_only_has_the_name_of_a_claim_is_refused_and_left_alone(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "out" / ".backintel-run"
    path.parent.mkdir()
    (tmp_path / "target").touch()
    match kind:
        case "link":
            path.symlink_to(tmp_path / "target")
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "socket":
            os.mknod(path, stat.S_IFSOCK | 0o600)
        case _:
            path.write_text("mine")
    before = path.lstat()
    with pytest.raises(OutputRefused, match=r"is not empty \(it has '\.backintel-run'\)"):
        outdir.claim(path.parent)
    assert outdir.remove_abandoned(path.parent) == []
    assert os.path.samestat(path.lstat(), before)


def test_what_only_has_the_name_of_a_dead_runs_work_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with _killed_run(out):
        shutil.rmtree(out / ".unchecked")
        (out / ".unchecked").symlink_to(tmp_path)
        with pytest.raises(OutputRefused, match=r"is not empty \(it has '\.unchecked'\)"):
            outdir.claim(out)
        assert outdir.remove_abandoned(out) == []
        assert [path.name for path in out.iterdir()] == [".unchecked"]


def test_a_run_leaves_alone_what_took_the_place_of_its_directory(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = outdir.claim(out)
    shutil.rmtree(out)
    second = outdir.claim(out)
    (out / ".unchecked").mkdir()
    with pytest.raises(OutputRefused, match="another run uses it"):
        first.write("n.ipynb", b"first")
    first.discard_staged()
    first.release()
    assert sorted(path.name for path in out.iterdir()) == [".backintel-run", ".unchecked"]
    with pytest.raises(OutputRefused, match="another run uses"):
        outdir.claim(out)
    second.discard_staged()
    second.release()
    assert not out.exists()


def test_a_claim_file_that_somebody_removed_costs_no_results(tmp_path: Path) -> None:
    claimed = outdir.claim(tmp_path / "out")
    (tmp_path / "out/.backintel-run").unlink()
    claimed.write("n.ipynb", b"saved")
    claimed.release()
    assert (tmp_path / "out/n.ipynb").read_bytes() == b"saved"


def test_a_claim_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with _files_end_at(0), pytest.raises(OutputRefused, match="space is free") as refused:
        outdir.claim(tmp_path / "out")
    assert "cannot be written" in refused.value.message
    assert list(tmp_path.iterdir()) == []


def test_a_claim_is_its_owners_alone(tmp_path: Path) -> None:
    """Whoever could open it could lock it."""
    before = os.umask(0)
    try:
        claimed = outdir.claim(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / ".backintel-run").stat().st_mode) == 0o600
    claimed.release()


def test_of_many_runs_at_once_one_gets_the_directory(tmp_path: Path) -> None:
    """Threads hold locks apart as processes do: the lock is the open file's."""
    for round_ in range(50):
        out = tmp_path / str(round_ % 2)
        gate = threading.Barrier(4)

        def attempt(out: Path = out, gate: threading.Barrier = gate) -> outdir.OutDir:
            gate.wait()
            return outdir.claim(out)

        with ThreadPoolExecutor(4) as pool:
            got = [pool.submit(attempt) for _ in range(4)]
        refused = [str(error) for future in got if (error := future.exception())]
        assert len(refused) == 3 and all("another run uses" in text for text in refused)
        (winner,) = [future.result() for future in got if not future.exception()]
        winner.release()
        assert not out.exists() or list(out.iterdir()) == []


@contextmanager
def _files_end_at(size: int) -> Iterator[None]:
    """Let the kernel refuse every byte beyond ``size``, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_replaces_the_whole_file_or_nothing(tmp_path: Path) -> None:
    claimed = outdir.claim(tmp_path / "out")
    claimed.write("n.ipynb", b"first")
    with (
        _files_end_at(4),
        pytest.raises(OutputRefused, match=r"n\.ipynb' cannot be written \(File too large\).*free"),
    ):
        claimed.write("n.ipynb", b"second")
    claimed.release()
    assert [path.name for path in claimed.path.iterdir()] == ["n.ipynb"]
    assert (claimed.path / "n.ipynb").read_bytes() == b"first"


def test_the_longest_name_that_the_file_system_takes_can_be_written(tmp_path: Path) -> None:
    claimed = outdir.claim(tmp_path / "out")
    longest = "x" * os.pathconf(tmp_path, "PC_NAME_MAX")
    claimed.require_room_for(longest)
    claimed.write(longest, b"1")
    with pytest.raises(OutputRefused, match=r"\(File name too long\).*shorter name"):
        claimed.require_room_for(longest + "x")


def test_the_default_directory_is_named_after_the_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = outdir.default_path("flights", 0.0)
    assert path.parent == Path(os.getcwd())
    assert path.name.startswith("out-flights-19")


def test_a_checkout_stays_clean_of_runs_that_name_no_directory() -> None:
    root = Path(__file__).parents[2]
    made = outdir.default_path("flights", 0.0).name
    ignored = (root / ".gitignore").read_text().splitlines()
    assert any(fnmatch(f"/{made}/", line) for line in ignored)


def test_a_long_name_of_any_script_gives_a_name_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outdir.claim(outdir.default_path("日" * 80, 0.0)).release()
