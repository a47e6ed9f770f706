"""Fetches test suites that others wrote, and an environment to run them in.

``tests/suites/suites.txt`` pins source distributions by hash; pip downloads and checks them, and
their tests (nothing else of them) are unpacked. The suites' needs clash with a lean development
environment, so they get one of their own. Everything lands in ``.data/suites``; what is already
there for the same pins is kept. pip is trusted to honour hashes, the pinned bytes are trusted.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "tests/suites/suites.txt"
REQUIREMENTS = ROOT / "tests/suites/requirements.txt"
PLACE = ROOT / ".data/suites"
INSTALL_TIMEOUT_S = 900

_PIN = re.compile(r"([A-Za-z0-9_.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}")


def pins(text: str) -> dict[str, str]:
    """Return name -> version of each pin. Raises ValueError for a line that is not hash-pinned."""
    found = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        pin = _PIN.fullmatch(line)
        if pin is None:
            raise ValueError(f"{PINS.name}: {line!r} is not NAME==VERSION --hash=sha256:DIGEST.")
        found[pin[1]] = pin[2]
    return found


def unpack_tests(archive: Path, destination: Path) -> None:
    """Write a source distribution's ``tests`` and ``pyproject.toml`` below ``destination``.

    Raises ValueError for a name that leaves it. Only regular files are taken.
    """
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts[1:]
            if not member.isfile() or not (parts[:1] == ("tests",) or parts == ("pyproject.toml",)):
                continue
            if ".." in parts:
                raise ValueError(f"{archive.name}: {member.name!r} leaves the archive.")
            path = destination.joinpath(*parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            source = tar.extractfile(member)
            assert source is not None
            path.write_bytes(source.read())


def stamp() -> str:
    """Return a digest of everything that decides what is fetched and installed."""
    digest = hashlib.sha256(sys.version.encode())
    for path in (PINS, REQUIREMENTS, ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def fetch(place: Path = PLACE) -> None:
    """Make ``place/venv`` and ``place/NAME`` for each pin, unless they are those of the pins.

    Raises CalledProcessError (pip has said why) and ValueError.
    """
    versions = pins(PINS.read_text())
    done = place / "stamp"
    if done.is_file() and done.read_text() == stamp():
        return
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    python = place / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True, timeout=120)
    pip = [str(python), "-m", "pip", "--quiet", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as scratch:
        # Versions only: hashes are those of the source distributions, and wheels are installed.
        constraints = Path(scratch) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={v}\n" for name, v in versions.items()))
        install = ["install", "--constraint", str(constraints), "--editable", str(ROOT)]
        install += ["--requirement", str(REQUIREMENTS), *versions]
        # pip reads a source distribution's metadata by its build backend; what that needs is
        # installed, so nothing unpinned is downloaded for it.
        download = ["download", "--require-hashes", "--no-deps", "--no-binary", ":all:"]
        download += ["--no-build-isolation", "--dest", scratch, "--requirement", str(PINS)]
        for arguments in (install, download):
            subprocess.run([*pip, *arguments], check=True, timeout=INSTALL_TIMEOUT_S)
        for name, version in versions.items():
            unpack_tests(Path(scratch) / f"{name}-{version}.tar.gz", place / name)
    done.write_text(stamp())


def main() -> None:
    """Fetch; say where to."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    fetch()
    print(f"fetch_suites: {', '.join(pins(PINS.read_text()))} in {PLACE.relative_to(ROOT)}/")


if __name__ == "__main__":
    main()
