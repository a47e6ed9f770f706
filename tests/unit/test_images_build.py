"""The builder's decisions: hosts, locks, pip's arguments, what an installation leaves behind."""

from __future__ import annotations

import base64
import hashlib
import itertools
import os
import re
import runpy
import sys
import zipfile
from pathlib import Path

import pytest

from kernel_provisioner.errors import PrepareFailed
from kernel_provisioner.images import apt, build, tree, wheels
from kernel_provisioner.images.extract import Extractor
from kernel_provisioner.images.process import Steps, Stopped

IMAGE = Path(__file__).resolve().parents[2] / "guest/image"
WANTED = {
    "boto3",
    "clickhouse-connect",
    "duckdb",
    "ipykernel",
    "matplotlib",
    "numpy",
    "openpyxl",
    "pandas",
    "plotly",
    "polars",
    "psycopg",
    "psycopg-binary",
    "pyarrow",
    "pymongo",
    "scipy",
}


@pytest.mark.parametrize("python", wheels.PYTHONS)
@pytest.mark.parametrize("arch", wheels.ARCHES)
def test_each_lock_is_complete_and_hashed(python: str, arch: str) -> None:
    text = wheels.lock_for(IMAGE, python, arch).read_text()
    names = {pin.partition("==")[0] for pin in wheels.pins(text)}
    assert names >= WANTED
    assert "://" not in text
    entries = text.replace("\\\n", " ").splitlines()
    assert all("==" in entry and "--hash=sha256:" in entry for entry in entries)
    version = next(p for p in wheels.pins(text) if p.startswith("ipykernel=="))
    major, minor = version.partition("==")[2].split(".")[:2]
    assert (int(major), int(minor)) >= (7, 4)


def test_the_lock_script_accepts_the_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["relock.py", "--check"])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(IMAGE / "relock.py"), run_name="__main__")
    assert done.value.code == 0


@pytest.mark.parametrize(("python", "arch"), [("3.10", "x86_64"), ("3.11", "riscv64")])
def test_a_kind_without_lock_is_refused(python: str, arch: str) -> None:
    with pytest.raises(PrepareFailed, match="there is no lock") as caught:
        wheels.lock_for(IMAGE, python, arch)
    assert "--image-archive" in caught.value.remedy


def test_pip_is_told_the_images_python_and_nothing_unhashed(tmp_path: Path) -> None:
    command = wheels.pip_command("3.12", "aarch64", tmp_path, IMAGE / "x.txt")
    for flag in ("--require-hashes", "--no-deps", "--no-compile", "--no-input"):
        assert flag in command
    assert command[command.index("--only-binary") + 1] == ":all:"
    assert command[command.index("--python-version") + 1] == "3.12"
    assert "cp312" in command
    platforms = [b for a, b in itertools.pairwise(command) if a == "--platform"]
    assert "manylinux_2_28_aarch64" in platforms
    assert not [name for name in platforms if "x86_64" in name]


def wheel(folder: Path) -> str:
    """Write a tiny wheel and return its sha256."""
    path = folder / "tiny-1.0-py3-none-any.whl"
    files = {
        "tiny/__init__.py": b"x = 1\n",
        "tiny-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        "tiny-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
        b"Tag: py3-none-any\n",
        "tiny-1.0.dist-info/entry_points.txt": b"[console_scripts]\ntiny = tiny:x\n",
    }
    rows = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(data)}\n")
    with zipfile.ZipFile(path, "w") as file:
        for name, data in files.items():
            file.writestr(name, data)
        file.writestr("tiny-1.0.dist-info/RECORD", "".join(rows) + "tiny-1.0.dist-info/RECORD,,\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def offline_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let pip see only a local folder, and hostile settings that must not matter."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_TARGET", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
    return tmp_path


def install(base: Path, digest: str) -> Path:
    lock = base / "lock.txt"
    lock.write_text(f"tiny==1.0 \\\n    --hash=sha256:{digest}\n")
    target = base / "site/dist-packages"
    wheels.install(
        Steps(lambda line: None),
        python="3.13",
        arch="x86_64",
        lock=lock,
        target=target,
        scratch=base / "scratch",
    )
    return target


def test_pip_installs_what_the_hash_names(offline_pip: Path) -> None:
    target = install(offline_pip, wheel(offline_pip))
    assert (target / "tiny/__init__.py").read_bytes() == b"x = 1\n"
    assert not (offline_pip / "elsewhere").exists()
    assert not list(target.rglob("*.pyc"))


def test_pip_refuses_what_the_hash_does_not_name(offline_pip: Path) -> None:
    wheel(offline_pip)
    with pytest.raises(PrepareFailed, match=r"HASHES|hash"):
        install(offline_pip, "0" * 64)
    assert not (offline_pip / "site/dist-packages/tiny").exists()


def test_an_installation_becomes_independent_of_the_machine(offline_pip: Path) -> None:
    target = install(offline_pip, wheel(offline_pip))
    assert "bin/tiny" in (target / "tiny-1.0.dist-info/RECORD").read_text()
    (target / "bin/tiny").unlink()
    (target / "certifi").mkdir()
    (target / "certifi/cacert.pem").write_text("other")
    bundle = offline_pip / "site/ca.crt"
    bundle.write_text("bundle")
    wheels.settle(target, bundle)
    rows = (target / "tiny-1.0.dist-info/RECORD").read_text().splitlines()
    assert [row for row in rows if "bin/" in row] == []
    assert any(row.startswith("tiny/__init__.py,sha256=") for row in rows)
    assert os.readlink(target / "certifi/cacert.pem") == "../../ca.crt"
    assert (target / "certifi/cacert.pem").read_text() == "bundle"


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ('ID=debian\nVERSION_ID="12"\n', "Debian"),
        ("ID=ubuntu\nVERSION_ID='24.04'\nID_LIKE=debian\n", "Ubuntu"),
    ],
)
def test_known_distributions(text: str, origin: str) -> None:
    assert apt.distribution(text).origin == origin


@pytest.mark.parametrize("text", ["", "ID=fedora\n", "ID_LIKE=debian\nID=mint\n"])
def test_other_distributions_are_told_of_archives(text: str) -> None:
    with pytest.raises(PrepareFailed, match="Debian and Ubuntu") as caught:
        apt.distribution(text)
    assert "--image-archive" in caught.value.remedy


def test_apt_gets_private_state_and_no_hooks(tmp_path: Path) -> None:
    host = apt.Distribution("debian", "12", "Debian")
    made = apt.Apt.create(Steps(lambda line: None), tmp_path / "apt", host)
    text = (made.home / "apt.conf").read_text()
    env = {**made.env, "PATH": os.environ["PATH"]}
    dump = Steps(lambda line: None).run(
        ["apt-config", "-c", str(made.home / "apt.conf"), "dump"], what="x", env=env
    )
    assert f'Dir::State::lists "{made.home}/lists";' in dump
    assert 'APT::Get::AllowUnauthenticated "false";' in dump
    assert re.findall(r'Invoke[^"]*:: "', dump) == []
    assert "{home}" not in text
    assert "o=Debian" in (made.home / "preferences").read_text()
    assert made.env["TMPDIR"] == str(made.home / "tmp")


@pytest.mark.parametrize("name", ['a"b', "a b", "a;b", "a\nb"])
def test_apt_is_not_given_a_path_that_it_would_misread(tmp_path: Path, name: str) -> None:
    host = apt.Distribution("debian", "12", "Debian")
    with pytest.raises(PrepareFailed, match="unusual characters"):
        apt.Apt.create(Steps(lambda line: None), tmp_path / name, host)


def test_lists_are_read_without_comments(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("# c\nbash\n\n  sed  # why\n")
    assert apt.read_list(tmp_path / "list") == ["bash", "sed"]
    assert "ripgrep" in apt.read_list(IMAGE / "debian-packages.txt")


def deb(base: Path, name: str) -> Path:
    """Build a real package with a maintainer script that must never run."""
    source = base / f"src-{name}"
    (source / "DEBIAN").mkdir(parents=True)
    (source / "bin").mkdir()
    (source / "bin/tool").write_text(name)
    (source / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: 1:2\nArchitecture: all\nMaintainer: x <x@x>\nDescription: x\n"
    )
    (source / "DEBIAN/preinst").write_text(f"#!/bin/sh\ntouch {base}/ran\n")
    (source / "DEBIAN/preinst").chmod(0o755)
    target = base / f"{name}_1%3a2_all.deb"
    command = ["dpkg-deb", "--build", "--root-owner-group", "-Znone", str(source), str(target)]
    Steps(lambda line: None).run(command, what="x", env={"PATH": os.environ["PATH"]})
    return target


def test_packages_are_unpacked_into_merged_usr_and_no_script_runs(tmp_path: Path) -> None:
    root = tmp_path / "root"
    tree.make_skeleton(root)
    files = [deb(tmp_path, "tool"), deb(tmp_path, "perl-base")]
    found = apt.unpack(Steps(lambda line: None), files, Extractor(root), ["perl*"])
    assert [(p.name, p.version, p.arch) for p in found] == [("tool", "1:2", "all")]
    assert found[0].sha256 == hashlib.sha256(files[0].read_bytes()).hexdigest()
    assert (root / "usr/bin/tool").read_text() == "tool"
    assert (root / "bin").is_symlink()
    assert not (tmp_path / "ran").exists()


def test_a_damaged_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "x_1_all.deb").write_bytes(b"!<arch>\nnonsense")
    with pytest.raises(PrepareFailed):
        apt.unpack(
            Steps(lambda line: None), [tmp_path / "x_1_all.deb"], Extractor(tmp_path / "root"), []
        )


def test_guidance_is_copied_plainly(tmp_path: Path) -> None:
    docs = tmp_path / "guest/docs"
    (docs / "sub").mkdir(parents=True)
    (docs / "sub/a.md").write_text("a")
    (docs / "leak").symlink_to("/etc/passwd")
    root = tmp_path / "root"
    (root / "docs").mkdir(parents=True)
    (root / "docs/old.md").write_text("old")
    build.add_docs(root, tmp_path / "guest")
    assert sorted(str(p.relative_to(root / "docs")) for p in (root / "docs").rglob("*")) == [
        "sub",
        "sub/a.md",
    ]


def test_when_one_of_two_tasks_fails_the_other_stops_and_the_cause_is_raised() -> None:
    steps = Steps(lambda line: None)
    ended: list[str] = []

    def fail() -> None:
        raise PrepareFailed("the cause")

    def wait() -> None:
        try:
            steps.run(["sleep", "60"], what="x", env={"PATH": os.environ["PATH"]})
        except Stopped:
            ended.append("stopped")
            raise

    for pair in ((fail, wait), (wait, fail)):
        steps.stop.clear()
        with pytest.raises(PrepareFailed, match="the cause"):
            build.both(steps, *pair)
    assert ended == ["stopped"] * len(ended)
