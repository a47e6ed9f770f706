"""Decides what of the image, the guest's code and the sources is bound where.

Reads only directory listings and links of the verified image. Top-level links are recreated and
/etc, /opt and /opt/backintel are bound entry by entry, so that every mount point of ours lies in
bubblewrap's own tmpfs (see command.check_mount_points).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel_provisioner.engines.base import GuestSpec
from kernel_provisioner.engines.bwrap.command import ETC, GUEST_DIR, Link

_PROVIDED = frozenset(
    {"proc", "sys", "dev", "tmp", "run", "workspace", "artifacts", "sources"}
    | {"home", "root", "srv", "mnt", "media", "boot", "lost+found"}
)
"""Top-level names that the sandbox provides itself or leaves out, whatever the image has."""
_SPLIT = {
    "etc": ETC | {"mtab"},
    "opt": frozenset(),
    "opt/backintel": frozenset({"guest", "runtime"}),
}
"""Directories bound entry by entry, with the names left out."""


@dataclass(frozen=True, slots=True)
class Item:
    """One thing of the host to bind: ``base`` names which tree, ``inside`` the path in it."""

    target: str
    base: str
    inside: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """Trees of the host by name, what is bound from them, and the links to make."""

    trees: dict[str, Path]
    items: tuple[Item, ...]
    links: tuple[Link, ...]


def layout(spec: GuestSpec) -> Layout:
    """Return the layout of one guest. Raises OSError if the image cannot be listed."""
    trees = {"image": spec.image_root, "guest": spec.guest_code}
    items = []
    links = []
    for entry in _image(spec.image_root):
        if isinstance(entry, Link):
            links.append(entry)
        else:
            items.append(entry)
    items.append(Item(GUEST_DIR, "guest"))
    for number, source in enumerate(spec.sources):
        name = f"source-{number}"
        trees[name] = source.path
        items.append(Item(f"/sources/{source.name}", name))
    return Layout(trees, tuple(items), tuple(links))


def _image(root: Path, directory: str = "") -> Iterator[Item | Link]:
    left_out = _SPLIT[directory] if directory else _PROVIDED
    with os.scandir(root / directory) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    for entry in entries:
        if entry.name in left_out:
            continue
        inside = f"{directory}/{entry.name}".lstrip("/")
        if entry.is_symlink():
            yield Link(f"/{inside}", os.readlink(entry.path))
        elif inside in _SPLIT:
            yield from _image(root, inside)
        else:
            yield Item(f"/{inside}", "image", inside)
