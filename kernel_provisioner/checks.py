"""The lines of the doctor, and what they mean together.

What one engine lacks is a failure only where no other can run: its owner can choose that one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from kernel_provisioner.config import standing_engine
from kernel_provisioner.engines.registry import ENGINES
from kernel_provisioner.errors import BackIntelError

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor. ``remedy`` is empty where nothing is to be done.

    ``engine`` is the one that alone needs what was checked.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""
    engine: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return the JSON form."""
        return {
            "name": self.name,
            "status": self.status,
            "found": self.found,
            "remedy": self.remedy,
        }


def judge(checks: Iterable[Check]) -> list[Check]:
    """Return the checks as they weigh on this host, and a last one of the default engine."""
    checks = list(checks)
    unusable = {check.engine for check in checks if check.engine and check.status == "fail"}
    others = [name for name in ENGINES if name not in unusable]
    if others:
        checks = [
            replace(check, status="warn") if check.engine and check.status == "fail" else check
            for check in checks
        ]
    booted = {check.name for check in checks if check.status == "ok"}
    proven = [name for name in others if f"boot proof {name}" in booted]
    return [*checks, *run_step("default engine", lambda: _default_engine(others, proven))]


def _default_engine(usable: list[str], proven: list[str]) -> Iterable[Check]:
    default = standing_engine(os.environ)
    if default in proven:
        yield Check("default engine", "ok", f"{default}: for each run that names none")
    elif default in usable:
        yield Check(
            "default engine",
            "warn",
            f"{default}, which has not been booted here yet",
            "run `backintel sandbox check --boot`.",
        )
    elif usable:
        yield Check(
            "default engine",
            "warn",
            f"{default} cannot run here as it is, and nothing takes its place by itself",
            f"mend what is said of {default} above, or choose {usable[0]}: `--engine {usable[0]}` "
            "of `backintel run` and `backintel kernel install`.",
        )
    else:
        yield Check(
            "default engine",
            "fail",
            f"{default}; as this host is, no engine can run",
            "mend what is said of one engine above.",
        )


def run_step(name: str, step: Callable[[], Iterable[Check]], engine: str = "") -> list[Check]:
    """Return what a step found; an error is a failure, of ``engine`` if that alone needs it."""
    try:
        return list(step())
    except BackIntelError as error:
        found = f"{error.phase}: {error.message}" if error.phase else error.message
        return [Check(name, "fail", found, error.remedy, engine)]
    except (OSError, ValueError) as error:
        found = f"the check itself failed: {error}"
        return [Check(name, "fail", found, "report this.", engine)]


def table(checks: Iterable[Check]) -> str:
    """Return the checks as lines for people; remedies stand below what they remedy."""
    checks = list(checks)
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        lines.append(f"{check.status:<4}  {check.name:<{width}}  {check.found}")
        if check.remedy:
            lines.append(f"{'':<4}  {'':<{width}}  -> {check.remedy}")
    return "\n".join(lines) + "\n"
