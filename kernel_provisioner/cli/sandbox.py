"""``backintel sandbox prepare|check|gc``."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from kernel_provisioner import proofs
from kernel_provisioner.cli.output import emit, say
from kernel_provisioner.config import standing_engine
from kernel_provisioner.engines.registry import get_engine
from kernel_provisioner.errors import EXIT_DONE, EXIT_INFRASTRUCTURE, BackIntelError
from kernel_provisioner.paths import StateDirs, state_dirs


def prepare(options: argparse.Namespace) -> int:
    """Make the image, prove once a boot that a sandbox starts with it, prepare the microVM engine.

    The proof is of bwrap, which needs the least: a host that cannot run the default engine is
    prepared too, and its owner is told what to choose.
    """
    from kernel_provisioner.images.store import ImageStore

    dirs = state_dirs()
    standing = standing_engine(os.environ)
    engine = get_engine("bwrap")
    # Before minutes of building: an engine that cannot work here makes the image useless.
    facts = engine.verify()
    image = ImageStore(dirs).prepare(
        say, image_archive=options.image_archive, image_sha256=options.image_sha256
    )
    refusals = _prepare_machine(dirs)
    key = proofs.proof_key(facts)
    booted = not proofs.is_valid(dirs, key)
    proof = prove(dirs, engine.name) if booted else dirs.proofs / f"{engine.name}.json"
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
                "engine": {"name": facts.name, "version": facts.version},
                "proof": {"path": str(proof), "booted": booted},
                "default_engine": {
                    "name": standing,
                    "refusal": refusal.as_dict() if refusal else None,
                },
            }
        )
    else:
        print(f"image   {image.id} ({image.source}, Python {image.python})")
        print(f"engine  {facts.name} {facts.version} ({engine.isolation})")
        print(f"proof   {'booted just now' if booted else 'still valid'}")
        print(f"default {_default(dirs, standing, refusal)}")
    return EXIT_DONE


def _default(dirs: StateDirs, name: str, refusal: BackIntelError | None) -> str:
    """Return what runs that name no engine will meet."""
    if refusal is not None:
        return f"{name}, which cannot run here, and nothing takes its place by itself: {refusal}"
    engine = get_engine(name)
    if proofs.is_valid(dirs, proofs.proof_key(engine.verify())):
        return f"{name} ({engine.isolation})"
    return f"{name} ({engine.isolation}), not booted yet: see `backintel sandbox check --boot`"


def _prepare_machine(dirs: StateDirs) -> dict[str, BackIntelError]:
    """Prepare the microVM engine where this host can run one; return by name what refuses it."""
    from kernel_provisioner.engines.smolvm.prepare import prepare as prepare_release

    try:
        prepare_release(dirs, say)
    except BackIntelError as error:
        say(f"the engine smolvm is left out: {error}")
        return {"smolvm": error}
    return {}


def prove(dirs: StateDirs, engine: str) -> Path:
    """Boot an engine and store the proof. Raises BackIntelError."""
    say(f"booting a sandbox with {engine} to prove that it works here")
    facts = get_engine(engine).verify()
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
        sys.stdout.write(doctor.table(checks))
    return EXIT_INFRASTRUCTURE if failed else EXIT_DONE


def collect(options: argparse.Namespace) -> int:
    """Remove what sessions left whose supervisor was killed."""
    from kernel_provisioner.records import sweep

    lines = sweep(state_dirs())
    if options.json:
        emit({"schema": "backintel.gc/1", "done": lines})
    else:
        print("\n".join(lines) or "nothing was left behind.")
    return EXIT_DONE


COMMANDS = {"prepare": prepare, "check": check, "gc": collect}
