"""The real monitor on this very host, whether or not its KVM can boot the guest."""

from __future__ import annotations

import os

import pytest

from kernel_provisioner.engines.smolvm.prepare import prepare
from kernel_provisioner.paths import StateDirs, state_dirs


@pytest.fixture(scope="session")
def dirs() -> StateDirs:
    """The product's own directories, with the engine prepared."""
    found = state_dirs()
    prepare(found, print)
    assert os.access("/dev/kvm", os.F_OK)
    return found
