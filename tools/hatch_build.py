"""Build hook: a wheel carries the launcher's kernel and the front end of JupyterLab, already built.

A wheel without the front end would install and show nothing, so a missing build is an error. An
editable install of a checkout needs no Node: it carries the front end if it was built, else goes
without. It leaves the kernel to `backintel kernel install`, whose file pip would replace.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNEL = "share/jupyter/kernels/backintel-sandbox"
BUILT = "build/labextension"
TARGET = "share/jupyter/labextensions/@backintel/sandbox"


class FrontEndHook(BuildHookInterface[Any]):
    """Adds what `make lab-build` made to the wheel's data files."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling. ``version`` is ``standard`` or ``editable``. Raises OSError."""
        if self.target_name == "wheel" and version == "standard":
            build_data["shared_data"]["kernel_provisioner/resources"] = KERNEL
        if not (Path(self.root) / BUILT / "package.json").is_file():
            if version == "editable":
                return
            raise FileNotFoundError(
                f"{BUILT} is missing: the JupyterLab extension was not built. "
                "Run `make lab-build` first, or install the released wheel."
            )
        if self.target_name == "wheel":
            build_data["shared_data"][BUILT] = TARGET
            build_data["shared_data"]["labextension/install.json"] = f"{TARGET}/install.json"
