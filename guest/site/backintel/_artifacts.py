"""Saving one object as one artifact: the name is checked, then the size, then the file is written.

The rules repeat those of the host's export (spec J1) so that a notebook learns at once, in the
cell, what would reject the whole export at its end. The host trusts none of it.
"""

from __future__ import annotations

import io
import os
import unicodedata
from pathlib import Path
from typing import Any

from backintel import _facts
from backintel._writers import Unsupported, write

SUFFIXES = (
    *("csv", "tsv", "json", "jsonl", "parquet", "feather", "xlsx", "png", "jpg", "svg", "pdf"),
    *("html", "md", "txt", "ipynb", "sqlite", "duckdb"),
)
"""Suffixes that the host's export accepts."""

MAX_FILES = 256
_MIB = 1024 * 1024


class ArtifactError(ValueError):
    """The object cannot become this artifact; nothing was written. The message tells why."""


class _OverBudget(OSError):
    """More bytes than ``/artifacts`` has left."""


class _BoundedBuffer(io.BytesIO):
    """Holds an artifact until it is complete, and never more than the budget that is left.

    So a refused artifact leaves no half-written file behind, which the host would export.
    """

    def __init__(self, budget: int) -> None:
        super().__init__()
        self._budget = budget

    def write(self, data: Any, /) -> int:
        if self.tell() + memoryview(data).nbytes > self._budget:
            raise _OverBudget
        return super().write(data)


def save(obj: Any, name: str) -> Path:
    """Save ``obj`` as the artifact ``name`` and return its path; an older one is replaced.

    The suffix chooses the format:

    - Matplotlib figure: png, jpg, svg, pdf
    - Plotly figure: html (self-contained, works offline), json
    - pandas, Polars or PyArrow table: csv, tsv, json, jsonl, parquet, feather, xlsx
    - openpyxl workbook: xlsx
    - dict or list: json; list: also jsonl
    - str: any text format; bytes: any format

    Raises ArtifactError, naming the allowed suffixes or the remaining budget, and leaves the
    artifacts as they were.
    """
    suffix = _check_name(name)
    path = _facts.ARTIFACTS / name
    budget = _budget(path)
    buffer = _BoundedBuffer(budget)
    try:
        write(obj, suffix, buffer)
    except Unsupported as error:
        raise ArtifactError(f"{name!r}: {error}") from None
    except _OverBudget:
        raise _too_big(name, budget) from None
    _replace(path, buffer, budget)
    return path


def _check_name(name: str) -> str:
    """Return the suffix of an acceptable artifact name. Raises ArtifactError."""
    allowed = " ".join(SUFFIXES)
    stem, dot, suffix = name.rpartition(".")
    if not dot or not stem or suffix not in SUFFIXES:
        raise ArtifactError(
            f"{name!r}: the name must end in one of the allowed suffixes, in lower case: {allowed}."
        )
    if "/" in name or name.startswith(".") or not name.isprintable():
        raise ArtifactError(
            f"{name!r}: give a plain file name, without folders, leading dots or control "
            "characters; it is saved in /artifacts."
        )
    if len(name.encode()) > 255:
        raise ArtifactError(f"{name[:40]!r}...: the name is longer than 255 bytes.")
    existing = {entry.name for entry in os.scandir(_facts.ARTIFACTS)}
    if name not in existing:
        for other in existing:
            if _folded(other) == _folded(name):
                raise ArtifactError(
                    f"{name!r}: differs from the artifact {other!r} only by case or Unicode form; "
                    "the export would refuse both. Choose another name."
                )
        if len(existing) >= MAX_FILES:
            raise ArtifactError(
                f"{name!r}: there are already {MAX_FILES} artifacts, the most that are exported. "
                "Combine some, or delete some in /artifacts."
            )
    return suffix


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _budget(path: Path) -> int:
    """Return the bytes that ``path`` may have: what is free and what it already holds."""
    _, free = _facts.capacity(path.parent)
    try:
        return free + path.lstat().st_blocks * 512
    except FileNotFoundError:
        return free


def _too_big(name: str, budget: int) -> ArtifactError:
    size, _ = _facts.capacity(_facts.ARTIFACTS)
    return ArtifactError(
        f"{name!r}: does not fit. {budget / _MIB:.1f} MiB of {size / _MIB:.0f} MiB remain in "
        "/artifacts; aggregate the data, use parquet, or delete artifacts that are not needed."
    )


def _replace(path: Path, buffer: io.BytesIO, budget: int) -> None:
    """Write a complete artifact; a link planted under its name is replaced, not followed."""
    path.unlink(missing_ok=True)
    try:
        with open(path, "xb") as file:
            file.write(buffer.getbuffer())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _too_big(path.name, budget) from error
