"""Notebooks after a run: what the guest sent, as a file that every reader takes (spec J3).

Outputs come from the guest, which is not trusted: an output that cannot be kept is replaced by a
note, so that one bad message never costs the rest of the work.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kernel_provisioner.plaintext import printable

_LEFT_OUT = "[BackIntel sandbox: an output that no notebook file can hold was left out here]\n"


def serialize(notebook: Any) -> bytes:
    """Return the notebook as the content of an .ipynb file: valid, and JSON without NaN.

    What of the guest cannot be kept is replaced in ``notebook`` itself. Raises whatever nbformat
    raises if the rest cannot be written either.
    """
    try:
        return _written(notebook)
    except Exception:
        # Validation and copying of hostile content may raise nearly anything.
        _leave_out(notebook)
    return _written(notebook)


def _written(notebook: Any) -> bytes:
    _library("nbformat").validate(notebook)
    text: str = _library("nbformat.v4").writes(notebook, allow_nan=False)
    return f"{text}\n".encode(errors="backslashreplace")


def _leave_out(notebook: Any) -> None:
    """Replace everything of the guest that a notebook file cannot hold."""
    nbformat = _library("nbformat.v4")
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        note = nbformat.new_output("stream", name="stderr", text=_LEFT_OUT)
        cell.outputs = [output if _is_kept(output) else note for output in cell.outputs]
        if type(cell.execution_count) is not int or cell.execution_count < 0:
            cell.execution_count = None
    if not _is_written(nbformat.new_notebook(metadata=notebook.metadata)):
        notebook.metadata.pop("language_info", None)


def _is_kept(output: Any) -> bool:
    nbformat = _library("nbformat.v4")
    probe = nbformat.new_notebook(cells=[nbformat.new_code_cell()])
    probe.cells[0].outputs = [output]
    return _is_written(probe)


def _is_written(notebook: Any) -> bool:
    try:
        _written(notebook)
    except Exception:
        return False
    return True


def show_error(cell: Any, name: str, text: str) -> None:
    """Append an error to a cell's outputs, unless it shows one of this name already."""
    errors = (output for output in cell.outputs if output.output_type == "error")
    if any(printable(error.ename) == printable(name) for error in errors):
        return
    error = {"ename": name, "evalue": text, "traceback": [f"{name}: {text}"]}
    cell.outputs.append(_library("nbformat.v4").new_output("error", **error))


def _library(name: str) -> Any:
    """Import late, for start-up time; as Any, for nbformat has a py.typed but few types."""
    return import_module(name)
