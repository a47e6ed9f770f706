"""Regenerates ``pins.json`` from the wheels named on the command line.

Run as ``python -m kernel_provisioner.engines.smolvm.pin WHEEL...`` by a maintainer after reviewing
a new release of smolmachines; the wheels come from ``pip download --no-deps --only-binary :all:
--platform PLATFORM smolmachines==VERSION``, one for each platform.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path

_WHEEL = re.compile(
    r"smolmachines-(?P<version>[0-9.]+)-cp39-abi3-"
    r"(?P<system>manylinux|macosx)_[0-9]+_[0-9]+_(?P<arch>x86_64|aarch64|arm64)\.whl"
)
_SYSTEMS = {"manylinux": "linux", "macosx": "darwin"}


def pins_of(wheels: list[Path]) -> dict[str, object]:
    """Return the lock: version and, for each platform, sha256 by path of every file.

    Raises ValueError for a file that is no wheel of smolmachines, or wheels of two versions.
    """
    versions: set[str] = set()
    files: dict[str, dict[str, str]] = {}
    for wheel in wheels:
        match = _WHEEL.fullmatch(wheel.name)
        if match is None:
            raise ValueError(f"{wheel.name} is not a wheel of smolmachines.")
        versions.add(match["version"])
        with zipfile.ZipFile(wheel) as archive:
            files[f"{_SYSTEMS[match['system']]}-{match['arch']}"] = {
                name: hashlib.sha256(archive.read(name)).hexdigest()
                for name in sorted(archive.namelist())
                # The installer rewrites this list of the others.
                if not name.endswith(("/", ".dist-info/RECORD"))
            }
    if len(versions) != 1:
        raise ValueError(f"wheels of one version are needed, not of {sorted(versions)}.")
    return {"distribution": "smolmachines", "version": versions.pop(), "files": files}


if __name__ == "__main__":
    lock = pins_of([Path(argument) for argument in sys.argv[1:]])
    text = json.dumps(lock, indent=2, sort_keys=True) + "\n"
    Path(__file__).with_name("pins.json").write_text(text)
