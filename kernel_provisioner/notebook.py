"""Notebooks before a run: bounded reading, parameters, what a notebook requires.

A notebook may come from a stranger: it is read with a bound on its size, and nothing in it changes
engine, profile, sources or deadlines (spec D5). All outputs are dropped on reading, so that an
executed notebook shows only what this run made.
"""

from __future__ import annotations

import json
import keyword
import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from kernel_provisioner import executed
from kernel_provisioner.errors import UsageError

MAX_NOTEBOOK_BYTES = 64 * 1024 * 1024
MAX_CELLS = 10_000
MAX_REQUIREMENTS = 256
PARAMETERS_TAG = "parameters"
INJECTED_TAG = "injected-parameters"
SKIP_TAG = "skip-execution"


@dataclass(frozen=True, slots=True)
class Requirement:
    """An artifact that a notebook states it makes, and the JSON schema it must validate against."""

    artifact: str
    schema: Mapping[str, object] | bool | None = None


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a notebook file, at most 64 MiB.

    Raises UsageError if it is missing, unreadable, not a regular file, or too large.
    """
    shown = repr(str(path))
    try:
        # O_NONBLOCK: opening a FIFO without a writer would wait for ever.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UsageError(
            f"the notebook {shown} does not exist.", remedy="give the path of an .ipynb file."
        ) from None
    except OSError as error:
        raise UsageError(f"the notebook {shown} cannot be read ({error.strerror}).") from None
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise UsageError(
                f"{shown} is a directory, not a notebook.", remedy="give one .ipynb file in it."
            )
        if not stat.S_ISREG(mode):
            raise UsageError(f"{shown} is not a regular file, so it cannot be a notebook.")
        with os.fdopen(fd, "rb", closefd=False) as file:
            data = file.read(MAX_NOTEBOOK_BYTES + 1)
    finally:
        os.close(fd)
    if len(data) > MAX_NOTEBOOK_BYTES:
        raise UsageError(
            f"the notebook {shown} is over the limit of {MAX_NOTEBOOK_BYTES >> 20} MiB.",
            remedy="clear its outputs and save it again.",
        )
    return data


def parse(data: bytes, name: str) -> Any:
    """Return the notebook (nbformat 4, valid, without outputs) that ``data`` holds.

    Raises UsageError for anything that is not a Python notebook; ``name`` is for the message.
    """
    shown = repr(name)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        raise UsageError(
            f"{shown} is not a notebook: it is not JSON.", remedy="give an .ipynb file."
        ) from None
    if not isinstance(content, dict) or not isinstance(content.get("nbformat"), int):
        raise UsageError(
            f"{shown} is not a notebook: it has no nbformat number.", remedy="give an .ipynb file."
        )
    if content["nbformat"] not in (3, 4):
        raise UsageError(
            f"{shown} has nbformat {content['nbformat']}; this version reads 3 and 4.",
            remedy="save it as a notebook of format 4.",
        )
    try:
        nbformat = _library("nbformat")
        version = nbformat.versions[content["nbformat"]]
        notebook = version.to_notebook_json(content, minor=content.get("nbformat_minor", 0))
        if content["nbformat"] != 4:
            notebook = nbformat.convert(notebook, 4)
        # Adds the cell ids that older programs left out.
        _, notebook = _library("nbformat.validator").normalize(notebook)
        nbformat.validate(notebook)
    except Exception as error:
        # Conversion and validation of hostile content may raise nearly anything.
        lines = str(error).splitlines()
        detail = lines[0][:200].rstrip(" .:") if lines else type(error).__name__
        # A missing key or attribute is all that some say.
        if lines and (name := detail.strip("'")).isidentifier():
            detail = f"it has no {name!r} where one belongs"
        raise UsageError(
            f"{shown} is not a valid notebook: {detail}.",
            remedy="open it in JupyterLab and save it again.",
        ) from None
    if len(notebook.cells) > MAX_CELLS:
        raise UsageError(f"{shown} has {len(notebook.cells)} cells; the limit is {MAX_CELLS}.")
    _require_python(notebook.metadata, shown)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
            cell.execution_count = None
    notebook.metadata.pop("widgets", None)
    _require_writable(notebook, shown)
    return notebook


def _require_writable(notebook: Any, shown: str) -> None:
    """Refuse now what could be neither sent to a kernel nor saved after all cells have run."""
    try:
        executed.serialize(notebook)
        for cell in notebook.cells:
            cell.source.encode()
    except Exception:
        raise UsageError(
            f"{shown} cannot be saved again: it is nested too deeply, or its text is not Unicode.",
            remedy="open it in JupyterLab and save it again.",
        ) from None


def _require_python(metadata: Mapping[str, Any], shown: str) -> None:
    """Refuse a notebook that says it is of another language; saying nothing is fine."""
    for section, key in (("language_info", "name"), ("kernelspec", "language")):
        stated = metadata.get(section)
        language = stated.get(key) if isinstance(stated, Mapping) else None
        if language is not None and str(language).lower() not in ("python", "ipython"):
            raise UsageError(
                f"{shown} is a notebook of the language {str(language)[:40]!r}; "
                "the sandbox runs Python.",
                remedy="give a Python notebook.",
            )


def _library(name: str) -> Any:
    """Import late, for start-up time; as Any, for nbformat has a py.typed but few types."""
    return import_module(name)


def code_cells(notebook: Any) -> list[int]:
    """Return the indices of the cells that hold code; empty code cells are none."""
    return [
        index
        for index, cell in enumerate(notebook.cells)
        if cell.cell_type == "code" and cell.source.strip()
    ]


def has_tag(cell: Any, tag: str) -> bool:
    """Whether a cell carries a tag."""
    return tag in cell.metadata.get("tags", [])


def parse_parameters(arguments: Iterable[str]) -> dict[str, object]:
    """Parse ``K=V`` words: V is JSON where it parses as JSON, else the text itself.

    Raises UsageError for a name that Python cannot assign to, or one given twice.
    """
    parameters: dict[str, object] = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not equals:
            raise UsageError(
                f"--param {argument!r} has no '='.", remedy="write --param NAME=VALUE."
            )
        if not name.isidentifier() or keyword.iskeyword(name):
            raise UsageError(
                f"--param {name!r} is not a name that Python can assign to.",
                remedy="use letters, digits and underscores, and no keyword.",
            )
        if name in parameters:
            raise UsageError(f"--param {name} is given twice.", remedy="give it once.")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UsageError(f"the value of --param {name} is not UTF-8.") from None
        parameters[name] = _value(name, text)
    return parameters


def _value(name: str, text: str) -> object:
    def not_json(constant: str) -> object:
        raise ValueError(constant)

    try:
        return json.loads(text, parse_constant=not_json)
    except RecursionError:
        raise UsageError(f"the value of --param {name} is nested too deeply.") from None
    except ValueError:
        return text


def literal(value: object) -> str:
    """Return the Python expression of a JSON value (infinite floats have no literal)."""
    if isinstance(value, float) and math.isinf(value):
        return f'float("{value}")'
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {literal(item)}" for key, item in value.items()) + "}"
    return repr(value)


def inject(notebook: Any, parameters: Mapping[str, object]) -> None:
    """Put a cell that assigns ``parameters`` after the cell tagged ``parameters``, else on top.

    The conventions are papermill's: the new cell is tagged ``injected-parameters`` and replaces
    one that an earlier run left. Without parameters the notebook stays as it is.
    """
    if not parameters:
        return
    lines = [f"{name} = {literal(value)}" for name, value in parameters.items()]
    source = "\n".join(["# Parameters", *lines])
    cell = _library("nbformat.v4").new_code_cell(source, metadata={"tags": [INJECTED_TAG]})
    if notebook.nbformat_minor < 5:
        cell.pop("id", None)
    cells = notebook.cells
    for index, old in enumerate(cells):
        if old.cell_type == "code" and has_tag(old, INJECTED_TAG):
            cells[index] = cell
            return
    tagged = (
        i for i, old in enumerate(cells) if old.cell_type == "code" and has_tag(old, PARAMETERS_TAG)
    )
    cells.insert(next(tagged, -1) + 1, cell)


def requirements(metadata: Mapping[str, Any]) -> tuple[Requirement, ...]:
    """Return what ``metadata.backintel.requires`` states (spec J3).

    It is a list; each item is an artifact's name, or an object with ``artifact`` and, if wanted,
    ``schema`` (a JSON schema). Raises UsageError for anything else.
    """
    section = metadata.get("backintel")
    stated = section.get("requires") if isinstance(section, Mapping) else None
    if stated is None:
        return ()
    if not isinstance(stated, list) or len(stated) > MAX_REQUIREMENTS:
        raise _bad_requires(f"it must be a list of at most {MAX_REQUIREMENTS} items.")
    found: dict[str, Requirement] = {}
    for item in stated:
        requirement = _requirement(item)
        if requirement.artifact in found:
            raise _bad_requires(f"{requirement.artifact!r} is named twice.")
        found[requirement.artifact] = requirement
    return tuple(found.values())


def _requirement(item: object) -> Requirement:
    if isinstance(item, str):
        name: object = item
        schema: object = None
    elif isinstance(item, Mapping):
        unknown = sorted(set(item) - {"artifact", "schema"})
        if unknown:
            raise _bad_requires(f"unknown key {unknown[0]!r}.")
        name, schema = item.get("artifact"), item.get("schema")
    else:
        raise _bad_requires("an item is neither a name nor an object.")
    if not isinstance(name, str) or not _is_relative_name(name):
        raise _bad_requires(f"{name!r} is not the relative name of an artifact.")
    if schema is not None and not isinstance(schema, Mapping | bool):
        raise _bad_requires(f"the schema of {name!r} is not a JSON schema.")
    return Requirement(name, schema)


def _is_relative_name(name: str) -> bool:
    parts = name.split("/")
    return (
        0 < len(name) <= 512
        and name.isprintable()
        and not PurePosixPath(name).is_absolute()
        and not any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts)
    )


def _bad_requires(reason: str) -> UsageError:
    return UsageError(
        f"the notebook's metadata.backintel.requires is refused: {reason}",
        remedy='write a list such as ["findings.json", {"artifact": "t.json", "schema": {...}}].',
    )
