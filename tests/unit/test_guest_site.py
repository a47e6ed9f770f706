"""The in-guest helper and the offline pip, as far as the standard library carries them.

What needs the data libraries runs where they are: in a sandbox, in tests/jupyter/test_notebooks.py.
"""

from __future__ import annotations

import csv
import datetime as dt
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SITE = ROOT / "guest" / "site"
NOTEBOOKS = ROOT / "notebooks"


@pytest.fixture(scope="module")
def backintel() -> Iterator[ModuleType]:
    """The helper, imported as the guest does; ``guest/site`` leaves the path again."""
    sys.path.insert(0, str(SITE))
    try:
        yield importlib.import_module("backintel")
    finally:
        sys.path.remove(str(SITE))
        for name in [name for name in sys.modules if name.split(".")[0] == "backintel"]:
            del sys.modules[name]


@pytest.fixture
def artifacts(backintel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that stands for ``/artifacts``."""
    place = tmp_path / "artifacts"
    place.mkdir()
    monkeypatch.setattr(sys.modules["backintel._facts"], "ARTIFACTS", place)
    return place


@pytest.mark.parametrize(
    ("obj", "name", "content"),
    [
        ({"a": [1, None], "t": dt.date(2013, 1, 2)}, "a.json", '"t": "2013-01-02"'),
        ([{"a": 1}, {"a": "é"}], "a.jsonl", '{"a": 1}\n{"a": "é"}\n'),
        ([1, 2], "a.json", "[\n  1,\n  2\n]\n"),
        ("# Title\n", "a..b.md", "# Title\n"),
        (b"%PDF-1.7", "a.pdf", "%PDF-1.7"),
        (memoryview(b"x"), "a.sqlite", "x"),
    ],
)
def test_save_writes_the_object(
    backintel: ModuleType, artifacts: Path, obj: object, name: str, content: str
) -> None:
    assert backintel.save(obj, name) == artifacts / name
    assert content in (artifacts / name).read_text()
    assert [path.name for path in artifacts.iterdir()] == [name]


@pytest.mark.parametrize("name", ["a.exe", "a", "a.JSON", ".json", "json", "a.json.gz", ""])
def test_a_wrong_suffix_names_the_allowed_ones(
    backintel: ModuleType, artifacts: Path, name: str
) -> None:
    with pytest.raises(backintel.ArtifactError, match=r"csv tsv json .* sqlite duckdb"):
        backintel.save({}, name)
    assert list(artifacts.iterdir()) == []


@pytest.mark.parametrize("name", ["../a.json", "/a.json", "x/a.json", ".a.json", "a\n.json"])
def test_only_plain_file_names(backintel: ModuleType, artifacts: Path, name: str) -> None:
    with pytest.raises(backintel.ArtifactError, match="plain file name"):
        backintel.save({}, name)
    assert list(artifacts.parent.iterdir()) == [artifacts]


def test_an_overlong_name(backintel: ModuleType, artifacts: Path) -> None:
    with pytest.raises(backintel.ArtifactError, match="255 bytes"):
        backintel.save({}, "é" * 126 + ".json")


@pytest.mark.parametrize(
    ("first", "second"),
    [("Report.txt", "report.txt"), ("caf\u00e9.txt", "cafe\u0301.txt"), ("ß.txt", "SS.txt")],
)
def test_names_that_the_export_would_refuse_together(
    backintel: ModuleType, artifacts: Path, first: str, second: str
) -> None:
    backintel.save("one", first)
    with pytest.raises(backintel.ArtifactError, match=re.escape(repr(first))):
        backintel.save("two", second)
    assert [path.read_text() for path in artifacts.iterdir()] == ["one"]


def test_the_257th_artifact_is_refused_but_an_old_one_may_be_replaced(
    backintel: ModuleType, artifacts: Path
) -> None:
    for number in range(256):
        backintel.save("x", f"{number}.txt")
    with pytest.raises(backintel.ArtifactError, match="already 256 artifacts"):
        backintel.save("x", "one-more.txt")
    backintel.save("y", "0.txt")
    assert (artifacts / "0.txt").read_text() == "y"


@pytest.mark.parametrize(
    ("obj", "name", "message"),
    [
        ({"x": float("nan")}, "a.json", "NaN and infinity do not exist in JSON"),
        ({"x": object()}, "a.json", "type object has no JSON form"),
        ({}, "a.csv", "a dict is not saved as .csv; use one of: json"),
        ([], "a.png", "use one of: json jsonl"),
        ("text", "a.parquet", "a str is not saved as .parquet"),
        (42, "a.json", "objects of type int are not saved"),
    ],
)
def test_what_has_no_form_is_refused_and_the_old_artifact_stays(
    backintel: ModuleType, artifacts: Path, obj: object, name: str, message: str
) -> None:
    (artifacts / name).write_text("old")
    with pytest.raises(backintel.ArtifactError, match=re.escape(message)):
        backintel.save(obj, name)
    assert (artifacts / name).read_text() == "old"


def test_a_link_is_replaced_and_not_followed(
    backintel: ModuleType, artifacts: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target.txt"
    target.write_text("untouched")
    (artifacts / "a.txt").symlink_to(target)
    backintel.save("new", "a.txt")
    assert target.read_text() == "untouched"
    assert not (artifacts / "a.txt").is_symlink()
    assert (artifacts / "a.txt").read_text() == "new"


def test_limits_outside_a_sandbox_say_so(
    backintel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BACKINTEL_MEMORY_BYTES", raising=False)
    with pytest.raises(RuntimeError, match="not a BackIntel sandbox"):
        backintel.limits()


def test_importing_the_helper_imports_no_data_library() -> None:
    code = "import sys, backintel; print(*(m for m in sys.modules if '.' not in m))"
    loaded = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(SITE), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert set(loaded) - set(sys.stdlib_module_names) <= {"__main__", "backintel", "sitecustomize"}


def test_duckdb_gets_half_of_the_memory_and_a_private_directory(backintel: ModuleType) -> None:
    duck = importlib.import_module("backintel._duckdb")
    environ = {
        "BACKINTEL_MEMORY_BYTES": str(2 * 1024**3),
        "BACKINTEL_CPUS": "2",
        "BACKINTEL_DUCKDB_TEMP": "/tmp/private/duckdb",
    }
    assert duck.defaults(environ) == {
        "memory_limit": "1048576KiB",
        "threads": 2,
        "temp_directory": "/tmp/private/duckdb",
    }
    for name in environ:
        assert duck.defaults({key: environ[key] for key in environ if key != name}) == {}


def pip(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-IB", str(ROOT / "guest/bin/pip"), *words],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=cwd,
        check=False,
    )


def test_pip_install_fails_at_once_naming_policy_and_package() -> None:
    seconds: list[float] = []
    # The least of several: a busy machine adds to each, but a network that is waited for would too.
    while len(seconds) < 3 or (min(seconds) >= 1 and len(seconds) < 12):
        start = time.monotonic()
        done = pip("install", "--index-url", "https://example.invalid", "seaborn")
        seconds.append(time.monotonic() - start)
    assert done.returncode == 1
    assert "seaborn: not in the image. Use matplotlib." in done.stderr
    assert "nothing is installed or downloaded while an analysis runs" in done.stderr
    assert "pip list" in done.stderr
    assert "example.invalid" not in done.stderr
    assert min(seconds) < 1


def test_pip_install_succeeds_for_what_is_there() -> None:
    done = pip("install", "-q", "-U", "packaging>=20", "nbformat; python_version < '3'")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Requirement already satisfied: packaging>=20" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["install", "packaging<1"], "asked for was <1"),
        (["install", "git+https://example.invalid/x.git"], "only packages that are in the image"),
        (["install", "x @ https://example.invalid/x.whl"], "cannot be fetched"),
        (["install", "-e", "."], "only packages that are in the image"),
        (["install"], "was given no requirement"),
        (["install", "-r", "absent.txt"], "absent.txt (FileNotFoundError)"),
        (["download", "packaging"], "`pip download` is not available"),
        (["uninstall", "-y", "packaging"], "`pip uninstall` is not available"),
        (["show", "no-such-package"], "no-such-package: not in the image"),
    ],
)
def test_pip_refusals(words: list[str], message: str, tmp_path: Path) -> None:
    done = pip(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert "BackIntel sandbox policy" in done.stderr


def test_pip_reads_requirement_files(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("# ours\npackaging  # any\n-i x\nnot-there-1==2\n")
    done = pip("install", "-r", "requirements.txt", cwd=tmp_path)
    assert done.returncode == 1
    assert "already satisfied: packaging" in done.stdout
    assert "not-there-1: not in the image." in done.stderr


def test_pip_lists_what_is_there() -> None:
    assert re.search(r"^packaging +\d", pip("list").stdout, re.M)
    assert re.search(r"^packaging==\d", pip("freeze").stdout, re.M)
    assert "Name: packaging" in pip("show", "packaging").stdout
    assert "offline" in pip("--version").stdout


def test_pip_is_executable_under_both_names() -> None:
    for name in ("pip", "pip3"):
        path = ROOT / "guest/bin" / name
        assert os.access(path, os.X_OK)
        assert path.read_text().startswith("#!/usr/bin/python3 -IB\n")


def test_the_docs_of_the_guest_state_the_suffixes_that_are_allowed(backintel: ModuleType) -> None:
    text = (ROOT / "guest/docs/artifacts.md").read_text()
    assert f"suffixes {' '.join(backintel.SUFFIXES)};" in text


@pytest.mark.parametrize("name", ["flights", "energy"])
def test_notebooks_are_committed_clean(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "backintel-sandbox"
    assert notebook.metadata.backintel.requires
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)
            compile(cell.source, f"{name}:{cell.id}", "exec")


def test_the_energy_fixture_is_what_its_script_writes(tmp_path: Path) -> None:
    target = tmp_path / "readings.csv"
    subprocess.run(
        [sys.executable, str(NOTEBOOKS / "data/make_energy.py"), str(target)], check=True
    )
    assert target.read_bytes() == (NOTEBOOKS / "data/energy/readings.csv").read_bytes()


def test_the_energy_fixture_has_the_stated_answers() -> None:
    with (NOTEBOOKS / "data/energy/readings.csv").open(newline="") as file:
        lines = [row for row in csv.DictReader(file) if row["power_w"]]
    readings = sorted({(dt.datetime.fromisoformat(r["time"]), int(r["power_w"])) for r in lines})
    start = dt.datetime(2024, 2, 9, 15, tzinfo=dt.UTC)
    energy = Fraction(0)
    gaps = []
    for (a, p), (b, q) in itertools.pairwise(readings):
        seconds = int((b - a).total_seconds())
        gaps.append(seconds)
        if seconds <= 900:
            energy += Fraction(p + q, 2) * seconds
    observed = {(time - start) // dt.timedelta(minutes=5) for time, _ in readings}
    assert energy / 3_600_000 == Fraction(523, 240)
    assert f"{float(energy / 3_600_000):.10f}" == "2.1791666667"
    assert (len(observed), min(observed) >= 0, max(observed) < 540) == (127, True, True)
    assert f"{100 * len(observed) / 540:.7f}" == "23.5185185"
    assert {900, 910} <= set(gaps)  # the longest gap that is bridged, the shortest that is not
    assert len(readings) < len(lines)  # a line that was sent twice


def test_the_required_artifacts_of_the_notebooks_are_documented() -> None:
    text = (NOTEBOOKS / "README.md").read_text()
    for name in ("flights", "energy"):
        notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
        for item in notebook["metadata"]["backintel"]["requires"]:
            assert f"`{item if isinstance(item, str) else item['artifact']}`" in text
