"""What decides which tests of others run: the pins, the unpacking and the deselect file."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import fetch_suites
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "suites"))

import outside
import routed

DIGEST = "0" * 64


def test_pins_are_names_versions_and_hashes() -> None:
    assert fetch_suites.pins(f"# why\n\none==1.0 --hash=sha256:{DIGEST}\n") == {"one": "1.0"}
    for line in ("one==1.0", "one>=1.0", f"one==1.0 --hash=md5:{DIGEST}", "-e ."):
        with pytest.raises(ValueError, match="is not NAME==VERSION --hash"):
            fetch_suites.pins(line)


def _archive(path: Path, *names: str) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
        link = tarfile.TarInfo("one-1.0/tests/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return path


def test_only_tests_and_their_settings_are_unpacked(tmp_path: Path) -> None:
    names = ("one-1.0/tests/a/test_b.py", "one-1.0/pyproject.toml", "one-1.0/one/code.py")
    fetch_suites.unpack_tests(_archive(tmp_path / "one.tar.gz", *names), tmp_path / "one")
    found = {str(p.relative_to(tmp_path)) for p in (tmp_path / "one").rglob("*") if p.is_file()}
    assert found == {"one/tests/a/test_b.py", "one/pyproject.toml"}


def test_a_name_that_leaves_the_archive_is_refused(tmp_path: Path) -> None:
    archive = _archive(tmp_path / "one.tar.gz", "one-1.0/tests/../../out.py")
    with pytest.raises(ValueError, match="leaves the archive"):
        fetch_suites.unpack_tests(archive, tmp_path / "place/one")
    assert not (tmp_path / "place").exists()


def test_every_deselected_test_names_a_suite_and_a_documented_clause(repository: Path) -> None:
    lines = routed.read(routed.FILE.read_text())
    assert len({(line.suite, line.node) for line in lines}) == len(lines)
    assert {line.suite for line in lines} <= {suite.name for suite in outside.SUITES}
    text = (repository / "docs/compatibility.md").read_text()
    for clause in {line.clause for line in lines}:
        assert f"\n| {clause} | " in text.partition(outside.END)[2], clause


def test_a_line_without_a_clause_is_refused() -> None:
    for line in ("a | b | c", "a | b |  | why", "a | b | Z9 | why", "a | b | D3 | why | more"):
        with pytest.raises(ValueError, match=r"is not `suite \| test \| clause \| reason`"):
            routed.read(line)


def test_a_line_holds_a_test_its_parameters_and_what_is_below() -> None:
    (line,) = routed.read("s | t.py::test_a | D3 | why")
    assert line.holds("t.py::test_a") and line.holds("t.py::test_a[x]")
    assert not line.holds("t.py::test_ab")
    (line,) = routed.read("s | t.py::TestA | D3 | why")
    assert line.holds("t.py::TestA::test_b[x]") and not line.holds("t.py::TestAB::test_b")


@pytest.mark.parametrize(
    ("status", "changed", "problem"),
    [
        (0, {}, ""),
        (1, {"outcomes": {"passed": 1, "failed": 2}}, "2 failed (exit status 1)"),
        (4, {}, "0 failed (exit status 4)"),
        (0, {"elsewhere": 1}, "1 kernels would have started outside a sandbox"),
        (0, {"sessions": []}, "no sandbox was started"),
    ],
)
def test_a_run_is_judged(status: int, changed: dict[str, object], problem: str) -> None:
    facts: dict[str, object] = {
        "outcomes": {"passed": 3},
        "deselected": {"D3": 1},
        "sessions": ["00000000deadbeef"],
        "elsewhere": 0,
        "version": "1.0",
    }
    result = outside.judge(outside.SUITES[0], status, facts | changed, 1.0)
    assert result.problem == problem
    assert outside.judge(outside.SUITES[0], 1, {}, 1.0).problem == "exit status 1 and no report"
