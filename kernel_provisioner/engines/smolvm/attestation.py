"""Compares what the microVM read back with what was asked (spec D3); pure.

The kernel's process is judged by the same rules as on bwrap: its enclosure is made to be the same.
What is added here is the machine around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kernel_provisioner.engines.base import GuestSpec
from kernel_provisioner.engines.bwrap import attestation

_SMALLEST_SHARE = 0.85
"""Of the memory asked for, the guest's kernel keeps some for itself."""
_WITHOUT_NETWORK = frozenset({"lo", "dummy0"})


def deviations(message: Mapping[str, Any], spec: GuestSpec, read_only: frozenset[str]) -> list[str]:
    """Return every fact that is not as asked, one sentence each; empty is what a start needs."""
    try:
        facts, machine = message["attest"], message["vm"]
        found = attestation.deviations(
            facts,
            spec.session,
            spec.profile,
            read_only,
            machine["namespaces"],
            groups_dropped=True,
        )
        return found + list(_machine(machine, spec))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [f"the attestation is incomplete ({type(error).__name__}: {error})"]


def _machine(machine: Mapping[str, Any], spec: GuestSpec) -> Iterator[str]:
    asked = spec.profile.ram_bytes
    memory = int(machine["memory_bytes"])
    if not _SMALLEST_SHARE * asked <= memory <= asked:
        yield f"the machine has {memory} bytes of memory, not {asked}"
    if machine["cpus"] != spec.profile.cpus:
        yield f"the machine has {machine['cpus']} CPUs, not {spec.profile.cpus}"
    others = sorted(set(machine["interfaces"]) - _WITHOUT_NETWORK)
    if others:
        yield f"the machine has the network interfaces {', '.join(map(str, others))[:200]}"


def recorded(message: Mapping[str, Any]) -> dict[str, object]:
    """Return what the receipt keeps of the machine."""
    machine = message["vm"]
    return {
        "guest_kernel": str(machine["kernel"])[:80],
        "guest_memory_bytes": int(machine["memory_bytes"]),
        "guest_cpus": int(machine["cpus"]),
    }
