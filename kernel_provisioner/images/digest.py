"""The complete digest of an image tree: contents, modes, entries and links (spec C4).

Names and link targets of an imported image are hostile: links are resolved in memory, component by
component, as they would resolve with the image as root, and one that leaves it is refused.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_provisioner.errors import ImageInvalid
from kernel_provisioner.images import hashfiles

_MAX_LINKS = 40
_DIGEST = 32
_FILE_COST = 100_000
"""Opening a small file costs about what hashing this many bytes does."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry below the root. ``kind`` is f, d or l; ``target`` is set for links only."""

    path: str
    kind: str
    mode: int
    size: int
    target: str


def walk(root: Path) -> Iterator[Entry]:
    """Yield every entry below ``root`` in sorted tree order, links not followed.

    Raises ImageInvalid for anything but files, directories and links.
    """
    stack = [""]
    while stack:
        relative = stack.pop()
        with os.scandir(root / relative if relative else root) as scan:
            found = sorted(scan, key=lambda entry: os.fsencode(entry.name))
        below = []
        for item in found:
            path = f"{relative}/{item.name}" if relative else item.name
            info = item.stat(follow_symlinks=False)
            mode = stat.S_IMODE(info.st_mode)
            if stat.S_ISLNK(info.st_mode):
                yield Entry(path, "l", 0, 0, os.readlink(item.path))
            elif stat.S_ISDIR(info.st_mode):
                below.append(path)
                yield Entry(path, "d", mode, 0, "")
            elif stat.S_ISREG(info.st_mode):
                yield Entry(path, "f", mode, info.st_size, "")
            else:
                raise ImageInvalid(
                    f"/{path} in the image is a special file.",
                    remedy="build the image without devices, sockets and FIFOs.",
                )
        stack += reversed(below)


def escapes(path: str, links: Mapping[str, str]) -> bool:
    """Tell whether the link at ``path`` is absolute, loops, or ever steps above the root.

    ``links`` maps every link of the tree to its target; a dangling link inside is no escape.
    """
    at = path.split("/")[:-1]
    todo = links[path].split("/")[::-1]
    if links[path].startswith("/"):
        return True
    budget = _MAX_LINKS
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            if not at:
                return True
            at.pop()
            continue
        at.append(part)
        target = links.get("/".join(at))
        if target is None:
            continue
        budget -= 1
        if target.startswith("/") or budget < 0:
            return True
        at.pop()
        todo += target.split("/")[::-1]
    return False


def check_links(entries: Sequence[Entry]) -> None:
    """Raise ImageInvalid, naming the link, if one is absolute or leaves the root."""
    links = {entry.path: entry.target for entry in entries if entry.kind == "l"}
    for path, target in links.items():
        if escapes(path, links):
            raise ImageInvalid(
                f"/{path[:200]} in the image links to {target[:200]!r}, which leaves the image.",
                remedy="build the image with links that stay inside it.",
            )


def tree_digest(root: Path) -> str:
    """Return ``sha256:`` and the digest of the tree below ``root``: about 1.5 s a GB warm.

    Raises ImageInvalid for special files and for links that are absolute or leave the root; OSError
    if the tree changes meanwhile.
    """
    entries = list(walk(root))
    check_links(entries)
    digests = _hash_files(root, [entry for entry in entries if entry.kind == "f"])
    top = hashlib.sha256(b"backintel-tree-1\n")
    for entry in entries:
        value = entry.target if entry.kind == "l" else digests.get(entry.path, "")
        top.update(os.fsencode(f"{entry.kind}\0{entry.path}\0{entry.mode:o}\0{value}\0\n"))
    return f"sha256:{top.hexdigest()}"


def _hash_files(root: Path, files: list[Entry]) -> dict[str, str]:
    """Hash files, half of the bytes in a second process: threads contend for the interpreter."""
    ours: list[str] = []
    theirs: list[str] = []
    ours_size = theirs_size = 0
    for entry in sorted(files, key=lambda entry: -entry.size):
        if ours_size <= theirs_size:
            ours.append(entry.path)
            ours_size += entry.size + _FILE_COST
        else:
            theirs.append(entry.path)
            theirs_size += entry.size + _FILE_COST
    with tempfile.TemporaryFile() as names, tempfile.TemporaryFile() as answers:
        names.write(b"\0".join(os.fsencode(path) for path in theirs))
        names.seek(0)
        command = [sys.executable, "-I", "-S", hashfiles.__file__, os.fspath(root)]
        helper = subprocess.Popen(command, stdin=names, stdout=answers, env={})
        try:
            hashes = hashfiles.hash_files(os.fspath(root), ours)
            status = helper.wait()
        finally:
            if helper.poll() is None:
                helper.kill()
                helper.wait()
        answers.seek(0)
        raw = answers.read()
    if status != 0 or len(raw) != _DIGEST * len(theirs):
        raise OSError(errno.EIO, "the image could not be read completely", os.fspath(root))
    hashes += [raw[at : at + _DIGEST] for at in range(0, len(raw), _DIGEST)]
    return {path: value.hex() for path, value in zip(ours + theirs, hashes, strict=True)}
