#!/usr/bin/env python3
"""Regenerate ``locks/``: one hash lock per (Python minor, architecture) from ``requirements.in``.

For maintainers, not part of an installation. Needs ``uv`` on PATH; the index is the one that uv is
configured with, and no index address is written into a lock. Usage: ``python relock.py [--check]``;
``--check`` only verifies that each lock exists, is fully hashed and names no address.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PYTHONS = ("3.11", "3.12", "3.13")
ARCHES = ("x86_64", "aarch64")


def lock_path(python: str, arch: str) -> Path:
    """Return where the lock of one image kind lies."""
    return HERE / "locks" / f"py{python}-{arch}.txt"


def generate(python: str, arch: str) -> None:
    """Resolve one lock with uv; wheels only, for glibc 2.28 or later (Debian 12 has 2.36)."""
    command = ["uv", "pip", "compile", str(HERE / "requirements.in"), "--quiet", "--upgrade"]
    command += ["--generate-hashes", "--only-binary", ":all:", "--no-header", "--no-annotate"]
    command += ["--no-emit-index-url", "--no-emit-find-links"]
    command += ["--python-version", python, "--python-platform", f"{arch}-manylinux_2_28"]
    command += ["--output-file", str(lock_path(python, arch))]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def faults(python: str, arch: str) -> list[str]:
    """Return what is wrong with one lock: missing, unpinned, unhashed, or naming an address."""
    path = lock_path(python, arch)
    if not path.is_file():
        return [f"{path.name}: missing"]
    text = path.read_text()
    found = [f"{path.name}: names an address"] if "://" in text else []
    for entry in text.replace("\\\n", " ").splitlines():
        if entry.strip() and not ("==" in entry and "--hash=sha256:" in entry):
            found.append(f"{path.name}: not pinned by hash: {entry.strip()[:60]}")
    return found


def main() -> int:
    """Regenerate all locks, or check them; return 1 if any lock has a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="verify the locks, write nothing")
    check = parser.parse_args().check
    found = []
    for python in PYTHONS:
        for arch in ARCHES:
            if not check:
                generate(python, arch)
            found += faults(python, arch)
    print("\n".join(found) or "locks: all pinned by hash")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
