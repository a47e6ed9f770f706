"""The output directory: what is taken, what is refused, and what is left when nothing ran."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
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
    outdir.claim(tmp_path / "out")
    with pytest.raises(OutputRefused, match="not empty"):
        outdir.claim(tmp_path / "out")


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


def test_a_long_name_of_any_script_gives_a_name_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outdir.claim(outdir.default_path("日" * 80, 0.0)).release()
