"""Executed notebooks: always valid files, and one bad output costs nothing else."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nbformat.v4 import new_code_cell, new_notebook, new_output

from kernel_provisioner import executed


def _strict(data: bytes) -> Any:
    """Parse as a reader does that knows JSON and nothing else."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)

    content = json.loads(data, parse_constant=refuse)
    nbformat.validate(nbformat.from_dict(content))
    return content


def _notebook(cell: Any) -> Any:
    # Set afterwards: nbformat's own constructors refuse what the guest may send.
    notebook = new_notebook(cells=[new_code_cell("1")])
    notebook.cells[0].update(cell)
    return notebook


def _saved(*outputs: Any) -> list[Any]:
    first, last = new_output("stream", text="first"), new_output("stream", text="last")
    content = _strict(executed.serialize(_notebook({"outputs": [first, *outputs, last]})))
    found: list[Any] = content["cells"][0]["outputs"]
    assert (found[0]["text"], found[-1]["text"]) == (["first"], ["last"])
    return found[1:-1]


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "output",
    [
        {"output_type": "display_data", "data": {}, "metadata": {"x": float("nan")}},
        {"output_type": "display_data", "data": {"a/b+json": float("inf")}, "metadata": {}},
        {"output_type": "display_data", "data": {}, "metadata": {"x": _nested(600)}},
        {"output_type": "display_data", "data": [1], "metadata": 7},
        {"output_type": "stream", "name": 1, "text": {}},
        {"output_type": "error", "ename": {}, "evalue": 1, "traceback": None},
        {"output_type": "nonsense"},
        {},
    ],
)
def test_an_output_that_cannot_be_kept_is_replaced_by_a_note(output: dict[str, Any]) -> None:
    (note,) = _saved(nbformat.NotebookNode(output))
    assert (note["output_type"], note["name"]) == ("stream", "stderr")
    assert "was left out" in note["text"][0]


def test_half_of_a_character_is_kept_as_json_writes_it() -> None:
    (output,) = _saved(new_output("stream", text="\ud800"))
    assert output["text"] == ["\ud800"]


@pytest.mark.parametrize("count", ["x", -1, 1.5, True, {}, float("nan")])
def test_an_execution_count_that_is_none_is_dropped(count: Any) -> None:
    (saved,) = _strict(executed.serialize(_notebook({"execution_count": count})))["cells"]
    assert saved["execution_count"] is None


def test_what_the_kernel_says_of_its_language_is_kept_only_if_it_can_be() -> None:
    notebook = new_notebook(metadata={"title": "t"})
    notebook.metadata["language_info"] = {"name": "python", "x": float("nan")}
    assert _strict(executed.serialize(notebook))["metadata"] == {"title": "t"}


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
_KINDS = st.sampled_from(["stream", "display_data", "execute_result", "error"])
_FIELDS = ("output_type", "name", "text", "data", "metadata", "execution_count", "ename", "evalue")


# No deadline: the schema is loaded once, and machines are busy.
@settings(deadline=None)
@given(_KINDS, st.dictionaries(st.sampled_from(_FIELDS), _VALUES), _VALUES)
def test_whatever_comes_the_file_is_valid(kind: str, output: dict[str, Any], count: Any) -> None:
    outputs = [nbformat.from_dict({"output_type": kind} | output)]
    _strict(executed.serialize(_notebook({"outputs": outputs, "execution_count": count})))


def test_an_error_is_shown_once() -> None:
    cell = new_code_cell("1")
    executed.show_error(cell, "GuestLost", "gone")
    executed.show_error(cell, "GuestLost", "again")
    assert [output.evalue for output in cell.outputs] == ["gone"]


def test_the_reason_is_shown_beside_an_error_of_the_cells_own() -> None:
    cell = new_code_cell("1")
    executed.show_error(cell, "ValueError", "the cell's")
    executed.show_error(cell, "OutOfMemory", "why the run ended")
    assert [output.ename for output in cell.outputs] == ["ValueError", "OutOfMemory"]
