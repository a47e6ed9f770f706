"""The documents say what the code says: ends, promises, and a mark on every command block."""

from __future__ import annotations

import re
from pathlib import Path

import mdfile
import pytest

from kernel_provisioner.errors import ENDS


def _rows(text: str) -> list[list[str]]:
    rows = [
        [cell.strip() for cell in line.strip().strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return [row for row in rows if not set(row[0]) <= set(":- ")]


def test_the_table_of_ends_is_the_codes(repository: Path) -> None:
    rows = _rows((repository / "docs/ends.md").read_text())
    documented = {row[0]: row[1:] for row in rows[1:] if row[0].startswith("`")}
    expected = {
        f"`{reason.value}`": [end.kind, str(end.exit_status), end.guest, end.text]
        for reason, end in ENDS.items()
    }
    assert documented == expected


TEST_NAME = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_every_promise_names_a_test_that_exists_or_says_not_proven(repository: Path) -> None:
    rows = [r for r in _rows((repository / "docs/promises.md").read_text()) if r[0].isdigit()]
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    for number, _promise, proof in rows:
        tests = TEST_NAME.findall(proof)
        assert tests or "not proven yet" in proof, f"promise {number} names no proof"
        for file, function in tests:
            path = repository / file
            assert path.is_file(), f"promise {number}: {file} is not there"
            if function:
                assert f"def {function}(" in path.read_text(), f"promise {number}: {function}"


@pytest.mark.parametrize("document", mdfile.documents(), ids=lambda path: path.name)
def test_every_command_block_says_whether_it_is_run(document: Path, repository: Path) -> None:
    for block in mdfile.blocks(document.read_text()):
        if block.language not in mdfile.SHELLS:
            continue
        where = f"{document.name}:{block.line}"
        assert re.fullmatch(r"run|run by \.ci/run|not run: .+", block.mark), where
        if block.mark == "run by .ci/run":
            script = (repository / ".ci/run").read_text()
            for command in block.text.split("\n"):
                stated = command.split("#")[0].strip()
                assert f"lane {stated}" in script or not stated, f"{where}: {stated}"
