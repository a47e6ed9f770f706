"""Which engines there are. The product never changes engine by itself (spec B)."""

from __future__ import annotations

from kernel_provisioner.engines.base import Engine
from kernel_provisioner.errors import EngineUnavailable

ENGINES = ("bwrap",)
"""Engines of this version, strongest first."""

DEFAULT_ENGINE = "bwrap"


def get_engine(name: str) -> Engine:
    """Return the engine of that name.

    Raises EngineUnavailable for ``smolvm`` (not in this version) and for unknown names.
    """
    if name == "bwrap":
        from kernel_provisioner.engines.bwrap import BwrapEngine

        return BwrapEngine()
    if name == "smolvm":
        raise EngineUnavailable(
            "the engine 'smolvm' (microVM) is not part of this version.",
            remedy="choose the engine 'bwrap' (namespaces: weaker isolation).",
        )
    raise EngineUnavailable(
        f"there is no engine {name!r}.", remedy=f"choose one of: {', '.join(ENGINES)}."
    )
