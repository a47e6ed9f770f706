"""Required artifacts are checked in a bounded child that nothing hostile can hold up."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kernel_provisioner import requires
from kernel_provisioner.errors import ExportRefused, UsageError
from kernel_provisioner.notebook import Requirement


def _check(root: Path, *items: Requirement) -> None:
    asyncio.run(requires.check_artifacts(root, items))


def _write(root: Path, content: object) -> Path:
    (root / "t.json").write_text(json.dumps(content))
    return root


def test_present_and_valid_artifacts_pass(tmp_path: Path) -> None:
    (tmp_path / "plot.png").write_bytes(b"x")
    _write(tmp_path, {"rows": 3})
    schema = {"type": "object", "properties": {"rows": {"type": "integer", "minimum": 1}}}
    _check(tmp_path, Requirement("plot.png"), Requirement("t.json", schema))


def test_a_missing_artifact_is_named(tmp_path: Path) -> None:
    with pytest.raises(ExportRefused, match=r"requires the artifact 'd/plot\.png'"):
        _check(tmp_path, Requirement("d/plot.png"))


def test_a_name_that_is_too_long_for_a_file_is_refused_and_breaks_nothing(tmp_path: Path) -> None:
    with pytest.raises(ExportRefused, match="cannot be read"):
        _check(tmp_path, Requirement("a" * 300))


def test_a_directory_is_no_artifact(tmp_path: Path) -> None:
    (tmp_path / "t.json").mkdir()
    with pytest.raises(ExportRefused, match="is not a file"):
        _check(tmp_path, Requirement("t.json"))


def test_a_broken_schema_rule_is_located(tmp_path: Path) -> None:
    schema = {"properties": {"rows": {"minimum": 1}}}
    with pytest.raises(ExportRefused, match=r"at \$\.rows: 0 is less than the minimum of 1"):
        _check(_write(tmp_path, {"rows": 0}), Requirement("t.json", schema))


def test_an_artifact_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("[")
    with pytest.raises(ExportRefused, match="is not JSON"):
        _check(tmp_path, Requirement("t.json", {}))


def test_the_schema_false_refuses_everything(tmp_path: Path) -> None:
    with pytest.raises(ExportRefused, match="breaks its schema"):
        _check(_write(tmp_path, 1), Requirement("t.json", False))


@pytest.mark.parametrize("schema", [{"type": "integr"}, {"$schema": []}, {"$ref": 1}])
def test_a_schema_that_is_none_is_refused_before_the_run(schema: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"states for 't.json' is not a JSON schema"):
        requires.check_schemas([Requirement("t.json", schema)])


def test_a_regular_expression_cannot_hold_up_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requires, "_WALL_S", 3.0)
    schema = {"pattern": "^(a+)+$"}
    with pytest.raises(ExportRefused, match="could not be validated within"):
        _check(_write(tmp_path, "a" * 60 + "!"), Requirement("t.json", schema))


def test_an_enormous_artifact_is_not_parsed(tmp_path: Path) -> None:
    with (tmp_path / "t.json").open("wb") as file:
        file.truncate(requires.MAX_JSON_BYTES + 1)
    with pytest.raises(ExportRefused, match="at most"):
        _check(tmp_path, Requirement("t.json", {}))


def test_a_remote_reference_is_not_fetched(tmp_path: Path) -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            reference = f"http://127.0.0.1:{server.server_port}/schema.json"
            with pytest.raises(ExportRefused, match="cannot be applied"):
                _check(_write(tmp_path, 1), Requirement("t.json", {"$ref": reference}))
        finally:
            server.shutdown()
    assert asked == []
