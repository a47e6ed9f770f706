"""The prepared image as sessions find it, and the stat receipt that says it is still the same.

A receipt trusts the owner of the state directory and the kernel's inode times: it catches every
change made through the file system, also one of the same size with a restored mtime, because no
call sets ctime. It does not catch root's tampering with clock or block device, nor bit rot; for
those there is the full digest (``digest.py``). Standard library only: this is on the start-up path.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernel_provisioner.errors import ImageInvalid, ImageMissing
from kernel_provisioner.paths import StateDirs

SETTLE_NS = 2_000_000_000
"""A receipt counts only if every ctime is at least this much older than the receipt: the kernel
stamps times in ticks of some ms, so a change right after the walk could carry the same ctime."""

CURRENT = "current"
RECEIPT = "receipt.json"
ENTRIES = "entries.bin"
ROOT = "root"
SCHEMA = "backintel.image/1"
PREPARE = "run `backintel sandbox prepare`."
_MAX_RECEIPT = 65536
_STAT = struct.Struct("<8q")
_HEAD = struct.Struct("<HH")


@dataclass(frozen=True, slots=True)
class Image:
    """One prepared image. ``root`` is its rootfs; ``id`` is ``sha256:`` and its tree digest."""

    root: Path
    id: str
    receipt_path: Path
    python: str
    arch: str
    created: str
    source: str


@dataclass(frozen=True, slots=True)
class StatListing:
    """The stat facts of a tree: ``data`` is the listing, ``newest_ns`` its newest ctime."""

    data: bytes
    entries: int
    newest_ns: int

    @property
    def digest(self) -> str:
        """Return the sha256 (hex) of the listing."""
        return hashlib.sha256(self.data).hexdigest()


def stat_listing(root: Path) -> StatListing:
    """List dev, ino, size, mode, uid, gid, mtime and ctime of ``root`` and all below, sorted.

    Names are stored relative to their directory, preceded by the number of path components, which
    makes the order unambiguous. Raises OSError if the tree changes meanwhile.
    """
    out = bytearray()
    newest = 0
    entries = 0

    def add(depth: int, name: bytes, info: os.stat_result) -> None:
        nonlocal newest, entries, out
        out += _HEAD.pack(depth, len(name))
        out += name
        out += _STAT.pack(
            info.st_dev,
            info.st_ino,
            info.st_size,
            info.st_mode,
            info.st_uid,
            info.st_gid,
            info.st_mtime_ns,
            info.st_ctime_ns,
        )
        entries += 1
        newest = max(newest, info.st_ctime_ns)

    def walk(path: bytes, depth: int) -> None:
        with os.scandir(path) as scan:
            found = sorted(scan, key=_name)
        for entry in found:
            info = entry.stat(follow_symlinks=False)
            add(depth, entry.name, info)
            if stat.S_ISDIR(info.st_mode):
                walk(entry.path, depth + 1)

    top = os.fsencode(root)
    add(0, b"", os.lstat(top))
    walk(top, 1)
    return StatListing(bytes(out), entries, newest)


def _name(entry: os.DirEntry[bytes]) -> bytes:
    return entry.name


def _parse(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield (relative path, packed stat) of a listing."""
    at = 0
    parts: list[bytes] = []
    while at < len(data):
        depth, size = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        name = data[at : at + size]
        at += size
        parts = [*parts[: max(depth - 1, 0)], name]
        yield b"/".join(parts), data[at : at + _STAT.size]
        at += _STAT.size


def first_difference(before: bytes, after: bytes) -> str:
    """Name the first entry (in tree order) that two listings disagree about, and how."""
    old, new = dict(_parse(before)), dict(_parse(after))
    fields = ("device", "inode", "size", "mode", "owner", "group", "mtime", "ctime")
    for path, facts in old.items():
        shown = "/" + os.fsdecode(path)
        if path not in new:
            return f"{shown} is missing"
        if new[path] != facts:
            pairs = zip(fields, _STAT.unpack(facts), _STAT.unpack(new[path]), strict=True)
            return f"{shown} changed ({', '.join(name for name, a, b in pairs if a != b)})"
    for path in new:
        if path not in old:
            return f"/{os.fsdecode(path)} was added"
    return "the listings are equal"


def settle(listing: StatListing) -> float:
    """Return how many seconds to wait until a receipt of this tree counts (0 if it does now)."""
    return max(0.0, (listing.newest_ns + SETTLE_NS - time.time_ns()) / 1e9)


def write_receipt(
    home: Path,
    *,
    image_id: str,
    python: str,
    arch: str,
    created: str,
    source: str,
    recipe: str,
) -> None:
    """Write ``home``'s receipt (0644, atomically) once ``home/root`` has settled: up to 2 s.

    ``recipe`` is a digest of what the image was made from, for the next ``prepare``.
    """
    listing = stat_listing(home / ROOT)
    while (wait := settle(listing)) > 0:
        time.sleep(wait)
        listing = stat_listing(home / ROOT)
    facts = {
        "schema": SCHEMA,
        "id": image_id,
        "python": python,
        "arch": arch,
        "created": created,
        "source": source,
        "recipe": recipe,
        "entries": listing.entries,
        "stat_sha256": listing.digest,
        "newest_ctime_ns": listing.newest_ns,
        "made_ns": time.time_ns(),
    }
    _replace(home / ENTRIES, listing.data)
    _replace(home / RECEIPT, (json.dumps(facts, indent=1) + "\n").encode())


def _replace(path: Path, data: bytes) -> None:
    """Write a file beside ``path``, sync it, and rename it over ``path``."""
    staged = path.with_name(f".{path.name}.new")
    staged.unlink(missing_ok=True)
    fd = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(fd, 0o644)
        os.fsync(fd)
    staged.replace(path)


def read_facts(receipt: Path) -> dict[str, object]:
    """Read a receipt file. Raises ImageInvalid unless it is a plain file that only we can write."""
    try:
        fd = os.open(receipt, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _invalid(f"its receipt {receipt} cannot be read ({error.strerror})") from None
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o022:
            raise _invalid(f"its receipt {receipt} is not a file that only its owner can write")
        if info.st_uid not in (0, os.geteuid()):
            raise _invalid(f"its receipt {receipt} belongs to user {info.st_uid}")
        text = file.read(_MAX_RECEIPT)
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or facts.get("schema") != SCHEMA:
        raise _invalid(f"its receipt {receipt} is damaged")
    return facts


def load_image(dirs: StateDirs) -> Image:
    """Return the current image without checking its tree.

    Raises ImageMissing if none was prepared, ImageInvalid if its receipt is damaged.
    """
    link = dirs.image / CURRENT
    try:
        name = os.readlink(link)
    except OSError:
        raise ImageMissing(f"there is no analysis image in {dirs.image}.", remedy=PREPARE) from None
    if "/" in name or name in ("", ".", ".."):
        raise _invalid(f"{link} points outside the image store")
    home = dirs.image / name
    facts = read_facts(home / RECEIPT)

    def text(key: str) -> str:
        value = facts.get(key)
        if not isinstance(value, str) or not value:
            raise _invalid(f"its receipt {home / RECEIPT} has no {key}")
        return value

    return Image(
        root=home / ROOT,
        id=text("id"),
        receipt_path=home / RECEIPT,
        python=text("python"),
        arch=text("arch"),
        created=text("created"),
        source=text("source"),
    )


def check_receipt(image: Image) -> None:
    """Compare the tree's stat facts with the receipt (about 0.2 s for 25,000 entries).

    Raises ImageInvalid, which names the first changed entry.
    """
    facts = read_facts(image.receipt_path)
    made, newest = facts.get("made_ns"), facts.get("newest_ctime_ns")
    if not isinstance(made, int) or not isinstance(newest, int) or made - newest < SETTLE_NS:
        raise _invalid("its receipt was made less than 2 s after the last change of the tree")
    try:
        listing = stat_listing(image.root)
    except OSError as error:
        # The walk is over bytes.
        where = os.fsdecode(error.filename or image.root)
        raise _invalid(f"{where} cannot be examined ({error.strerror})") from None
    if listing.digest == facts.get("stat_sha256"):
        return
    try:
        before = (image.receipt_path.parent / ENTRIES).read_bytes()
    except OSError:
        before = b""
    if hashlib.sha256(before).hexdigest() != facts.get("stat_sha256"):
        raise _invalid("the tree differs from its receipt")
    raise _invalid(first_difference(before, listing.data))


def _invalid(what: str) -> ImageInvalid:
    return ImageInvalid(f"the analysis image is not what was prepared: {what}.", remedy=PREPARE)
