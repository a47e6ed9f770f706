"""Whether the artifacts that a notebook requires exist and validate (spec J3).

Artifacts and schemas both come from the notebook's author, who is not trusted, and a schema can
make a validator run for ever (a regular expression, a web of references). So validation happens in
a child process with bounds on its time and memory, which fetches nothing: remote references fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kernel_provisioner.errors import ExportRefused, UsageError
from kernel_provisioner.notebook import Requirement

MAX_JSON_BYTES = 32 * 1024 * 1024
_CPU_S = 20
_WALL_S = 40.0
_MEMORY_BYTES = 1 << 30
_REMEDY = "correct the notebook so that it writes what its metadata states; nothing was published."


def check_schemas(requirements: Sequence[Requirement]) -> None:
    """Refuse a schema that is none, before anything runs. Raises UsageError."""
    schemas = [item for item in requirements if item.schema is not None]
    if not schemas:
        return
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
    from jsonschema.exceptions import SchemaError  # type: ignore[import-untyped]
    from jsonschema.validators import validator_for  # type: ignore[import-untyped]

    for item in schemas:
        try:
            validator_for(item.schema, default=Draft202012Validator).check_schema(item.schema)
        except Exception as error:
            # A stranger's schema: "$schema" may be no text, the nesting too deep, and so on.
            detail = error.message if isinstance(error, SchemaError) else "it cannot be applied."
            raise UsageError(
                f"the schema that the notebook states for {item.artifact!r} is not a JSON schema: "
                f"{str(detail)[:200]}",
                remedy="correct metadata.backintel.requires.",
            ) from None


async def check_artifacts(root: Path, requirements: Sequence[Requirement]) -> None:
    """Check the exported artifacts below ``root``. Raises ExportRefused naming the first unmet."""
    for item in requirements:
        _require_file(root / item.artifact, item)
    schemas: list[dict[str, object]] = [
        {"artifact": item.artifact, "path": str(root / item.artifact), "schema": item.schema}
        for item in requirements
        if item.schema is not None
    ]
    if schemas and (failure := await _validate_in_child(schemas)):
        raise ExportRefused(failure, remedy=_REMEDY)


def _require_file(path: Path, item: Requirement) -> None:
    try:
        info = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        raise ExportRefused(
            f"the notebook requires the artifact {item.artifact!r}, which it did not write.",
            remedy=_REMEDY,
        ) from None
    except OSError as error:
        raise ExportRefused(
            f"the required artifact {item.artifact!r} cannot be read ({error.strerror}).",
            remedy=_REMEDY,
        ) from None
    if not stat.S_ISREG(info.st_mode):
        raise ExportRefused(f"the required artifact {item.artifact!r} is not a file.")
    if item.schema is not None and info.st_size > MAX_JSON_BYTES:
        raise ExportRefused(
            f"the required artifact {item.artifact!r} has {info.st_size} bytes; at most "
            f"{MAX_JSON_BYTES} are validated against a schema.",
            remedy=_REMEDY,
        )


async def _validate_in_child(schemas: list[dict[str, object]]) -> str:
    """Return what failed, or an empty string."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-m",
        __name__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={},
    )
    try:
        async with asyncio.timeout(_WALL_S):
            answer, _ = await child.communicate(json.dumps(schemas).encode())
    except TimeoutError:
        answer = b""
    finally:
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
    try:
        return str(json.loads(answer)["failure"])
    except (ValueError, KeyError, TypeError):
        return (
            "the required artifacts could not be validated within "
            f"{_CPU_S} s and {_MEMORY_BYTES >> 20} MiB."
        )


def _first_failure(schemas: list[dict[str, Any]]) -> str:
    from jsonschema import Draft202012Validator
    from jsonschema.validators import validator_for
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

    for item in schemas:
        name, schema = item["artifact"], item["schema"]
        try:
            content = json.loads(Path(item["path"]).read_bytes())
        except (ValueError, RecursionError):
            return f"the required artifact {name!r} is not JSON."
        kind = validator_for(schema, default=Draft202012Validator)
        try:
            # An explicit registry: the default one would fetch remote references.
            error = next(kind(schema, registry=REGISTRY).iter_errors(content), None)
        except Exception as problem:
            return f"the schema of {name!r} cannot be applied ({type(problem).__name__})."
        if error is not None:
            return (
                f"the required artifact {name!r} breaks its schema at "
                f"{error.json_path[:100]}: {error.message[:300]}"
            )
    return ""


def main() -> None:
    """Entry of the child: a JSON list on stdin, one JSON object on stdout."""
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    failure = _first_failure(json.load(sys.stdin))
    os.write(sys.stdout.fileno(), json.dumps({"failure": failure}).encode())


if __name__ == "__main__":
    main()
