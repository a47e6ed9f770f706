"""The bwrap engine: Linux namespaces, seccomp and cgroups around a pinned bubblewrap."""

from kernel_provisioner.engines.bwrap.engine import BwrapEngine

__all__ = ["BwrapEngine"]
