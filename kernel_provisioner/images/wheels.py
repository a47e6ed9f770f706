"""Python packages for the image: wheels from a hash lock, put in place by the machine's own pip.

pip fetches from wherever the machine's configuration says; the lock's hashes decide what is
accepted, so the index need not be trusted. Nothing of a wheel is executed.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import sys
from pathlib import Path

from kernel_provisioner.errors import PrepareFailed
from kernel_provisioner.images.process import Steps

PYTHONS = ("3.11", "3.12", "3.13")
ARCHES = ("x86_64", "aarch64")
_GLIBC_MINORS = range(36, 4, -1)  # Debian 12's glibc is 2.36: the oldest of the supported hosts
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)

# Settings of the machine that would redirect or weaken this installation. All others (index,
# certificates, proxies, cache, constraints) stay in force.
_OVERRIDDEN = (
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_ROOT",
    "PIP_REQUIREMENT",
    "PIP_NO_BINARY",
    "PIP_ONLY_BINARY",
    "PIP_COMPILE",
    "PIP_DRY_RUN",
    "PIP_PYTHON",
)


def lock_for(image_dir: Path, python: str, arch: str) -> Path:
    """Return the lock for an image kind. Raises PrepareFailed, naming the kinds there are."""
    path = image_dir / "locks" / f"py{python}-{arch}.txt"
    if python not in PYTHONS or arch not in ARCHES or not path.is_file():
        raise PrepareFailed(
            f"there is no lock of Python packages for Python {python} on {arch} "
            f"(there are {', '.join(PYTHONS)} on {', '.join(ARCHES)}).",
            remedy="build on Debian 12 or 13 or Ubuntu 24.04, or import an archive with "
            "`backintel sandbox prepare --image-archive FILE`.",
        )
    return path


def pins(lock: str) -> list[str]:
    """Return ``name==version`` for each package of a lock's text."""
    return [f"{name}=={version}" for name, version in _PIN.findall(lock)]


def pip_command(python: str, arch: str, target: Path, lock: Path) -> list[str]:
    """Return pip's arguments after ``pip``: the image's Python and platform, not the host's."""
    tag = "cp" + python.replace(".", "")
    command = ["install", "--require-hashes", "--only-binary", ":all:", "--no-deps"]
    command += ["--no-compile", "--no-input", "--progress-bar", "off", "--no-warn-script-location"]
    command += ["--implementation", "cp", "--python-version", python]
    for abi in (tag, "abi3", "none"):
        command += ["--abi", abi]
    for minor in _GLIBC_MINORS:
        command += ["--platform", f"manylinux_2_{minor}_{arch}"]
    command += ["--platform", f"manylinux2014_{arch}", "--platform", f"linux_{arch}"]
    return [*command, "--target", str(target), "--requirement", str(lock)]


def install(
    steps: Steps, *, python: str, arch: str, lock: Path, target: Path, scratch: Path
) -> None:
    """Install the lock's wheels into ``target``. Raises PrepareFailed with pip's last lines.

    ``scratch`` is pip's temporary directory; on the file system of ``target`` it can rename.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    for key in _OVERRIDDEN:
        env.pop(key, None)
    env |= {"TMPDIR": str(scratch), "PIP_USER": "0", "PIP_REQUIRE_VIRTUALENV": "0"}
    env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    scratch.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    steps.run(
        [*_pip(steps, env), *pip_command(python, arch, target, lock)],
        what="installing the Python packages (pip install --require-hashes)",
        env=env,
        remedy="see that pip works on this host (`python3 -m pip download six`), then prepare "
        "again.",
    )


def settle(site: Path, certificates: Path) -> None:
    """Make an installation independent of the machine that made it.

    Scripts were stripped, for they name the machine's Python; RECORD keeps the rows of files that
    are there, for the hash of a script would differ on each machine. Certificate bundles become
    links to the distribution's (``certificates``), as Debian itself packages them.
    """
    for record in sorted(site.glob("*.dist-info/RECORD")):
        with record.open(newline="") as file:
            rows = [row for row in csv.reader(file) if row and (site / row[0]).is_file()]
        with record.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
    for name in ("certifi/cacert.pem", "botocore/cacert.pem"):
        bundle = site / name
        if bundle.is_file():
            bundle.unlink()
            bundle.symlink_to(os.path.relpath(certificates, bundle.parent))


def _pip(steps: Steps, env: dict[str, str]) -> list[str]:
    """Return how to call pip: this interpreter's, else one on PATH (any version's will do)."""
    candidates = [[sys.executable, "-m", "pip"]]
    candidates += [[found] for name in ("pip3", "pip") if (found := shutil.which(name))]
    for candidate in candidates:
        try:
            steps.run([*candidate, "--version"], what="asking pip for its version", env=env)
        except PrepareFailed:
            steps.check()
            continue
        return candidate
    raise PrepareFailed(
        "there is no pip to install the image's Python packages with.",
        remedy=f"run `{sys.executable} -m ensurepip`, or install the package python3-pip.",
    )
