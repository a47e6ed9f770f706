"""The bwrap engine: Linux namespaces, seccomp and cgroups around a pinned bubblewrap."""

from kernel_provisioner.engines.bwrap.engine import BwrapEngine
from kernel_provisioner.engines.bwrap.guest import BwrapGuest

__all__ = ["BwrapEngine", "BwrapGuest"]
