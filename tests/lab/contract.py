"""The OpenAPI file as a judge: what it documents, and whether an answer is what it documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from server import Answer

import kernel_provisioner.lab

PATH = Path(kernel_provisioner.lab.__file__).parent / "openapi.yaml"
DOCUMENT: dict[str, Any] = yaml.safe_load(PATH.read_text())


def _operations() -> dict[str, dict[str, Any]]:
    return {
        operation["operationId"]: operation
        for item in DOCUMENT["paths"].values()
        for verb, operation in item.items()
        if verb in ("get", "post")
    }


def documented() -> set[tuple[str, int]]:
    """Each operation with each status that it may answer."""
    return {
        (name, int(status))
        for name, operation in _operations().items()
        for status in operation["responses"]
    }


def check(operation: str, answer: Answer) -> None:
    """Fail unless status, type and body of the answer are documented."""
    responses = _operations()[operation]["responses"]
    assert str(answer.status) in responses, (operation, answer)
    response = responses[str(answer.status)]
    if "$ref" in response:
        response = DOCUMENT["components"]["responses"][response["$ref"].rpartition("/")[2]]
    kind = answer.headers["Content-Type"].partition(";")[0]
    assert kind in response["content"], (operation, answer)
    for name in response.get("headers", {}):
        assert name in answer.headers
    if kind == "application/json":
        schema = {**response["content"][kind]["schema"], "components": DOCUMENT["components"]}
        Draft202012Validator(schema).validate(answer.json)
