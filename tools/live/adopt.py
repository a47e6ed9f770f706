"""Gives the emulated machine receipts for the image and the engine that its disks hold.

A receipt lists inodes and times, which differ on every file system; digesting a gigabyte under
emulation would take minutes. The contents were digested where the disks were made. Test use only.

    python adopt.py IMAGE ENGINE FACTS [OWNER]

``OWNER`` is the number of a user (and of its group) who is given all that is made; the image's
files, which stay on their disk, are mounted as if they were theirs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from kernel_provisioner.engines.smolvm import prepare, release
from kernel_provisioner.images.receipt import CURRENT, ROOT, write_receipt
from kernel_provisioner.paths import state_dirs


def main() -> None:
    """Adopt ``image`` (a mounted tree) and ``engine`` (a directory to copy)."""
    image, engine, facts = (Path(argument) for argument in sys.argv[1:4])
    owner = int(sys.argv[4]) if sys.argv[4:] else os.geteuid()
    dirs = state_dirs()
    place = dirs.image / "live"
    (place / ROOT).mkdir(parents=True)
    owned = ["-o", f"X-mount.idmap=b:0:{owner}:1"] if owner else []
    subprocess.run(["/usr/bin/mount", "--bind", *owned, str(image), str(place / ROOT)], check=True)
    told = json.loads(facts.read_text())
    write_receipt(place, **told["image"])
    (dirs.image / CURRENT).symlink_to("live")

    pins = release.load_pins()
    target = release.release_dir(dirs, pins)
    target.parent.mkdir(parents=True)
    subprocess.run(["/usr/bin/cp", "-a", "--sparse=always", str(engine), str(target)], check=True)
    shutil.rmtree(target / "lost+found", ignore_errors=True)
    # Before the receipt, which lists the times of such changes.
    give(target, owner)
    prepare.write_receipt(release.receipt_path(target), target, pins)
    for path in (dirs.data, dirs.image, place, *place.iterdir(), dirs.engines, target.parent):
        if path != place / ROOT:
            os.chown(path, owner, owner)
    os.chown(release.receipt_path(target), owner, owner)


def give(tree: Path, owner: int) -> None:
    """Let a user own a directory and all below it, links themselves included."""
    os.chown(tree, owner, owner)
    for directory, names, files in os.walk(tree):
        for name in (*names, *files):
            os.chown(os.path.join(directory, name), owner, owner, follow_symlinks=False)


main()
