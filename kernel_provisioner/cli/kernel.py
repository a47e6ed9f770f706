"""``backintel kernel install|uninstall|list``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kernel_provisioner import kernelspec, proofs
from kernel_provisioner.cli.output import emit, say
from kernel_provisioner.endpoints import parse_endpoints
from kernel_provisioner.engines.registry import DEFAULT_ENGINE, get_engine
from kernel_provisioner.errors import EXIT_DONE, BackIntelError
from kernel_provisioner.paths import state_dirs
from kernel_provisioner.sources import parse_sources

SCHEMA = "backintel.kernels/1"


def install(options: argparse.Namespace) -> int:
    """Install the kernelspec; say so if its engine could not start a kernel as this host is."""
    sources = {name: os.path.abspath(path) for name, path in parse_sources(options.source).items()}
    location = _location(options) or kernelspec.Location.default()
    name = options.name or kernelspec.KERNEL_NAME
    spec = kernelspec.build(
        engine=options.engine,
        profile=options.profile,
        sources=sources,
        endpoints=parse_endpoints(options.endpoint),
        name=name,
    )
    path = kernelspec.install(spec, name, location)
    engine = get_engine(options.engine or DEFAULT_ENGINE)
    if options.json:
        emit(
            {"schema": SCHEMA, "installed": str(path), "isolation": engine.isolation, "spec": spec}
        )
    else:
        print(f"installed {spec['display_name']!r} as {name} in {path}")
        print(f"isolation {engine.isolation}")
    try:
        proven = proofs.is_valid(state_dirs(), proofs.proof_key(engine.verify()))
    except BackIntelError as error:
        say(f"this kernel will not start here yet: {error}")
    else:
        if not proven:
            say(f"{engine.name} has not been booted here yet: `backintel sandbox check --boot`.")
    return EXIT_DONE


def uninstall(options: argparse.Namespace) -> int:
    """Remove the kernelspec."""
    path = kernelspec.uninstall(options.name or kernelspec.KERNEL_NAME, _location(options))
    if options.json:
        emit({"schema": SCHEMA, "removed": str(path)})
    else:
        print(f"removed {path}")
    return EXIT_DONE


def show(options: argparse.Namespace) -> int:
    """List the kernelspecs of this product."""
    found = kernelspec.installed()
    if options.json:
        kernels = [
            {
                "name": item.name,
                "path": str(item.path),
                "engine": item.engine,
                "profile": item.profile,
                "sources": dict(item.sources),
                "endpoints": dict(item.endpoints),
            }
            for item in found
        ]
        emit({"schema": SCHEMA, "kernels": kernels})
        return EXIT_DONE
    for item in found:
        print(f"{item.name}  engine {item.engine}  profile {item.profile}  {item.path}")
        for name, path in item.sources.items():
            print(f"    /sources/{name}  {path}")
        for name, target in item.endpoints.items():
            print(f"    endpoint {name}  {target}")
    if not found:
        print("no kernel is installed; run `backintel kernel install`.")
    return EXIT_DONE


def _location(options: argparse.Namespace) -> kernelspec.Location | None:
    if options.user:
        return kernelspec.Location(user=True)
    if options.sys_prefix:
        return kernelspec.Location(prefix=Path(sys.prefix))
    return kernelspec.Location(prefix=options.prefix) if options.prefix else None


COMMANDS = {"install": install, "uninstall": uninstall, "list": show}
