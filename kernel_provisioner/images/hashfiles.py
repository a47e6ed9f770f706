"""Hashes files of a tree; also a program of its own, so that a second processor can take half.

As a program it reads NUL-separated paths from standard input and writes their raw sha256 digests.
It is run in isolated mode by path: standard library only, nothing of the package is imported.
"""

import hashlib
import os
import sys

_CHUNK = 1 << 20


def hash_file(root: str, path: str, buffer: memoryview) -> bytes:
    """Return the sha256 of ``root/path``, which must be a file; a link there raises OSError."""
    digest = hashlib.sha256()
    fd = os.open(os.path.join(root, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.digest()


def hash_files(root: str, paths: list[str]) -> list[bytes]:
    """Return the sha256 of each path below ``root``, in order."""
    buffer = memoryview(bytearray(_CHUNK))
    return [hash_file(root, path, buffer) for path in paths]


def main() -> None:
    """Hash what standard input names, below the directory that is the first argument."""
    names = sys.stdin.buffer.read()
    paths = [os.fsdecode(name) for name in names.split(b"\0")] if names else []
    sys.stdout.buffer.write(b"".join(hash_files(sys.argv[1], paths)))


if __name__ == "__main__":
    main()
