"""Giving an image tree its final form: links, what is stripped, modes, owners, times, mount points.

The tree is a staging directory that only this process writes to; its links may still point
anywhere, so nothing here follows one.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from kernel_provisioner.errors import PrepareFailed
from kernel_provisioner.images.digest import walk

MERGED = ("bin", "sbin", "lib", "lib64")
MOUNT_POINTS = (
    "proc",
    "sys",
    "dev",
    "tmp",
    "run",
    "workspace",
    "artifacts",
    "sources",
    "opt/backintel/guest",
    "opt/backintel/runtime",
)
MODIFIED = 1_704_067_200
"""All modification times (2024-01-01): fontconfig's cache compares its directories' times."""


def make_skeleton(root: Path) -> None:
    """Make an empty root with merged /usr."""
    root.mkdir(mode=0o755)
    for name in MERGED:
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")


def strip(root: Path, patterns: Sequence[str]) -> None:
    """Remove what the glob patterns (relative to the root) match; links are removed, not followed.

    Raises PrepareFailed for a pattern that is absolute or leaves the root.
    """
    for pattern in patterns:
        if pattern.startswith("/") or ".." in pattern.split("/"):
            raise PrepareFailed(f"the strip pattern {pattern!r} leaves the image.")
        for path in list(root.glob(pattern)):
            remove(path)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole directory; a missing one is fine."""
    try:
        directory = stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if directory:
        shutil.rmtree(path)
    else:
        path.unlink()


def relative_target(path: str, target: str) -> str:
    """Return an absolute link target as seen from the link at ``path`` (relative to the root).

    The link's own directory is a real one, so one ``..`` a component leads to the root.
    """
    depth = path.count("/")
    return "../" * depth + (target.lstrip("/") or ".")


def relativize_links(root: Path) -> None:
    """Make every absolute link relative, as it would resolve with the image as root."""
    for entry in list(walk(root)):
        if entry.kind == "l" and entry.target.startswith("/"):
            path = root / entry.path
            path.unlink()
            path.symlink_to(relative_target(entry.path, entry.target))


def drop_dangling(root: Path) -> None:
    """Remove links to what was stripped or what a maintainer script would have made."""
    for entry in list(walk(root)):
        if entry.kind == "l" and not (root / entry.path).exists():
            (root / entry.path).unlink()


def finish(root: Path, owner: int, group: int) -> None:
    """Set owner, modes and times of everything: 0755 for directories and programs, else 0644."""
    for entry in [*walk(root)][::-1]:
        _finish(root / entry.path, entry.kind, entry.mode, owner, group)
    _finish(root, "d", 0o755, owner, group)


def _finish(path: Path, kind: str, mode: int, owner: int, group: int) -> None:
    info = path.lstat()
    if (info.st_uid, info.st_gid) != (owner, group):
        os.lchown(path, owner, group)
    if kind != "l":
        path.chmod(0o755 if kind == "d" or mode & 0o111 else 0o644)
    os.utime(path, (MODIFIED, MODIFIED), follow_symlinks=False)


def make_mount_points(root: Path) -> None:
    """Make the directories that a guest's mounts cover, empty."""
    for name in MOUNT_POINTS:
        remove(root / name)
        (root / name).mkdir(parents=True)


def link_if_missing(root: Path, name: str, target: str) -> None:
    """Make link ``name`` to ``target`` beside it, if its target exists and nothing is there."""
    path = root / name
    if not os.path.lexists(path) and (path.parent / target).exists():
        path.symlink_to(target)
