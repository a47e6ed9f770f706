"""Makes ``import jupyter_client`` cheap until somebody uses it.

ipykernel needs a few of its modules. The package's own ``__init__`` imports all clients, managers
and provisioners, which no kernel uses: 31 ms of the 224 that a kernel's imports were measured to
take. User code finds the whole package: the first name it asks for runs ``__init__``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from types import ModuleType
from typing import Any

_PACKAGE = "jupyter_client"
_lock = threading.RLock()


class _Package(ModuleType):
    def __getattr__(self, name: str) -> Any:
        # The import system and debuggers ask for dunder names of their own; ``*`` for __all__.
        if name in ("__all__", "__version__") or not name.startswith("__"):
            self._load()
            if name in self.__dict__:
                return self.__dict__[name]
        raise AttributeError(f"module {_PACKAGE!r} has no attribute {name!r}", name=name, obj=self)

    def __dir__(self) -> list[str]:
        self._load()
        return sorted(self.__dict__)

    def _load(self) -> None:
        """Run ``__init__`` once; a second thread waits, and ``__init__`` itself passes."""
        with _lock:
            spec = self.__dict__.pop("__pending__", None)
            if spec is not None:
                spec.loader.exec_module(self)
                object.__setattr__(self, "__class__", ModuleType)


def install() -> None:
    """Put the package into ``sys.modules`` without running it; for ipykernel to be imported."""
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    package = _Package(_PACKAGE)
    package.__dict__.update(
        __pending__=spec,
        __spec__=spec,
        __path__=spec.submodule_search_locations,
        __file__=spec.origin,
        __loader__=spec.loader,
        __package__=_PACKAGE,
    )
    sys.modules[_PACKAGE] = package
    # The one name that ipykernel takes from the package itself.
    connect = importlib.import_module(f"{_PACKAGE}.connect")
    package.__dict__["write_connection_file"] = connect.write_connection_file
