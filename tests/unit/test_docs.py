"""The documents say what the code says: ends, promises, and a mark on every command block."""

from __future__ import annotations

import argparse
import ast
import re
from pathlib import Path

import mdfile
import pytest

from kernel_provisioner.cli.main import build_parser
from kernel_provisioner.config import resolve_settings
from kernel_provisioner.errors import ENDS
from kernel_provisioner.profiles import BUILTIN, MIB, HostCapacity


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
        f"`{reason.value}`": [
            end.kind,
            str(end.exit_status),
            end.guest,
            "yes" if end.again else "no",
            end.text,
        ]
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


CASE_SOURCE = re.compile(
    r"2i2c infrastructure#\d+|[\w-]+#\d+|/dev/kvm|SQLite WAL on virtiofs|offline pip install"
)


def _docstring(path: Path, function: str) -> str:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return " ".join((ast.get_docstring(node) or "").split())
    pytest.fail(f"{path} has no {function}")


def test_each_case_has_a_test_that_cites_it_or_says_not_proven(repository: Path) -> None:
    text = (repository / "docs/promises.md").read_text()
    rows = [row for row in _rows(text) if row[0].startswith("case ")]
    assert [row[0] for row in rows] == [f"case {number}" for number in range(1, 49)]
    for case, reported, here, proof in rows:
        sources = CASE_SOURCE.findall(reported)
        assert sources, f"{case} names no source"
        cited = ""
        tests = TEST_NAME.findall(proof)
        for file, function in tests:
            found = _docstring(repository / file, function)
            # What is proven for a microVM alone is a row's addition.
            if not file.startswith("tests/live_smolvm/"):
                assert any(source in found for source in sources), f"{case}: {file}::{function}"
            cited += found
        missing = [source for source in sources if source not in cited]
        assert not missing or "not proven yet" in here, f"{case}: {missing}"


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


def test_the_table_of_profiles_is_the_codes(repository: Path) -> None:
    def deadline(seconds: float) -> str:
        return f"{seconds:g}"

    expected = {}
    for profile in BUILTIN.values():
        gib, mib = profile.ram_bytes / 2**30, profile.ram_bytes // MIB
        both = (deadline(profile.cell_deadline_s), deadline(profile.run_deadline_s))
        expected[profile.name] = [
            f"{gib:g} GiB" if gib >= 1 else f"{mib} MiB",
            str(profile.cpus),
            " / ".join(
                str(size // MIB)
                for size in (profile.workspace_bytes, profile.artifacts_bytes, profile.temp_bytes)
            ),
            f"{both[0]} for both" if both[0] == both[1] else " / ".join(both),
            str(profile.cells or "none"),
            profile.on_cell_deadline,
            profile.after_end,
        ]
    text = (repository / "docs/configuration.md").read_text()
    section = text.partition("## Profiles")[2].partition("\n## ")[0]
    documented = {row[0].split("`")[1]: row[1:] for row in _rows(section)[1:]}
    assert documented == expected


def test_the_configuration_example_is_accepted(repository: Path, tmp_path: Path) -> None:
    text = (repository / "docs/configuration.md").read_text()
    (example,) = (block.text for block in mdfile.blocks(text) if block.language == "toml")
    (tmp_path / "flights").mkdir()
    file = tmp_path / "backintel.toml"
    file.write_text(example.replace("/srv/data", str(tmp_path)))
    file.chmod(0o600)
    settings = resolve_settings(
        command_line={},
        environ={},
        kernelspec={},
        files=[file],
        default_profile="interactive",
        host=HostCapacity(cpus=8, ram_bytes=32 * 2**30),
    )
    assert settings.profile.name == "nightly"
    assert [source.name for source in settings.sources] == ["flights"]
    assert [(e.name, e.host, e.port) for e in settings.endpoints] == [
        ("sales", "db.example.org", 5432)
    ]


def test_every_command_and_option_is_documented(repository: Path) -> None:
    text = (repository / "docs/cli.md").read_text()

    def visit(parser: argparse.ArgumentParser) -> None:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for child in action.choices.values():
                    assert child.prog in text or child._subparsers, child.prog
                    visit(child)
            for option in action.option_strings:
                assert option in text or option in ("-h", "--help", "--version"), option

    visit(build_parser())
