"""The smolvm engine: one Linux microVM for each session (spec B)."""

from kernel_provisioner.engines.smolvm.engine import SmolvmEngine

__all__ = ["SmolvmEngine"]
