"""Importing images (spec C3): docker-save and OCI archives, and every way they can be wrong."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from image_trees import (
    SMALL_IMAGE,
    directory,
    docker_files,
    layer,
    link,
    oci_files,
    sha,
    tar_of,
)

from kernel_provisioner.errors import ImageInvalid, PrepareFailed, UsageError
from kernel_provisioner.images import build, tree
from kernel_provisioner.images.archive import Imported, import_archive
from kernel_provisioner.images.digest import tree_digest
from kernel_provisioner.images.process import Steps

LAYERS = [layer(SMALL_IMAGE), layer([("etc/.wh.motd", b""), ("etc/added", b"x")])]


def imported(base: Path, archive: Path) -> tuple[Imported, Path]:
    base.mkdir(exist_ok=True)
    root = base / "root"
    result = import_archive(
        Steps(lambda line: None), archive, staging=base, root=root, arch=build.host_arch()
    )
    return result, root


def test_all_kinds_of_archive_give_the_same_image(tmp_path: Path) -> None:
    kinds = {
        "docker": docker_files(LAYERS),
        "oci": oci_files(LAYERS),
        "plain": oci_files(LAYERS, compress=False),
        "nested": oci_files(LAYERS, nested=True),
    }
    digests = set()
    for kind, files in kinds.items():
        archive = tar_of(tmp_path / f"{kind}.tar", files)
        result, root = imported(tmp_path / kind, archive)
        assert result == Imported("3.11", build.host_arch())
        digests.add(tree_digest(root))
    packed = tmp_path / "docker.tar.gz"
    packed.write_bytes(gzip.compress((tmp_path / "docker.tar").read_bytes()))
    _, root = imported(tmp_path / "packed", packed)
    digests.add(tree_digest(root))
    assert len(digests) == 1


def test_the_tree_has_its_final_form(tmp_path: Path) -> None:
    _, root = imported(tmp_path / "x", tar_of(tmp_path / "a.tar", docker_files(LAYERS)))
    assert not (root / "etc/motd").exists()
    assert (root / "etc/added").stat().st_mode & 0o777 == 0o644
    assert os.readlink(root / "sbin") == "usr/sbin"
    assert os.readlink(root / "usr/bin/python") == "python3"
    for name in (*tree.MOUNT_POINTS, "docs"):
        assert (root / name).is_dir()


def test_a_python_in_usr_local_is_linked(tmp_path: Path) -> None:
    entries = [
        *(item for item in SMALL_IMAGE if "python3" not in str(item)),
        ("usr/local/bin/python3.12", b""),
        link("usr/local/bin/python3", "python3.12"),
        ("usr/local/lib/python3.12/site-packages/ipykernel/__init__.py", b""),
    ]
    archive = tar_of(tmp_path / "a.tar", docker_files([layer(entries)]))
    result, root = imported(tmp_path / "x", archive)
    assert result.python == "3.12"
    assert os.readlink(root / "usr/bin/python3") == "../local/bin/python3"


def test_equal_layers_may_be_links(tmp_path: Path) -> None:
    files = docker_files([LAYERS[0], LAYERS[1], LAYERS[1]])
    files["l2/layer.tar"] = link("l2/layer.tar", "../l1/layer.tar")
    _, root = imported(tmp_path / "x", tar_of(tmp_path / "a.tar", files))
    assert (root / "etc/added").exists()


def changed(files: Mapping[str, object], name: str, value: object) -> dict[str, object]:
    return {**files, name: value}


DOCKER, OCI = docker_files(LAYERS), oci_files(LAYERS)
MANIFEST = json.loads(DOCKER["manifest.json"])  # type: ignore[arg-type]
BLOB = next(name for name, data in OCI.items() if bytes(data).startswith(b"\x1f\x8b"))  # type: ignore[arg-type]

BAD: list[tuple[Mapping[str, object], str]] = [
    ({}, "neither index.json"),
    ({"other": b""}, "neither index.json"),
    (changed(DOCKER, "l0/layer.tar", LAYERS[1]), "differs from its digest"),
    (changed(DOCKER, "manifest.json", b"[]"), "exactly one image"),
    (changed(DOCKER, "manifest.json", json.dumps(MANIFEST * 2).encode()), "exactly one image"),
    (changed(DOCKER, "manifest.json", b"["), "not JSON"),
    (changed(DOCKER, "manifest.json", b"[" * 100_000), "not JSON"),
    (changed(DOCKER, "manifest.json", b" " * ((4 << 20) + 1)), "over 4 MiB"),
    (changed(DOCKER, "manifest.json", b'[{"Config": "config.json", "Layers": ["no"]}]'), "'no'"),
    (changed(DOCKER, "manifest.json", b'[{"Config": 7, "Layers": []}]'), "no file '7'"),
    (changed(DOCKER, "config.json", b"{}"), "machines"),
    (docker_files(LAYERS, architecture="s390x"), "'s390x' machines"),
    (docker_files(LAYERS, rootfs={"diff_ids": []}), "each layer's digest"),
    (docker_files(LAYERS, rootfs={"diff_ids": ["md5:1", "md5:2"]}), "not a sha256"),
    (changed(OCI, BLOB, b"\x1f\x8b broken"), "differs from its digest or size"),
    (changed(OCI, "index.json", b'{"manifests": []}'), "0 images"),
    (changed(OCI, "index.json", b"{}"), "no image manifest"),
    (changed(OCI, "index.json", b'{"manifests": [{"digest": "sha256:../../x"}]}'), "sha256"),
    (changed(OCI, "index.json", b'{"manifests": [7]}'), "malformed"),
]


@pytest.mark.parametrize(("files", "why"), BAD)
def test_a_bad_archive_is_refused(tmp_path: Path, files: Mapping[str, object], why: str) -> None:
    archive = tar_of(tmp_path / "a.tar", files)  # type: ignore[arg-type]
    with pytest.raises((PrepareFailed, ImageInvalid)) as caught:
        imported(tmp_path / "x", archive)
    assert why in caught.value.message


def test_a_zstd_layer_is_refused_with_the_remedy(tmp_path: Path) -> None:
    files = docker_files([b"\x28\xb5\x2f\xfd" + bytes(100)])
    with pytest.raises(PrepareFailed, match="zstd") as caught:
        imported(tmp_path / "x", tar_of(tmp_path / "a.tar", files))
    assert "gzip" in caught.value.remedy


def test_data_after_the_layers_end_counts(tmp_path: Path) -> None:
    files = docker_files([LAYERS[0]])
    files["l0/layer.tar"] = LAYERS[0] + bytes(512)
    with pytest.raises(PrepareFailed, match=f"layer {sha(LAYERS[0])[:16]} differs"):
        imported(tmp_path / "x", tar_of(tmp_path / "a.tar", files))


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([directory("bin")], "/bin in the image is not a link"),
        ([item for item in SMALL_IMAGE if "python3" not in str(item)], "no /usr/bin/python3"),
        ([*SMALL_IMAGE, (".wh.etc", b""), ("usr/local/.wh.lib", b"")], "no ipykernel"),
        ([*SMALL_IMAGE, ("usr/bin/python3.9", b""), link("usr/bin/python3", "python3.9")], "3.9"),
        ([*SMALL_IMAGE, link("etc/leak", "../../x")], "/etc/leak in the image links to"),
    ],
)
def test_what_is_no_analysis_image_is_refused(
    tmp_path: Path, entries: list[object], why: str
) -> None:
    archive = tar_of(tmp_path / "a.tar", docker_files([layer(entries)]))  # type: ignore[arg-type]
    with pytest.raises(ImageInvalid) as caught:
        imported(tmp_path / "x", archive)
    assert why in caught.value.message


def test_a_missing_file_a_directory_and_noise_are_refused(tmp_path: Path) -> None:
    (tmp_path / "noise").write_bytes(os.urandom(4096))
    os.mkfifo(tmp_path / "pipe")
    for name, error, why in (
        ("absent", UsageError, "cannot be opened (No such file"),
        ("pipe", UsageError, "is not a file"),
        ("noise", PrepareFailed, "cannot be read"),
    ):
        with pytest.raises(error) as caught:
            imported(tmp_path / f"x-{name}", tmp_path / name)
        assert why in caught.value.message
    with pytest.raises(UsageError, match="is not a file"):
        imported(tmp_path / "x-dir", tmp_path)


@pytest.mark.parametrize("name", ["../escape", "/escape"])
def test_the_outer_archive_cannot_escape(tmp_path: Path, name: str) -> None:
    with pytest.raises(PrepareFailed, match="is refused"):
        imported(tmp_path / "x", tar_of(tmp_path / "a.tar", {name: b"x"}))
    assert not (tmp_path / "escape").exists()
