"""Decisions of the server extension that need no server: where exports go, how bytes are served."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kernel_provisioner.artifacts.listing import MAX_SHOWN, judge
from kernel_provisioner.artifacts.tarstream import ExportLimits
from kernel_provisioner.engines.base import Listed
from kernel_provisioner.errors import UsageError
from kernel_provisioner.lab import EVENTS
from kernel_provisioner.lab.directory import destination
from kernel_provisioner.lab.inert import inert

LIMITS = ExportLimits(max_bytes=100)
PHASES_ARE_TOLD_IN = ("opening.py", "supervisor.py")


def entry(name: bytes, kind: bytes = b"0", size: int = 1) -> Listed:
    return Listed(name, kind, size, 0.0)


def test_each_phase_that_a_start_tells_is_documented(repository: Path) -> None:
    session = repository / "kernel_provisioner/session"
    source = "".join(session.joinpath(name).read_text() for name in PHASES_ARE_TOLD_IN)
    told = set(re.findall(r'\._phase\("(\w+)"\)', source))
    assert {"supervisor", "endpoints", "ready"} <= told
    # An event with another phase is not sent.
    known = yaml.safe_load(EVENTS.read_text())["properties"]["phase"]["enum"]
    assert set(known) == told
    schemas = yaml.safe_load(EVENTS.parents[1].joinpath("openapi.yaml").read_text())["components"]
    text = schemas["schemas"]["Status"]["properties"]["phase"]["description"]
    assert [word for word in re.findall(r"\w+", text.partition(":")[2]) if word in told] == known


def test_a_directory_below_the_root(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert destination(tmp_path, {"directory": "a/b"}, hidden=False) == (
        "a/b",
        tmp_path.resolve() / "a" / "b",
    )


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        "x",
        {},
        {"directory": None},
        {"directory": "x", "more": 1},
        *({"directory": name} for name in ("", ".", "..", "/", "/x", "x/", "x//y", "a/../b")),
        *({"directory": name} for name in ("x\0", "x\ny", "\u202ex", "x" * 2000, ".x", "a/.x/y")),
        {"directory": "none/x"},
        {"directory": "file/x"},
        {"directory": "out/x"},
        {"directory": "loop/x"},
    ],
)
def test_what_is_no_directory_below_the_root(tmp_path: Path, body: Any) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_text("")
    (root / "out").symlink_to(tmp_path)
    (root / "loop").symlink_to(root / "loop")
    with pytest.raises(UsageError):
        destination(root, body, hidden=False)


def test_hidden_directories_where_the_server_shows_them(tmp_path: Path) -> None:
    assert destination(tmp_path, {"directory": ".x"}, hidden=True)[0] == ".x"


@pytest.mark.parametrize("name", ["a.parquet", "a.pdf", "a.ipynb", "a", "a.svgz"])
def test_kinds_without_a_preview(name: str) -> None:
    assert inert(name, preview=True) is None


def test_names_cannot_leave_their_header() -> None:
    form = inert('d/a"; filename=evil\r\nX: y.html', preview=False)
    assert form is not None
    assert form.disposition == (
        "attachment; filename*=UTF-8''a%22%3B%20filename%3Devil%0D%0AX%3A%20y.html"
    )
    assert form.content_type == "application/octet-stream"


def test_a_listing_judges_each_entry_by_the_rules_of_an_export() -> None:
    found = judge(
        [
            entry(b"a.csv"),
            entry(b"d", b"5"),
            entry(b"d/b.csv", size=98),
            entry(b"d/c.csv", size=2),
            entry(b"A.csv"),
            entry(b"link.csv", b"2"),
            entry(b"\xff.csv"),
            entry(b"new\nline.csv"),
            entry(b"run.sh"),
        ],
        LIMITS,
    )
    reasons = {str(item["name"]): item["refused"] for item in found.artifacts}
    assert [name for name, reason in reasons.items() if reason is None] == ["a.csv", "d/b.csv"]
    told = [str(reason) for reason in reasons.values() if reason]
    for number, words in enumerate(
        ("over its 100 bytes", "clashes", "symbolic link", "not UTF-8", "control", "suffix")
    ):
        assert words in told[number]
    assert all("nothing was published" not in reason for reason in told)
    assert found.truncated is False


def test_a_bad_directory_is_listed_although_good_ones_are_not() -> None:
    found = judge([entry(b"ok", b"5"), entry(b"new\nline", b"5")], LIMITS)
    assert [item["name"] for item in found.artifacts] == ["'new\\nline'"]


def test_a_listing_is_bounded() -> None:
    found = judge([entry(b"%d.csv" % n, size=0) for n in range(MAX_SHOWN + 1)], LIMITS)
    assert len(found.artifacts) == MAX_SHOWN
    assert found.truncated is True
    assert "one file too many" in str(found.artifacts[256]["refused"])
