"""Tells DuckDB the truth (spec D4): it reads no environment variable for memory, threads or spill.

Left alone it sizes itself by the host's memory, and spills into the current directory.
``install_hook`` makes every ``import duckdb`` in this process give ``duckdb.connect`` and the
module's default connection the limits of the session as defaults; what the caller sets explicitly
wins. Nothing is imported until the notebook imports DuckDB. Not a boundary: the cgroup is.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

_ALIASES = {"memory_limit": "max_memory", "threads": "worker_threads"}


def defaults(environ: Mapping[str, str]) -> dict[str, str | int]:
    """Return DuckDB's configuration for the limits in ``environ``; empty outside a sandbox.

    DuckDB gets half of the session's memory: the rest is for Python, for results, and for the
    spilled files themselves, whose mount counts inside the same limit.
    """
    try:
        memory = int(environ["BACKINTEL_MEMORY_BYTES"])
        cpus = int(environ["BACKINTEL_CPUS"])
        spill = environ["BACKINTEL_DUCKDB_TEMP"]
    except (KeyError, ValueError):
        return {}
    return {
        "memory_limit": f"{memory // 2 // 1024}KiB",
        "threads": cpus,
        "temp_directory": spill,
    }


def configure(duckdb: Any, settings: Mapping[str, str | int]) -> None:
    """Make ``settings`` the defaults of the imported module and of its default connection."""
    original = duckdb.connect

    @functools.wraps(original)
    def connect(
        database: Any = ":memory:", read_only: bool = False, config: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(config or {})
        if database == ":default:":
            return original(database, read_only, given)
        missing = {
            key: value for key, value in settings.items() if _ALIASES.get(key, key) not in given
        }
        return original(database, read_only, missing | given)

    duckdb.connect = connect
    duckdb.set_default_connection(connect())


class _Loader(importlib.abc.Loader):
    """Runs the module's own loader, then the configuration."""

    def __init__(self, inner: importlib.abc.Loader, settings: Mapping[str, str | int]) -> None:
        self._inner = inner
        self._settings = settings

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        configure(module, self._settings)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds only ``duckdb``, by the other finders."""

    def __init__(self, settings: Mapping[str, str | int]) -> None:
        self._settings = settings

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "duckdb":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._settings)
        return spec


def install_hook() -> None:
    """Arrange for DuckDB to be configured when it is imported; a no-op outside a sandbox."""
    settings = defaults(os.environ)
    if settings and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(settings))
