"""What leaves a sandbox: a hostile tar stream is validated, then published all or nothing."""

from kernel_provisioner.artifacts.publish import Artifact, Owner, publish
from kernel_provisioner.artifacts.tarstream import SUFFIXES, ExportLimits

__all__ = ["SUFFIXES", "Artifact", "ExportLimits", "Owner", "publish"]
