"""What reaches a terminal: no control characters of strangers, progress on both kinds of stream."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_provisioner.cli import output
from kernel_provisioner.cli.output import RunReporter, emit, first_line
from kernel_provisioner.cli.run import summary
from kernel_provisioner.plaintext import printable
from kernel_provisioner.runmodel import RunResult


class Terminal(io.StringIO):
    """Somewhere to show a line that is replaced."""

    def isatty(self) -> bool:
        return True


@given(st.text())
def test_nothing_but_printable_text_and_line_feeds_passes(text: str) -> None:
    assert all(char == "\n" or char.isprintable() for char in printable(text))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]8;;http://h\x1b\\x", "x"),
        ("\x9b31m", " 31m"),
        ("a\rb", "a b"),
        ("日本 é", "日本 é"),
        ("\u202etxt", " txt"),
    ],
)
def test_terminal_escapes_are_taken_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_long_text_is_cut() -> None:
    assert printable("x" * 50, 10) == "x" * 9 + "…"


def test_the_first_line_that_says_something() -> None:
    assert first_line("\n%matplotlib inline\n  import x\n") == "import x"
    assert first_line("") == ""


def test_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    reporter = RunReporter(stream)
    reporter.phase("verified", 0.1)
    reporter.phase("ready", 0.5)
    reporter.cell_started(1, 12, "x = 1")
    reporter.cell_ended(1, 12, 1.25, "done")
    reporter.cell_skipped(2, 12, "!pip install x")
    assert stream.getvalue().splitlines() == [
        "  start  verified 0.10 · ready 0.50 s",
        "  cell  1/12  x = 1  done in 1.2 s",
        "  cell  2/12  !pip install x  skipped",
    ]


def test_a_terminal_gets_a_line_that_is_replaced() -> None:
    async def cell() -> str:
        stream = Terminal()
        reporter = RunReporter(stream)
        reporter.cell_started(1, 2, "x = 1")
        reporter.note("something")
        assert stream.getvalue().endswith("  something\n\r\x1b[2K  cell 1/2  x = 1  0 s")
        reporter.cell_ended(1, 2, 0.5, "done")
        return stream.getvalue()

    assert asyncio.run(cell()).endswith("\r\x1b[2K  cell 1/2  x = 1  done in 0.5 s\n")


@pytest.mark.parametrize("live", [True, False])
def test_a_start_that_takes_long_is_told(live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(output, "_TICK_S", 3600.0)

    class Stream(io.StringIO):
        def isatty(self) -> bool:
            return live

    async def start() -> str:
        stream = Stream()
        reporter = RunReporter(stream)
        reporter.starting()
        while "starting the sandbox" not in stream.getvalue():
            await asyncio.sleep(0)
        reporter.over()
        return stream.getvalue()

    told = re.sub(r"\d+ s\r", "N s\r", asyncio.run(start()))
    assert told == (
        "\r\x1b[2K  starting the sandbox  N s\r\x1b[2K" if live else "  starting the sandbox ...\n"
    )


@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_a_start_that_is_ended_is_shown_as_that(
    patience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_PATIENCE_S", patience)
    monkeypatch.setattr(output, "_TICK_S", 0.0)

    async def start() -> str:
        stream = Terminal()
        reporter = RunReporter(stream)
        reporter.starting()
        while not patience and "starting the sandbox" not in stream.getvalue():
            await asyncio.sleep(0)
        reporter.ending()
        asked = len(stream.getvalue())
        reporter.note("already ending")
        # The note's own line, and two ticks.
        while stream.getvalue().count("ending the sandbox", asked) < 3:
            await asyncio.sleep(0)
        reporter.over()
        assert bool(patience) != ("starting" in stream.getvalue()[:asked])
        return stream.getvalue()

    told = re.sub(r"\d+ s", "N s", asyncio.run(start()))
    line = "\r\x1b[2K  ending the sandbox  N s"
    _, told = told.split("  ending the sandbox and saving the notebook\n")
    assert told == f"{line}\r\x1b[2K  already ending\n{line}{line}{line}\r\x1b[2K"


def test_a_cell_that_is_ended_says_how_it_went() -> None:
    async def cell() -> str:
        stream = Terminal()
        reporter = RunReporter(stream)
        reporter.cell_started(1, 2, "x = 1")
        reporter.ending()
        reporter.cell_ended(1, 2, 0.5, "stopped")
        shown = stream.getvalue()
        reporter.over()
        return shown

    assert re.sub(r"\d+ s$", "N s", asyncio.run(cell())).endswith(
        "\r\x1b[2K  cell 1/2  x = 1  stopped in 0.5 s\n\r\x1b[2K  ending the sandbox  N s"
    )


def test_a_quick_start_is_not_told() -> None:
    async def start() -> str:
        stream = io.StringIO()
        reporter = RunReporter(stream)
        reporter.starting()
        reporter.phase("ready", 0.5)
        reporter.over()
        return stream.getvalue()

    assert asyncio.run(start()) == "  start  ready 0.50 s\n"


def test_json_is_one_object_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    emit({"schema": "x/1"})
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"schema": "x/1"}
    assert captured.err == ""


def _report_on(stream: io.TextIOWrapper) -> None:
    """Make a reporter say everything that it can say."""

    async def cell() -> None:
        reporter = RunReporter(stream)
        reporter.note("n" * 5000)
        reporter.phase("ready", 0.5)
        reporter.cell_started(1, 2, "x = 1")
        reporter.cell_ended(1, 2, 0.5, "done")
        reporter.cell_skipped(2, 2, "x")

    asyncio.run(cell())


def test_a_full_or_closed_stream_ends_nothing() -> None:
    with open("/dev/full", "w") as stream:
        _report_on(stream)
    # Closing it flushed it without an error, as the interpreter does at its end.
    _report_on(stream)


def test_a_broken_pipe_ends_nothing() -> None:
    readable, writable = os.pipe()
    os.close(readable)
    with open(writable, "w") as stream:
        _report_on(stream)


def test_a_reader_that_stalls_does_not_hold_up_progress() -> None:
    readable, writable = os.pipe()
    with open(readable), open(writable, "w") as stream:
        # More than any pipe holds; a write that waited would wait for ever.
        for _ in range(300):
            _report_on(stream)


def test_a_summary_names_all_that_was_made() -> None:
    out = Path("/data/out-n-20260101-000000")
    result = RunResult(out, notebook=out / "n.ipynb", receipt=out / "receipt.json", published=True)
    assert [line for line in summary(result) if str(out) in line] == [
        f"notebook   {out}/n.ipynb",
        f"artifacts  {out}/artifacts (0 files)",
        f"receipt    {out}/receipt.json",
    ]


def test_a_summary_cannot_be_forged() -> None:
    result = RunResult(Path("/out"), failed_cell=1, exit_status=1)
    result.error = {"code": "E", "message": "x\nartifacts  /etc", "remedy": ""}
    lines = "\n".join(summary(result)).splitlines()
    assert [line for line in lines if line.startswith("artifacts")] == ["artifacts  none published"]
