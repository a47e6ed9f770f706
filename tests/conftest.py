"""Configuration of all tests: nothing may be skipped in CI, and no test inherits our settings.

A test that skips for a missing tool is a promise that was not checked. With ``CI=true`` or
``BACKINTEL_STRICT=1`` each skip is therefore a failure that names what is missing. The mark
``may_skip`` lets one stated skip of a suite that others wrote pass.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

STRICT = os.environ.get("CI", "").lower() == "true" or os.environ.get("BACKINTEL_STRICT") == "1"


def _refusal(reason: object) -> str:
    # A skip's longrepr is (file, line, "Skipped: reason").
    text = str(reason[2] if isinstance(reason, tuple) and len(reason) == 3 else reason)
    return f"skipped, and CI=true or BACKINTEL_STRICT=1 forbids that. {text}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skipped test into a failed one where skips are forbidden."""
    report = yield
    stated = [str(mark.args[0]) for mark in item.iter_markers("may_skip")]
    if any(text in str(report.longrepr) for text in stated):
        return report
    if STRICT and report.skipped and not hasattr(report, "wasxfail"):
        report.longrepr = _refusal(report.longrepr)
        report.outcome = "failed"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Do the same for a whole module that skips while it is imported."""
    report = yield
    if STRICT and report.skipped:
        report.longrepr = _refusal(report.longrepr)
        report.outcome = "failed"
    return report


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _no_inherited_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop settings that the person running the tests has for their own sandboxes."""
    places = ("BACKINTEL_SQLITE_PATH", "BACKINTEL_FILES_DIR", "BACKINTEL_PARQUET_DIR")
    for name in ("BACKINTEL_SANDBOX", *places):
        monkeypatch.delenv(name, raising=False)
