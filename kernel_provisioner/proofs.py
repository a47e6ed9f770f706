"""Boot proofs (spec B): that an engine started a sandbox here, in this boot, with these files.

A proof is valid only for the boot, the device and the engine files it was made with, so a new
kernel, an exchanged engine or another machine needs a new one. Each try to boot takes back the
proof of the one before. ``auto`` rests on proofs alone: it never tries an engine, and it never
falls back to one after a start failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_provisioner.engines.base import Engine, EngineFacts
from kernel_provisioner.engines.registry import ENGINES, get_engine
from kernel_provisioner.errors import (
    BackIntelError,
    EngineUnavailable,
    PrepareFailed,
    StartFailed,
)
from kernel_provisioner.paths import StateDirs
from kernel_provisioner.processes import boot_id
from kernel_provisioner.records import write_json

SCHEMA = "backintel.proof/1"
_BOOT_PROFILE = "benchmark"
_DEVICES = {"smolvm": Path("/dev/kvm")}
_BOOT_S = 90.0
_PREPARE = (
    "run `backintel sandbox check --boot`, which boots an engine and remembers that it works."
)


@dataclass(frozen=True, slots=True)
class ProofKey:
    """What a proof is bound to. ``device`` is empty for an engine that needs none."""

    engine: str
    boot: str
    device: str
    digest: str

    def as_dict(self) -> dict[str, str]:
        """Return the JSON form."""
        return {
            "engine": self.engine,
            "boot": self.boot,
            "device": self.device,
            "digest": self.digest,
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine and why it was chosen, in words for a person."""

    engine: str
    requested: str
    why: str


def proof_key(facts: EngineFacts) -> ProofKey:
    """Return the key of this boot for an engine whose files were verified."""
    listing = json.dumps(sorted(facts.digests.items())).encode()
    path = _DEVICES.get(facts.name)
    device = "" if path is None else str(path.stat().st_rdev)
    return ProofKey(facts.name, boot_id(), device, hashlib.sha256(listing).hexdigest())


def store(dirs: StateDirs, key: ProofKey, phases: Mapping[str, float]) -> Path:
    """Write the proof of a boot that worked. Raises PrepareFailed."""
    path = _path(dirs, key.engine)
    facts = {"schema": SCHEMA, **key.as_dict(), "phases_s": dict(phases), "made": time.time()}
    try:
        dirs.proofs.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_json(path, facts)
    except OSError as error:
        raise _unwritable(path, error) from None
    return path


def discard(dirs: StateDirs, engine: str) -> None:
    """Remove the engine's proof, if there is one, before a boot is tried.

    Raises PrepareFailed if it cannot be removed: it would outlive a boot that fails.
    """
    path = _path(dirs, engine)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> PrepareFailed:
    return PrepareFailed(
        f"boot proofs cannot be kept in {path.parent} ({error.strerror}).",
        remedy="let this user write there, and see that there is space; then prepare again.",
    )


def is_valid(dirs: StateDirs, key: ProofKey) -> bool:
    """Whether a proof for exactly this key is stored."""
    try:
        with _path(dirs, key.engine).open("rb") as file:
            data = json.loads(file.read(1 << 16))
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        return False
    return all(data.get(name) == value for name, value in key.as_dict().items())


def _path(dirs: StateDirs, engine: str) -> Path:
    return dirs.proofs / f"{engine}.json"


def resolve_auto(
    dirs: StateDirs, make: Callable[[str], Engine] = get_engine, names: tuple[str, ...] = ENGINES
) -> Choice:
    """Return the strongest engine with a valid boot proof.

    Raises EngineUnavailable, saying of each engine why it was passed over.
    """
    reasons = []
    for name in names:
        try:
            engine = make(name)
            facts = engine.verify()
        except BackIntelError as error:
            reasons.append(f"{name}: {error.message}")
            continue
        if is_valid(dirs, proof_key(facts)):
            why = f"the strongest engine with a boot proof of this boot ({engine.isolation})"
            return Choice(name, "auto", why)
        reasons.append(f"{name}: it was not booted since this machine started")
    raise EngineUnavailable(
        f"`auto` finds no engine that is known to work here ({'; '.join(reasons)}).",
        remedy=_PREPARE,
    )


async def boot(engine: str, on_phase: Callable[[str, float], None]) -> dict[str, float]:
    """Start a sandbox of the smallest profile, reach its kernel, end it; return phase -> seconds.

    Raises BackIntelError if any of it fails.
    """
    from kernel_provisioner.provisioner import SandboxKernelManager

    log = logging.getLogger("backintel.boot")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    phases: dict[str, float] = {}

    def note(name: str, seconds: float) -> None:
        phases[name] = seconds
        on_phase(name, seconds)

    manager: Any = SandboxKernelManager(
        command_line={"engine": engine, "profile": _BOOT_PROFILE},
        default_profile=_BOOT_PROFILE,
        on_phase=note,
        log=log,
    )
    try:
        async with asyncio.timeout(_BOOT_S):
            await manager.start_kernel()
            client = manager.client()
            client.start_channels()
            try:
                await client.wait_for_ready(timeout=_BOOT_S)
            finally:
                client.stop_channels()
    except (TimeoutError, RuntimeError) as error:
        why = str(error) or "no reply in time"
        raise StartFailed(f"the kernel did not answer ({why}).", phase="boot") from None
    finally:
        with contextlib.suppress(RuntimeError):
            await manager.shutdown_kernel(now=True)
        if manager.provisioner is not None:
            await manager.provisioner.cleanup()
        await manager.cleanup_resources()
    return phases
