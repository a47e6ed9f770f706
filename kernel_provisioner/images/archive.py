"""Imports an analysis image from a file: what ``docker save`` or an OCI build tool writes.

The file is hostile until its digests were compared and every entry was judged (``extract.py``).
Docker is never needed; nothing of the image is executed.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import posixpath
import re
import stat
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kernel_provisioner.errors import ImageInvalid, PrepareFailed, UsageError
from kernel_provisioner.images import tree
from kernel_provisioner.images.digest import check_links, walk
from kernel_provisioner.images.extract import (
    REMEDY,
    BoundedTarInfo,
    Budget,
    Extractor,
    refused,
    split_name,
)
from kernel_provisioner.images.process import Steps

_ARCHES = {"amd64": "x86_64", "arm64": "aarch64"}
_MAX_JSON = 4 << 20
_MAX_LAYERS = 256
_MAX_INDEXES = 3
_MAX_STREAM = 12 << 30
_COPY = 1 << 20
_SHA256 = re.compile(r"sha256:([0-9a-f]{64})")
_PYTHON = re.compile(r"python(3\.\d+)")
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_CONTENTS = (
    "the image must hold merged /usr, Python 3.11 or later as /usr/bin/python3 (or in /usr/local), "
    "and ipykernel."
)


@dataclass(frozen=True, slots=True)
class Imported:
    """What was imported: the Python minor and the architecture of the image."""

    python: str
    arch: str


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer's file and the sha256 (hex) that its uncompressed stream must have."""

    file: Path
    diff_id: str


def import_archive(
    steps: Steps, archive: Path, *, staging: Path, root: Path, arch: str
) -> Imported:
    """Unpack the image of ``archive`` as ``root`` (which must not exist) for machine ``arch``.

    ``staging`` gives scratch space for the archive's blobs. Raises PrepareFailed, which names the
    entry or the blob, UsageError if there is no such file, and ImageInvalid for links that leave
    the image.
    """
    with steps.step(f"reading {archive.name}"):
        files = _unpack_outer(steps, archive, staging / "archive")
        layers = _layers(files, arch)
    root.mkdir(mode=0o755)
    budget = Budget()
    for number, layer in enumerate(layers, 1):
        with steps.step(f"layer {number} of {len(layers)}"):
            _apply(steps, layer, Extractor(root, budget, whiteouts=True))
    with steps.step("arranging the tree"):
        tree.relativize_links(root)
        check_links(list(walk(root)))
        tree.link_if_missing(root, "usr/bin/python3", "../local/bin/python3")
        tree.link_if_missing(root, "usr/bin/python", "python3")
        python = _examine(root)
        tree.make_mount_points(root)
        (root / "docs").mkdir(exist_ok=True)
        tree.finish(root, os.geteuid(), os.getegid())
    return Imported(python, arch)


def open_archive(archive: Path) -> io.BufferedReader:
    """Open an archive for reading. Raises UsageError if it is missing or not a plain file."""
    try:
        fd = os.open(archive, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UsageError(
            f"the image archive {archive} cannot be opened ({error.strerror}).",
            remedy="give the path of a readable file.",
        ) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise UsageError(f"the image archive {archive} is not a file.", remedy=REMEDY)
    return open(fd, "rb")


def _unpack_outer(steps: Steps, archive: Path, target: Path) -> Mapping[str, Path]:
    """Copy the archive's files to numbered ones and return them by their names inside it."""
    target.mkdir()
    found: dict[str, Path] = {}
    links: dict[str, str] = {}
    budget = Budget(bytes_left=_MAX_STREAM, entries_left=20_000)
    with open_archive(archive) as file:
        try:
            with tarfile.open(fileobj=file, mode="r|*", tarinfo=BoundedTarInfo) as tar:
                while (entry := tar.next()) is not None:
                    steps.check()
                    budget.take(entry.size if entry.isreg() else 0, entry.name)
                    name = "/".join(split_name(entry.name))
                    if entry.isdir():
                        continue
                    if name in found or name in links:
                        raise refused(entry.name, "its name appears twice")
                    if entry.issym():  # old `docker save` links layers that are equal
                        links[name] = posixpath.normpath(
                            posixpath.join(posixpath.dirname(name), entry.linkname)
                        )
                    elif entry.isreg() and (content := tar.extractfile(entry)) is not None:
                        found[name] = target / str(len(found))
                        with open(found[name], "xb") as copy:
                            while chunk := content.read(_COPY):
                                copy.write(chunk)
                                steps.check()
                    else:
                        raise refused(entry.name, "it is not a plain file")
        except (tarfile.TarError, EOFError, OSError, ValueError) as error:
            raise PrepareFailed(
                f"the image archive {archive} cannot be read ({error}).", remedy=REMEDY
            ) from None
    for name, linked in links.items():
        if linked in found:
            found[name] = found[linked]
    return found


def _layers(files: Mapping[str, Path], arch: str) -> list[Layer]:
    """Return the image's layers, lowest first, after comparing digests and the machine's kind."""
    if "index.json" in files:
        config, blobs = _oci(files, arch)
    elif "manifest.json" in files:
        config, blobs = _docker(files)
    else:
        raise PrepareFailed(
            "the archive has neither index.json (OCI) nor manifest.json (docker save).",
            remedy=REMEDY,
        )
    machine = _ARCHES.get(str(config.get("architecture")))
    if machine != arch:
        raise PrepareFailed(
            f"the image is for {config.get('architecture')!r} machines; this one is {arch}.",
            remedy="make the image for this machine.",
        )
    rootfs = config.get("rootfs")
    ids = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(ids, list) or len(ids) != len(blobs) or not 0 < len(ids) <= _MAX_LAYERS:
        raise _damaged("its configuration does not name each layer's digest")
    return [Layer(blob, _hex(value)) for blob, value in zip(blobs, ids, strict=True)]


def _oci(files: Mapping[str, Path], arch: str) -> tuple[dict[str, object], list[Path]]:
    document = _json(files["index.json"], "index.json")
    for _ in range(_MAX_INDEXES):
        manifests = document.get("manifests")
        if not isinstance(manifests, list):
            break
        document = _json(_blob(files, _choose(manifests, arch)), "a manifest")
    layers = document.get("layers")
    if not isinstance(layers, list) or len(layers) > _MAX_LAYERS:
        raise _damaged("it has no image manifest")
    config = _json(_blob(files, document.get("config")), "the image's configuration")
    return config, [_blob(files, layer) for layer in layers]


def _choose(manifests: list[object], arch: str) -> object:
    """Pick the one manifest for this machine; other platforms and attestations fall out."""
    fits = []
    for item in manifests:
        platform = item.get("platform") if isinstance(item, dict) else None
        if not isinstance(platform, dict) or (
            platform.get("os") == "linux" and _ARCHES.get(str(platform.get("architecture"))) == arch
        ):
            fits.append(item)
    if len(fits) != 1:
        raise PrepareFailed(
            f"the archive holds {len(fits)} images for {arch}; exactly one is needed.",
            remedy="save one image for this machine.",
        )
    return fits[0]


def _docker(files: Mapping[str, Path]) -> tuple[dict[str, object], list[Path]]:
    images = _parse(files["manifest.json"], "manifest.json")
    if not isinstance(images, list) or len(images) != 1 or not isinstance(images[0], dict):
        raise PrepareFailed("the archive does not hold exactly one image.", remedy=REMEDY)
    layers = images[0].get("Layers")
    if not isinstance(layers, list):
        raise _damaged("manifest.json names no layers")
    config = _json(_named(files, images[0].get("Config")), "the image's configuration")
    return config, [_named(files, name) for name in layers]


def _named(files: Mapping[str, Path], name: object) -> Path:
    if not isinstance(name, str) or name not in files:
        raise _damaged(f"it has no file {str(name)[:200]!r}")
    return files[name]


def _blob(files: Mapping[str, Path], descriptor: object) -> Path:
    """Return a blob by its descriptor after comparing size and digest."""
    if not isinstance(descriptor, dict):
        raise _damaged("a descriptor is malformed")
    digest = _hex(descriptor.get("digest"))
    path = _named(files, f"blobs/sha256/{digest}")
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != digest or path.stat().st_size != descriptor.get("size"):
        raise _damaged(f"blob {digest[:16]} differs from its digest or size")
    return path


def _hex(value: object) -> str:
    match = _SHA256.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise _damaged("a digest is not a sha256")
    return match.group(1)


def _json(path: Path, what: str) -> dict[str, object]:
    value = _parse(path, what)
    if not isinstance(value, dict):
        raise _damaged(f"{what} is not a JSON object")
    return value


def _parse(path: Path, what: str) -> object:
    if path.stat().st_size > _MAX_JSON:
        raise _damaged(f"{what} is over {_MAX_JSON >> 20} MiB")
    try:
        value: object = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise _damaged(f"{what} is not JSON") from None
    return value


def _damaged(why: str) -> PrepareFailed:
    return PrepareFailed(f"the image archive is damaged: {why}.", remedy=REMEDY)


class _Measured:
    """Hashes and counts what is read through it; stops a stream that never ends."""

    def __init__(self, steps: Steps, stream: BinaryIO) -> None:
        self._steps = steps
        self._stream = stream
        self._left = _MAX_STREAM
        self.sha256 = hashlib.sha256()

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes. Raises PrepareFailed past the bound or the deadline."""
        self._steps.check()
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise PrepareFailed("a layer is over 12 GiB.", remedy=REMEDY)
        self.sha256.update(data)
        return data


def _apply(steps: Steps, layer: Layer, extractor: Extractor) -> None:
    """Extract one layer and compare the digest of its uncompressed stream."""
    with _opened(layer.file) as stream:
        measured = _Measured(steps, stream)
        try:
            extractor.apply(measured)
            while measured.read(_COPY):
                pass
        except (OSError, EOFError) as error:
            raise _damaged(f"a layer cannot be unpacked ({error})") from None
    if measured.sha256.hexdigest() != layer.diff_id:
        raise _damaged(f"layer {layer.diff_id[:16]} differs from its digest")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a layer, uncompressing gzip; the media type is not believed, the first bytes are."""
    with path.open("rb") as raw:
        magic = raw.read(4)
        raw.seek(0)
        if magic.startswith(_ZSTD):
            raise PrepareFailed(
                "the image's layers are compressed with zstd, which is not read here.",
                remedy="save the image with gzip or uncompressed layers.",
            )
        if not magic.startswith(_GZIP):
            yield raw
            return
        with gzip.GzipFile(fileobj=raw) as stream:
            yield stream  # type: ignore[misc]


def _examine(root: Path) -> str:
    """Return the image's Python minor. Raises ImageInvalid if it is not an analysis image."""
    for name in ("bin", "sbin", "lib"):
        if not (root / name).is_symlink():
            raise ImageInvalid(f"/{name} in the image is not a link into /usr.", remedy=_CONTENTS)
    python = (root / "usr/bin/python3").resolve()
    match = _PYTHON.fullmatch(python.name)
    if match is None or not python.is_file() or not python.is_relative_to(root.resolve()):
        raise ImageInvalid("the image has no /usr/bin/python3.", remedy=_CONTENTS)
    minor = match.group(1)
    if int(minor.split(".")[1]) < 11:
        raise ImageInvalid(f"the image's Python is {minor}.", remedy=_CONTENTS)
    places = (
        f"usr/local/lib/python{minor}/dist-packages",
        f"usr/local/lib/python{minor}/site-packages",
        "usr/lib/python3/dist-packages",
    )
    if not any((root / place / "ipykernel/__init__.py").is_file() for place in places):
        raise ImageInvalid("the image's Python has no ipykernel.", remedy=_CONTENTS)
    return minor
