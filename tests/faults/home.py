"""A home of the product for these tests alone: the machine's image, but records of their own.

Other sandboxes on the machine, and their sweeps, then have no part in what is counted here. As
root this takes bind mounts, in a mount namespace of this process, so that whatever becomes of the
tests no mount outlives them; they are read-only, so that no clean-up reaches the image through one.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from kernel_provisioner.engines.bwrap import linux
from kernel_provisioner.paths import StateDirs, state_dirs

TINY = """\
[profiles.tiny]
ram_mib = 192
cpus = 1
workspace_mib = 8
artifacts_mib = 32
temp_mib = 8
cell_deadline = 60
run_deadline = 120
on_deadline = "interrupt"
"""


def enter_own_mounts() -> None:
    """Give this process, and what it starts from now on, mounts that nobody else sees."""
    if os.geteuid() == 0:
        linux.unshare(linux.CLONE_NEWNS)
        linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)


def make(directory: Path) -> dict[str, str]:
    """Make a home in an empty directory; return the environment that leads to it.

    ``HOME`` is there too: a supervisor takes it along, which marks it and its launcher as ours.
    """
    user = directory / "user"
    config = user / ".config" / "backintel"
    config.mkdir(parents=True)
    (config / "backintel.toml").write_text(TINY)
    environment = {"HOME": str(user), "XDG_CONFIG_HOME": str(config.parent)}
    if os.geteuid() == 0:
        prepared = state_dirs({}).image
        image = directory / "image"
        image.mkdir()
        bind(prepared, image)
        return {**environment, "BACKINTEL_HOME": str(directory)}
    data = state_dirs(os.environ).data.parent
    return {**environment, "XDG_DATA_HOME": str(data), "XDG_STATE_HOME": str(directory)}


def unmake(directory: Path) -> None:
    """Take the image out of a home again, so that the home can be removed."""
    if os.geteuid() == 0:
        subprocess.run(["umount", "--lazy", directory / "image"], check=True)


def dirs_of(environment: Mapping[str, str]) -> StateDirs:
    """Return the directories that an environment of ``make`` leads to."""
    return state_dirs(environment)


def bind(source: Path, target: Path) -> None:
    """Mount ``source`` at ``target``, read-only, in our own mounts."""
    subprocess.run(["mount", "--bind", source, target], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", target], check=True)
