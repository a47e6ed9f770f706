"""Gives the emulated machine receipts for the image and the engine that its disks hold.

A receipt lists inodes and times, which differ on every file system; digesting a gigabyte under
emulation would take minutes. The contents were digested where the disks were made. Test use only.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from kernel_provisioner.engines.smolvm import prepare, release
from kernel_provisioner.images.receipt import CURRENT, ROOT, write_receipt
from kernel_provisioner.paths import state_dirs


def main() -> None:
    """Adopt ``image`` (a mounted tree) and ``engine`` (a directory to copy)."""
    image, engine, facts = (Path(argument) for argument in sys.argv[1:])
    dirs = state_dirs()
    place = dirs.image / "live"
    (place / ROOT).mkdir(parents=True)
    subprocess.run(["/usr/bin/mount", "--bind", str(image), str(place / ROOT)], check=True)
    told = json.loads(facts.read_text())
    write_receipt(place, **told["image"])
    (dirs.image / CURRENT).symlink_to("live")

    pins = release.load_pins()
    target = release.release_dir(dirs, pins)
    target.parent.mkdir(parents=True)
    subprocess.run(["/usr/bin/cp", "-a", "--sparse=always", str(engine), str(target)], check=True)
    shutil.rmtree(target / "lost+found", ignore_errors=True)
    prepare.write_receipt(release.receipt_path(target), target, pins)


main()
