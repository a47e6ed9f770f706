"""Writers: one object, one suffix, one binary stream. No file names and no policy here.

An object of a data library can only exist if its library was imported, so the type tests look into
``sys.modules`` and import nothing for objects of another kind.
"""

from __future__ import annotations

import datetime
import json
import math
import sys
from collections.abc import Iterable
from typing import Any, BinaryIO

_FIGURE = ("png", "jpg", "svg", "pdf")
_TABLE = ("csv", "tsv", "json", "jsonl", "parquet", "feather", "xlsx")
_TEXT = ("csv", "tsv", "json", "jsonl", "svg", "html", "md", "txt", "ipynb")
_SHEET_ROWS = 1_048_576
"""Rows of one worksheet, header included: the limit of the xlsx format."""


class Unsupported(ValueError):
    """The object has no form with this suffix."""


def write(obj: Any, suffix: str, stream: BinaryIO) -> None:
    """Write ``obj`` in the format that ``suffix`` names. Raises Unsupported."""
    if _is(obj, "matplotlib.figure", "Figure"):
        _expect("a Matplotlib figure", suffix, _FIGURE)
        obj.savefig(stream, format=suffix, bbox_inches="tight")
    elif _is(obj, "plotly.basedatatypes", "BaseFigure"):
        _write_plotly(obj, suffix, stream)
    elif _is(obj, "openpyxl.workbook.workbook", "Workbook"):
        _expect("an openpyxl workbook", suffix, ("xlsx",))
        obj.save(stream)
    elif isinstance(obj, dict):
        _expect("a dict", suffix, ("json",))
        stream.write(_json_bytes(obj, indent=2))
    elif isinstance(obj, list):
        _expect("a list", suffix, ("json", "jsonl"))
        if suffix == "json":
            stream.write(_json_bytes(obj, indent=2))
        else:
            _write_lines(obj, stream)
    elif isinstance(obj, str):
        _expect("a str", suffix, _TEXT)
        stream.write(obj.encode())
    elif isinstance(obj, bytes | bytearray | memoryview):
        stream.write(obj)
    else:
        _expect_table(obj, suffix)
        _write_table(obj, suffix, stream)


def _is(obj: Any, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(obj, kind)


def _expect(what: str, suffix: str, allowed: tuple[str, ...]) -> None:
    if suffix not in allowed:
        raise Unsupported(f"{what} is not saved as .{suffix}; use one of: {' '.join(allowed)}.")


def _write_plotly(figure: Any, suffix: str, stream: BinaryIO) -> None:
    if suffix in _FIGURE:
        # Plotly's own route to an image starts a browser, which the image does not have.
        raise Unsupported(
            f"a Plotly figure is not saved as .{suffix}: that needs a browser. Save it as .html "
            "(interactive, works offline), or draw the picture with Matplotlib."
        )
    _expect("a Plotly figure", suffix, ("html", "json"))
    text = figure.to_html(include_plotlyjs=True) if suffix == "html" else figure.to_json()
    stream.write(text.encode())


def _expect_table(obj: Any, suffix: str) -> None:
    kinds = (("pandas", "DataFrame"), ("polars", "DataFrame"), ("pyarrow", "Table"))
    if any(_is(obj, *kind) for kind in kinds):
        _expect("a table", suffix, _TABLE)
    elif _is(obj, "polars", "LazyFrame"):
        raise Unsupported("a LazyFrame holds no rows yet; call .collect() first.")
    else:
        raise Unsupported(
            f"objects of type {type(obj).__name__} are not saved. Give a Matplotlib or Plotly "
            "figure, a pandas/Polars/PyArrow table, a workbook, dict, list, str or bytes."
        )


def _write_table(obj: Any, suffix: str, stream: BinaryIO) -> None:
    table = _to_arrow(obj, keep_index=suffix in ("parquet", "feather"))
    if suffix == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(table, stream, compression="zstd")
    elif suffix == "feather":
        import pyarrow.feather

        pyarrow.feather.write_feather(table, stream)
    elif suffix in ("csv", "tsv"):
        import pyarrow.csv

        delimiter = "," if suffix == "csv" else "\t"
        options = pyarrow.csv.WriteOptions(delimiter=delimiter, quoting_style="needed")
        pyarrow.csv.write_csv(table, stream, options)
    elif suffix == "xlsx":
        _write_sheet(table, stream)
    elif suffix == "json":
        stream.write(_json_bytes(_records(table), indent=2))
    else:
        _write_lines(_records(table), stream)


def _to_arrow(obj: Any, *, keep_index: bool) -> Any:
    """Return a PyArrow table; a pandas index becomes a column unless it only counts the rows."""
    if _is(obj, "pyarrow", "Table"):
        return obj
    if _is(obj, "polars", "DataFrame"):
        return obj.to_arrow()
    import pyarrow

    index = obj.index
    # A named range (set_index on 1, 2, 3) is data; the default one only counts the rows.
    counts = _is(index, "pandas", "RangeIndex") and index.name is None and index.start == 0
    if not counts and not keep_index:
        obj = obj.reset_index()
    return pyarrow.Table.from_pandas(obj, preserve_index=keep_index and not counts)


def _records(table: Any) -> list[dict[str, Any]]:
    """Return the rows as dicts. A missing figure is null in JSON, whichever library made it."""
    return [
        {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in row.items()
        }
        for row in table.to_pylist()
    ]


def _write_lines(rows: Iterable[Any], stream: BinaryIO) -> None:
    for row in rows:
        stream.write(_json_bytes(row, indent=None))


def _json_bytes(value: Any, *, indent: int | None) -> bytes:
    try:
        text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError as error:
        raise Unsupported(
            f"not JSON ({error}). NaN and infinity do not exist in JSON: use None."
        ) from None
    except TypeError as error:
        raise Unsupported(f"not JSON ({error}).") from None
    return text.encode() + b"\n"


def _plain(value: Any) -> Any:
    """Return the JSON form of dates and of NumPy scalars and arrays."""
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if type(value).__module__.split(".")[0] == "numpy":
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form")


def _write_sheet(table: Any, stream: BinaryIO) -> None:
    if table.num_rows >= _SHEET_ROWS:
        raise Unsupported(
            f"a worksheet holds {_SHEET_ROWS - 1:,} rows and the table has {table.num_rows:,}; "
            "use parquet."
        )
    import openpyxl

    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("data")
    sheet.append(table.column_names)
    for row in _records(table):
        sheet.append([_cell(value) for value in row.values()])
    book.save(stream)


def _cell(value: Any) -> Any:
    """Return what a worksheet cell can hold: Excel knows no time zones and no nested values."""
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        return value.astimezone(datetime.UTC).replace(tzinfo=None)
    if isinstance(value, list | dict):
        return json.dumps(value, default=_plain)
    return value
