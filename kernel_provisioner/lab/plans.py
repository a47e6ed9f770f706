"""What a kernel would be given if it were started now: the owner's configuration, nothing else."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

from kernel_provisioner.config import known_profiles
from kernel_provisioner.engines.registry import get_engine
from kernel_provisioner.errors import ConfigError, NotFound
from kernel_provisioner.kernelspec import PROVISIONER
from kernel_provisioner.provisioner import SandboxProvisioner
from kernel_provisioner.session.receipt import stated_endpoints
from kernel_provisioner.session.status import described_sources


def profiles() -> list[dict[str, Any]]:
    """Return all profiles by name. Raises ConfigError."""
    return [asdict(profile) for _, profile in sorted(known_profiles().items())]


def plan(kernel: str, specs: KernelSpecManager, parent: Any) -> dict[str, Any]:
    """Return the ``Plan`` of a kernelspec; ``parent`` holds Jupyter's own configuration.

    Raises NotFound for a kernel that is not ours, and what a start would be refused with.
    """
    try:
        spec = specs.get_kernel_spec(kernel)
        entry = spec.metadata["kernel_provisioner"]
        ours = entry["provisioner_name"] == PROVISIONER
        config = dict(entry.get("config", {}))
    except (NoSuchKernel, KeyError, TypeError, ValueError):
        ours, config, spec = False, {}, None
    if not ours:
        raise NotFound(f"no kernel {kernel!r} starts a sandbox.")
    try:
        known = {name: value for name, value in config.items() if name in _TRAITS}
        settings = SandboxProvisioner(kernel_id="", kernel_spec=spec, parent=parent, **known).plan()
    except ValueError as error:  # a TraitError: a value of the wrong type
        raise ConfigError(f"kernelspec: {error}", remedy="correct the value.") from None
    engine = get_engine(settings.engine)
    sources = [{"name": s.name, "path": str(s.path), "kind": s.kind} for s in settings.sources]
    return {
        "kernel": kernel,
        "engine": settings.engine,
        "isolation": engine.isolation,
        "network": "off",
        "limits": asdict(settings.profile),
        "sources": described_sources(sources),
        "endpoints": stated_endpoints(settings.endpoints),
    }


_TRAITS = frozenset(SandboxProvisioner.class_trait_names(config=True))
