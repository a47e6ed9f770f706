"""Small images and image archives for tests, made from nothing; none of them can run anything."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ARCH = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]

SMALL_IMAGE: Sequence[tarfile.TarInfo | tuple[str, bytes]]


def directory(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, 0o755
    return info


def link(name: str, target: str, *, hard: bool = False) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.LNKTYPE if hard else tarfile.SYMTYPE, target
    return info


def special(name: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    return info


SMALL_IMAGE = (
    directory("usr"),
    directory("usr/bin"),
    directory("usr/lib"),
    directory("usr/sbin"),
    link("bin", "usr/bin"),
    link("lib", "usr/lib"),
    link("sbin", "/usr/sbin"),
    ("usr/bin/python3.11", b"not a program"),
    link("usr/bin/python3", "python3.11"),
    ("usr/local/lib/python3.11/dist-packages/ipykernel/__init__.py", b""),
    ("etc/motd", b"from the image"),
)


def layer(entries: Sequence[tarfile.TarInfo | tuple[str, bytes]]) -> bytes:
    """Return an uncompressed tar stream."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                tar.addfile(entry)
            else:
                info = tarfile.TarInfo(entry[0])
                info.size, info.mode = len(entry[1]), 0o600
                tar.addfile(info, io.BytesIO(entry[1]))
    return out.getvalue()


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def config(layers: Sequence[bytes], **changes: object) -> bytes:
    """Return an image configuration for uncompressed layers."""
    value = {
        "architecture": ARCH,
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha(data)}" for data in layers]},
    }
    return json.dumps(value | changes).encode()


def tar_of(path: Path, files: Mapping[str, bytes | tarfile.TarInfo]) -> Path:
    """Write an outer archive."""
    entries = [
        value if isinstance(value, tarfile.TarInfo) else (name, value)
        for name, value in files.items()
    ]
    path.write_bytes(layer(entries))
    return path


def docker_files(layers: Sequence[bytes], **changes: object) -> dict[str, bytes | tarfile.TarInfo]:
    """Return the files of a classic ``docker save``."""
    names = [f"l{number}/layer.tar" for number in range(len(layers))]
    manifest = [{"Config": "config.json", "RepoTags": ["x:1"], "Layers": names}]
    return {
        "manifest.json": json.dumps(manifest).encode(),
        "config.json": config(layers, **changes),
        **dict(zip(names, layers, strict=True)),
    }


def oci_files(
    layers: Sequence[bytes], *, compress: bool = True, nested: bool = False
) -> dict[str, bytes | tarfile.TarInfo]:
    """Return the files of an OCI layout; ``nested`` adds an index with other platforms."""
    files: dict[str, bytes | tarfile.TarInfo] = {"oci-layout": b'{"imageLayoutVersion":"1.0.0"}'}

    def blob(data: bytes) -> dict[str, object]:
        files[f"blobs/sha256/{sha(data)}"] = data
        return {"digest": f"sha256:{sha(data)}", "size": len(data)}

    packed = [gzip.compress(data, mtime=0) if compress else data for data in layers]
    manifest = {"config": blob(config(layers)), "layers": [blob(data) for data in packed]}
    top: dict[str, object] = {"manifests": [blob(json.dumps(manifest).encode())]}
    if nested:
        ours = {**top["manifests"][0], "platform": {"os": "linux", "architecture": ARCH}}  # type: ignore[index]
        other = {**blob(b"{}"), "platform": {"os": "linux", "architecture": "s390x"}}
        proof = {**blob(b"{ }"), "platform": {"os": "unknown", "architecture": "unknown"}}
        inner = json.dumps({"manifests": [other, ours, proof]}).encode()
        top = {"manifests": [blob(inner)]}
    files["index.json"] = json.dumps(top).encode()
    return files
