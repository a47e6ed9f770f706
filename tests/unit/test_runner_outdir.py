"""The output directory: what is taken, what is refused, and what is left when nothing ran."""

from __future__ import annotations

import os
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


def test_a_write_replaces_the_whole_file_or_nothing(tmp_path: Path) -> None:
    claimed = outdir.claim(tmp_path / "out")
    claimed.write("n.ipynb", b"first")
    # The name of the staged file is taken by a directory: the write fails.
    (claimed.path / ".n.ipynb.partial").mkdir()
    with pytest.raises(OutputRefused, match="cannot be written"):
        claimed.write("n.ipynb", b"second")
    assert (claimed.path / "n.ipynb").read_bytes() == b"first"


def test_the_default_directory_is_named_after_the_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = outdir.default_path("flights", 0.0)
    assert path.parent == Path(os.getcwd())
    assert path.name.startswith("out-flights-19")
