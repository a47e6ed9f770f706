"""Multiplies the product's time budgets in the emulated machine, which is 20 to 50 times too slow.

Loaded by a ``.pth`` file of that machine only, in every process. It rewrites the module-level
constants named ``..._S`` while they are loaded, so that the product itself needs no switch that
could lengthen a deadline, and so that the supervisor, which ignores the environment, is slowed down
too. Compiled code is kept on that machine's own disk: to compile it anew takes half a minute there.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

FACTOR = 20
_CACHE = "/srv/pycache"
_PACKAGE = "kernel_provisioner."
_CONSTANT = re.compile(
    r"^(_?[A-Z_]*(?<!RETRY)(?<!PAUSE)(?<!INTERVAL)_S) = ([0-9.]+)$", re.MULTILINE
)


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compile the rewritten source; runpy asks for this as well."""
        path = self.get_filename(fullname)
        facts = os.stat(path)
        kept = f"{_CACHE}/{fullname}-{facts.st_mtime_ns}-{facts.st_size}"
        with contextlib.suppress(OSError), open(kept, "rb") as file:
            found: CodeType = marshal.load(file)  # noqa: S302 - written below
            return found
        source = self.get_data(path).decode()
        code = compile(_CONSTANT.sub(rf"\1 = \2 * {FACTOR}", source), path, "exec")
        # An ordinary user of that machine cannot write there, and goes without.
        with contextlib.suppress(OSError):
            with open(f"{kept}.{os.getpid()}", "wb") as file:
                marshal.dump(code, file)
            os.replace(f"{kept}.{os.getpid()}", kept)
        return code


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the product's modules as usual, with the loader above."""
        if not fullname.startswith(_PACKAGE):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


sys.pycache_prefix = _CACHE
sys.dont_write_bytecode = False
with contextlib.suppress(OSError):
    os.makedirs(_CACHE, 0o755, exist_ok=True)
sys.meta_path.insert(0, _Finder())
