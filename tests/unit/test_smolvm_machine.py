"""What a machine may have of memory, processors and interfaces, compared with what was asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from session_request import PROFILE, SESSION

from kernel_provisioner.engines.base import GuestSpec
from kernel_provisioner.engines.smolvm import attestation

MIB = 1 << 20


def told(asked_mib: int, has_mib: float, cpus: int = 1, interfaces: tuple[str, ...] = ()) -> str:
    spec = GuestSpec(
        session=SESSION,
        profile=replace(PROFILE, ram_bytes=asked_mib * MIB, cpus=1),
        image_root=Path("/image"),
        guest_code=Path("/code"),
        socket_dir=Path("/sockets"),
    )
    machine = {
        "memory_bytes": int(has_mib * MIB),
        "cpus": cpus,
        "interfaces": ["lo", "dummy0", *interfaces],
    }
    return "; ".join(attestation._machine(machine, spec))


@pytest.mark.parametrize(("asked", "has"), [(768, 765), (768, 768), (4096, 4033)])
def test_what_a_real_machine_has_is_accepted(asked: int, has: float) -> None:
    assert told(asked, has) == ""


@pytest.mark.parametrize(("asked", "has"), [(320, 326.3), (512, 513.6), (768, 769), (768, 640)])
def test_memory_that_was_not_asked_for_is_a_deviation(asked: int, has: float) -> None:
    assert told(asked, has).endswith(f"not {asked * MIB}")


def test_processors_and_interfaces_are_compared() -> None:
    assert told(768, 765, cpus=2) == "the machine has 2 CPUs, not 1"
    assert told(768, 765, interfaces=("eth0",)) == "the machine has the network interfaces eth0"
