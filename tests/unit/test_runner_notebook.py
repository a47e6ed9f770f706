"""Notebooks before a run: what is read and refused, parameters, requirements."""

from __future__ import annotations

import ast
import json
import math
import os
from pathlib import Path
from typing import Any

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from kernel_provisioner import executed
from kernel_provisioner import notebook as notebooks
from kernel_provisioner.errors import UsageError


def _bytes(*cells: Any, **metadata: Any) -> bytes:
    return nbformat.writes(new_notebook(cells=list(cells), metadata=metadata)).encode()


def _parsed(*cells: Any, **metadata: Any) -> Any:
    return notebooks.parse(_bytes(*cells, **metadata), "n.ipynb")


def test_a_missing_notebook_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.ipynb' does not exist.*Remedy"):
        notebooks.read_bytes(tmp_path / "absent.ipynb")


def test_a_directory_is_no_notebook(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory, not a notebook"):
        notebooks.read_bytes(tmp_path)


def test_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "n.ipynb")
    with pytest.raises(UsageError, match="not a regular file"):
        notebooks.read_bytes(tmp_path / "n.ipynb")


def test_a_notebook_over_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "n.ipynb"
    with path.open("wb") as file:
        file.truncate(notebooks.MAX_NOTEBOOK_BYTES + 1)
    with pytest.raises(UsageError, match="over the limit of 64 MiB"):
        notebooks.read_bytes(path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b"[]", "no nbformat number"),
        (b'{"cells": []}', "no nbformat number"),
        (b'{"nbformat": 2, "nbformat_minor": 0}', "this version reads 3 and 4"),
        (b'{"nbformat": 5, "nbformat_minor": 0}', "this version reads 3 and 4"),
        (
            b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}}',
            r"is not a valid notebook: it has no 'cells' where one belongs\. Remedy: ",
        ),
        (
            b'{"nbformat": 4, "nbformat_minor": 5, "cells": []}',
            r"is not a valid notebook: it has no 'metadata' where one belongs\. Remedy: ",
        ),
        (
            b'{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{"cell_type": "x"}]}',
            "not a valid notebook",
        ),
        (b'{"nbformat": 4, "nbformat_minor": 5, "metadata": 1, "cells": 2}', "not a valid"),
    ],
)
def test_what_is_not_a_notebook_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as refused:
        notebooks.parse(data, "n.ipynb")
    assert refused.value.message.endswith(".")
    assert refused.value.remedy


def test_text_that_no_kernel_could_be_sent_is_refused() -> None:
    data = _bytes(new_code_cell("x = 'HERE'")).replace(b"HERE", b"\\ud800")
    with pytest.raises(UsageError, match="cannot be saved again"):
        notebooks.parse(data, "n.ipynb")


@pytest.mark.parametrize("depth", [100, 400, 900])
def test_nesting_is_refused_before_the_run_or_can_be_saved_after_it(depth: int) -> None:
    data = _bytes(new_code_cell("1"), x="HERE").replace(b'"HERE"', b"[" * depth + b"]" * depth)
    try:
        parsed = notebooks.parse(data, "n.ipynb")
    except UsageError:
        assert depth > 100
    else:
        assert json.loads(executed.serialize(parsed))["metadata"]["x"] is not None


@pytest.mark.parametrize(
    "metadata",
    [
        {"language_info": {"name": "R"}},
        {"kernelspec": {"name": "ir", "display_name": "R", "language": "R"}},
    ],
)
def test_a_notebook_of_another_language_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="of the language 'R'; the sandbox runs Python"):
        _parsed(**metadata)


def test_the_name_of_the_notebooks_own_kernel_does_not_matter() -> None:
    spec = {"name": "conda-env-x", "display_name": "my env", "language": "python"}
    assert _parsed(kernelspec=spec).metadata.kernelspec.name == "conda-env-x"


def test_outputs_of_an_earlier_run_are_dropped() -> None:
    old = new_code_cell("1", outputs=[new_output("stream", text="old")], execution_count=7)
    (cell,) = _parsed(old, widgets={"application/x": {}}).cells
    assert cell.outputs == []
    assert cell.execution_count is None


def test_a_notebook_of_format_3_is_converted() -> None:
    cell = {"cell_type": "code", "input": "1", "language": "python", "outputs": [], "metadata": {}}
    data = {
        "nbformat": 3,
        "nbformat_minor": 0,
        "metadata": {"name": ""},
        "worksheets": [{"cells": [cell], "metadata": {}}],
    }
    parsed = notebooks.parse(json.dumps(data).encode(), "n.ipynb")
    assert (parsed.nbformat, parsed.cells[0].source) == (4, "1")


def test_empty_cells_and_text_are_not_code() -> None:
    parsed = _parsed(new_markdown_cell("# x"), new_code_cell("  \n"), new_code_cell("1"))
    assert notebooks.code_cells(parsed) == [2]


def test_parameters_are_json_or_text() -> None:
    words = ["a=1", "b=x y", "c=[1, true]", 'd="2"', "e=", "f=NaN", "g=k=v", "h=null"]
    assert notebooks.parse_parameters(words) == {
        "a": 1,
        "b": "x y",
        "c": [1, True],
        "d": "2",
        "e": "",
        "f": "NaN",
        "g": "k=v",
        "h": None,
    }


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("a", "no '='"),
        ("=1", "not a name"),
        ("a-b=1", "not a name"),
        ("1a=1", "not a name"),
        ("import=1", "not a name"),
        ("a.b=1", "not a name"),
        ("a\nb=1", "not a name"),
        ("a=" + "[" * 100_000, "nested too deeply"),
        ("a=\udcff", "not UTF-8"),
    ],
)
def test_bad_parameters_are_refused(word: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        notebooks.parse_parameters([word])


def test_a_parameter_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="a is given twice"):
        notebooks.parse_parameters(["a=1", "a=2"])


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(_JSON)
def test_a_literal_evaluates_to_its_value(value: object) -> None:
    assert eval(notebooks.literal(value), {"float": float}) == value  # noqa: S307


def test_an_overflowing_number_stays_a_number() -> None:
    (value,) = notebooks.parse_parameters(["a=-1e999"]).values()
    assert notebooks.literal(value) == 'float("-inf")'
    assert value == -math.inf


def test_the_injected_cell_follows_the_parameters_cell() -> None:
    tagged = new_code_cell("a = 0", metadata={"tags": ["parameters"]})
    parsed = _parsed(new_markdown_cell("t"), tagged, new_code_cell("print(a)"))
    notebooks.inject(parsed, {"a": "x'\n", "b": [True, None]})
    injected = parsed.cells[2]
    assert injected.metadata.tags == ["injected-parameters"]
    assigned = {
        line.targets[0].id: ast.literal_eval(line.value)  # type: ignore[attr-defined]
        for line in ast.parse(injected.source).body
    }
    assert assigned == {"a": "x'\n", "b": [True, None]}
    nbformat.validate(parsed)


def test_without_a_parameters_cell_the_injected_one_comes_first() -> None:
    parsed = _parsed(new_code_cell("1"))
    notebooks.inject(parsed, {"a": 1})
    assert [cell.source for cell in parsed.cells] == ["# Parameters\na = 1", "1"]


def test_an_earlier_injected_cell_is_replaced() -> None:
    old = new_code_cell("a = 5", metadata={"tags": ["injected-parameters"]})
    parsed = _parsed(new_code_cell("0"), old, new_code_cell("1"))
    notebooks.inject(parsed, {"a": 1})
    assert [cell.source for cell in parsed.cells] == ["0", "# Parameters\na = 1", "1"]


def test_a_notebook_without_cell_ids_stays_valid_when_a_cell_is_injected() -> None:
    data = {"nbformat": 4, "nbformat_minor": 4, "metadata": {}, "cells": []}
    parsed = notebooks.parse(json.dumps(data).encode(), "n.ipynb")
    notebooks.inject(parsed, {"a": 1})
    nbformat.validate(parsed)


def test_requirements_are_names_with_or_without_a_schema() -> None:
    stated = ["a/plot.png", {"artifact": "t.json", "schema": {"type": "object"}}]
    assert notebooks.requirements({"backintel": {"requires": stated}}) == (
        notebooks.Requirement("a/plot.png"),
        notebooks.Requirement("t.json", {"type": "object"}),
    )
    assert notebooks.requirements({}) == ()


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        ("a.png", "must be a list"),
        (["a"] * 257, "must be a list"),
        (["a" * 256], "not the relative name"),
        (["d/" + "ü" * 128], "not the relative name"),
        ([1], "neither a name nor an object"),
        (["../a"], "not the relative name"),
        (["/etc/passwd"], "not the relative name"),
        (["a//b"], "not the relative name"),
        (["a\n"], "not the relative name"),
        ([""], "not the relative name"),
        (["a", "a"], "named twice"),
        ([{"artifact": "a", "schema": 1}], "not a JSON schema"),
        ([{"artifact": "a", "sha256": ""}], "unknown key 'sha256'"),
        ([{"schema": {}}], "not the relative name"),
    ],
)
def test_bad_requirements_are_refused(stated: object, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        notebooks.requirements({"backintel": {"requires": stated}})
