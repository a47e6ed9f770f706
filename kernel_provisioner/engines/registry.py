"""Which engines there are. The product never changes engine by itself (spec B)."""

from __future__ import annotations

from kernel_provisioner.engines.base import Engine
from kernel_provisioner.errors import EngineUnavailable
from kernel_provisioner.paths import StateDirs

ENGINES = ("smolvm", "bwrap")
"""Engines of this version, strongest first."""

DEFAULT_ENGINE = "smolvm"
"""The engine of what states none. Where it cannot run nothing takes its place but by its owner."""

CHOOSE_WEAKER = (
    "choose the weaker engine: `--engine bwrap` of `backintel run` and `backintel kernel install`, "
    "and BACKINTEL_SANDBOX where that is set."
)
"""The end of each remedy for a host that cannot run the default engine."""


def get_engine(name: str, dirs: StateDirs | None = None) -> Engine:
    """Return the engine of that name; ``dirs`` is where it was prepared (default: this user's).

    Raises EngineUnavailable for unknown names.
    """
    if name == "bwrap":
        from kernel_provisioner.engines.bwrap import BwrapEngine

        return BwrapEngine()
    if name == "smolvm":
        from kernel_provisioner.engines.smolvm import SmolvmEngine

        return SmolvmEngine(dirs)
    raise EngineUnavailable(
        f"there is no engine {name!r}.", remedy=f"choose one of: {', '.join(ENGINES)}."
    )
