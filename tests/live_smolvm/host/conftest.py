"""The real monitor on this very host, whether or not its KVM can boot the guest.

Part of `make test-faults` where there is a /dev/kvm. A host where the program does not start for
another reason skips these tests with it and the remedy, and so fails where skips are forbidden.
"""

from __future__ import annotations

import sys

import pytest

from kernel_provisioner.engines.smolvm import host
from kernel_provisioner.engines.smolvm.prepare import prepare
from kernel_provisioner.errors import EngineUnavailable, HostRefused
from kernel_provisioner.paths import StateDirs, state_dirs

# Emulated, an expansion takes many minutes; that machine gets its engine from outside.
collect_ignore = ["test_prepare.py"] if "backintel_slow" in sys.modules else []


@pytest.fixture(scope="session", autouse=True)
def able() -> None:
    """Skip what this host cannot show."""
    try:
        host.check_host()
    except (EngineUnavailable, HostRefused) as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def dirs(able: None) -> StateDirs:
    """The product's own directories, with the engine prepared."""
    found = state_dirs()
    prepare(found, print)
    return found
