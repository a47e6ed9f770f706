"""Where a page may have artifacts published: a new directory below the Jupyter server's root."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernel_provisioner.errors import UsageError

_MAX_LENGTH = 1024
_REMEDY = "name a new directory as the file browser shows it, for instance analysis/results."


def destination(root: Path, body: Any, *, hidden: bool) -> tuple[str, Path]:
    """Return the directory as named and as a path on the host. Raises UsageError.

    ``body`` is the request's JSON. Its parent must exist and lie below ``root`` when all links are
    followed. ``hidden`` says whether the server shows names that begin with a dot.
    """
    directory = body.get("directory") if isinstance(body, dict) else None
    if not isinstance(directory, str) or body.keys() != {"directory"}:
        raise UsageError('the body is not {"directory": "..."}.', remedy=_REMEDY)
    parts = directory.split("/")
    if len(directory) > _MAX_LENGTH or not directory.isprintable():
        raise UsageError("the directory's name is too long or not printable.", remedy=_REMEDY)
    if any(part in ("", ".", "..") for part in parts):
        raise UsageError(
            f"{directory!r} is not a path below the server's root directory.", remedy=_REMEDY
        )
    if not hidden and any(part.startswith(".") for part in parts):
        raise UsageError(f"{directory!r} is hidden on this server.", remedy=_REMEDY)
    top = root.resolve()
    try:
        parent = top.joinpath(*parts[:-1]).resolve(strict=True)
    except (OSError, RuntimeError):
        raise UsageError(
            f"the directory {'/'.join(parts[:-1])!r} does not exist.", remedy="make it first."
        ) from None
    if not parent.is_relative_to(top) or not parent.is_dir():
        raise UsageError(
            f"{directory!r} is not below a directory of the server's root.", remedy=_REMEDY
        )
    return directory, parent / parts[-1]
