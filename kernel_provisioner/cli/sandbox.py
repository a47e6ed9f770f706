"""``backintel sandbox prepare|check|gc``."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from kernel_provisioner import proofs
from kernel_provisioner.checks import table
from kernel_provisioner.cli.output import emit, say
from kernel_provisioner.config import standing_engine
from kernel_provisioner.engines.registry import ENGINES, get_engine
from kernel_provisioner.errors import (
    EXIT_DONE,
    EXIT_INFRASTRUCTURE,
    AttestationFailed,
    BackIntelError,
    EngineUnavailable,
    HostRefused,
    PrepareFailed,
    StartFailed,
)
from kernel_provisioner.paths import StateDirs, state_dirs

_CANNOT_RUN = (EngineUnavailable, HostRefused, StartFailed, AttestationFailed)
"""What speaks against one engine. Anything else would meet the next engine just the same."""


def prepare(options: argparse.Namespace) -> int:
    """Prepare the engines and the image, and prove once a boot that a sandbox starts with them.

    What one engine lacks is told, and ends nothing as long as another one can run. What is wrong
    whatever the engine (configuration, image, a held lock, a deadline) ends it at once.
    """
    from kernel_provisioner.images.store import ImageStore, check_choice

    check_choice(options.image_archive, options.image_sha256)
    dirs = state_dirs()
    standing = standing_engine(os.environ)
    # Before minutes of building: where no engine can work an image is useless.
    refusals = _prepare_engines(dirs)
    image = ImageStore(dirs).prepare(
        say, image_archive=options.image_archive, image_sha256=options.image_sha256
    )
    proven, booted = _prove_one(dirs, refusals)
    facts = {name: get_engine(name).verify() for name in ENGINES if name not in refusals}
    refusal = refusals.get(standing)
    if options.json:
        emit(
            {
                "schema": "backintel.prepare/1",
                "image": {
                    "id": image.id,
                    "root": str(image.root),
                    "source": image.source,
                    "python": image.python,
                },
                "engines": {name: fact.version for name, fact in facts.items()},
                "proof": {"engine": proven, "booted": booted},
                "default_engine": {
                    "name": standing,
                    "refusal": refusal.as_dict() if refusal else None,
                },
            }
        )
    else:
        print(f"image   {image.id} ({image.source}, Python {image.python})")
        for name, fact in facts.items():
            print(f"engine  {name} {fact.version} ({get_engine(name).isolation})")
        print(f"proof   {proven} {'booted just now' if booted else 'still valid'}")
        print(f"default {_default(dirs, standing, refusal)}")
    return EXIT_DONE


def _prove_one(dirs: StateDirs, refusals: dict[str, BackIntelError]) -> tuple[str, bool]:
    """Return an engine that booted since this machine started, and whether that was just now.

    The weakest first: it boots in a second, and a microVM only with ``check --boot`` or where
    nothing else does. Raises what refuses the last engine, and at once what is not for an engine
    to answer for.
    """
    for name in reversed(ENGINES):
        if name in refusals:
            continue
        try:
            if proofs.is_valid(dirs, proofs.proof_key(get_engine(name).verify())):
                return name, False
            prove(dirs, name)
        except _CANNOT_RUN as error:
            _leave_out(refusals, name, error)
        else:
            return name, True
    raise AssertionError("the last engine's refusal was raised")


def _prepare_engines(dirs: StateDirs) -> dict[str, BackIntelError]:
    """Prepare the engines that this host can run; return by name what refuses the others.

    Raises what refuses the last one if it leaves none, and LockTimeout at once.
    """
    from kernel_provisioner.engines.smolvm.prepare import prepare as prepare_release

    refusals: dict[str, BackIntelError] = {}
    steps: dict[str, Callable[[], object]] = {
        "smolvm": lambda: prepare_release(dirs, say),
        "bwrap": get_engine("bwrap").verify,
    }
    for name, step in steps.items():
        try:
            step()
        except (*_CANNOT_RUN, PrepareFailed) as error:
            _leave_out(refusals, name, error)
    return refusals


def _leave_out(refusals: dict[str, BackIntelError], name: str, error: BackIntelError) -> None:
    """Note what refuses an engine and tell it. Raises it if no engine is left."""
    refusals[name] = error
    if len(refusals) == len(ENGINES):
        raise error
    say(f"the engine {name} is left out: {error}")


def _default(dirs: StateDirs, name: str, refusal: BackIntelError | None) -> str:
    """Return what runs that name no engine will meet."""
    if refusal is not None:
        return f"{name}, which cannot run here, and nothing takes its place by itself: {refusal}"
    engine = get_engine(name)
    if proofs.is_valid(dirs, proofs.proof_key(engine.verify())):
        return f"{name} ({engine.isolation})"
    return f"{name} ({engine.isolation}), not booted yet: see `backintel sandbox check --boot`"


def prove(dirs: StateDirs, engine: str) -> Path:
    """Boot an engine and store the proof. Raises BackIntelError.

    From the first moment of the try until it has worked there is no proof: one that failed, or
    that was interrupted, leaves none.
    """
    say(f"booting a sandbox with {engine} to prove that it works here")
    facts = get_engine(engine).verify()
    proofs.discard(dirs, engine)
    phases = asyncio.run(proofs.boot(engine, lambda name, seconds: None))
    say(f"booted in {max(phases.values(), default=0.0):.2f} s")
    return proofs.store(dirs, proofs.proof_key(facts), phases)


def check(options: argparse.Namespace) -> int:
    """Print what was checked, what was found, and what to do about it."""
    from kernel_provisioner import doctor

    checks = doctor.examine(state_dirs(), deep=options.deep, boot=options.boot)
    failed = [item for item in checks if item.status == "fail"]
    if options.json:
        emit(
            {
                "schema": "backintel.check/1",
                "ok": not failed,
                "checks": [item.as_dict() for item in checks],
            }
        )
    else:
        sys.stdout.write(table(checks))
    return EXIT_INFRASTRUCTURE if failed else EXIT_DONE


def collect(options: argparse.Namespace) -> int:
    """Remove what sessions left whose supervisor was killed; status 3 if something is left."""
    from kernel_provisioner.records import sweep

    swept = sweep(state_dirs())
    if options.json:
        emit({"schema": "backintel.gc/1", "done": swept.done, "left": swept.left})
    else:
        lines = [*swept.done, *(f"NOT REMOVED  {line}" for line in swept.left)]
        print("\n".join(lines) or "nothing was left behind.")
    if swept.left:
        say(f"backintel: {len(swept.left)} not removed; mend the reason and run this again.")
        return EXIT_INFRASTRUCTURE
    return EXIT_DONE


COMMANDS = {"prepare": prepare, "check": check, "gc": collect}
