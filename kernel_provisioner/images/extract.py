"""Safe extraction of tar streams into an image root: Debian packages and container layers.

The stream is hostile: names, links, types and sizes are judged here before anything is written, and
links already in the tree are followed only inside the root. The root itself is a staging directory
that nobody else writes to. Owners, extended attributes and setuid bits are not taken over.
"""

from __future__ import annotations

import os
import shutil
import stat
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol

from kernel_provisioner.errors import PrepareFailed

_MAX_HEADER = 1 << 20
_MAX_DEPTH = 64
_MAX_LINKS = 40
_COPY = 1 << 20
_WHITEOUT = ".wh."
_OPAQUE = ".wh..wh..opq"
REMEDY = "use an archive that is what `docker save` or an OCI build tool writes."

_HEADERS = frozenset(
    (
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    )
)


class Readable(Protocol):
    """What a tar stream is read from."""

    def read(self, size: int, /) -> bytes:
        """Return at most ``size`` bytes, none at the end."""


class BoundedTarInfo(tarfile.TarInfo):
    """Refuses extension headers over 1 MiB, which tarfile would read into memory whole."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in _HEADERS and self.size > _MAX_HEADER:
            raise tarfile.ReadError(f"an extension header of {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc,no-any-return]


@dataclass(slots=True)
class Budget:
    """What one image may hold in all; shared by its layers, as archives lie about single ones."""

    bytes_left: int = 8 << 30
    entries_left: int = 400_000

    def take(self, size: int, name: str) -> None:
        """Account for one entry. Raises PrepareFailed when the image is over its bounds."""
        self.bytes_left -= size
        self.entries_left -= 1
        if size < 0 or self.bytes_left < 0 or self.entries_left < 0:
            raise refused(name, "the image is over 8 GiB or 400,000 entries")


def refused(name: str, why: str) -> PrepareFailed:
    """Return the error for one bad entry."""
    return PrepareFailed(f"archive entry {name[:200]!r} is refused: {why}.", remedy=REMEDY)


def split_name(name: str) -> list[str]:
    """Return the components of an entry's name, ``[]`` for the root itself.

    Raises PrepareFailed for absolute names, ``..``, and names that no file system takes.
    """
    if name.startswith("/"):
        raise refused(name, "its name is absolute")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise refused(name, "its name leaves the archive")
    if "\0" in name or len(parts) > _MAX_DEPTH or any(len(os.fsencode(p)) > 255 for p in parts):
        raise refused(name, "its name is not valid")
    return parts


@dataclass(slots=True)
class Extractor:
    """Applies tar streams, in order, to one root.

    ``whiteouts`` follows the OCI layer rules (``.wh.NAME``, ``.wh..wh..opq``); without it, as for
    Debian packages, a directory entry keeps an existing link to a directory (merged /usr).
    """

    root: Path
    budget: Budget = field(default_factory=Budget)
    whiteouts: bool = False
    _parents: dict[str, str] = field(default_factory=dict)
    _made: set[str] = field(default_factory=set)

    def apply(self, stream: Readable, mode: str = "r|") -> None:
        """Extract one stream (``mode`` as tarfile's, ``r|`` or ``r|gz`` ...).

        Raises PrepareFailed, naming the entry, for anything that is not acceptable.
        """
        self._parents.clear()
        self._made.clear()
        try:
            # tarfile reads only; the overloads want a full file object.
            with tarfile.open(fileobj=stream, mode=mode, tarinfo=BoundedTarInfo) as tar:  # type: ignore[call-overload]
                while (entry := tar.next()) is not None:
                    tar.members = []  # a stream needs no index, and it would grow without bound
                    self._entry(tar, entry)
        except (tarfile.TarError, EOFError, UnicodeError, ValueError, OverflowError) as error:
            raise PrepareFailed(f"the archive is damaged ({error}).", remedy=REMEDY) from None
        except OSError as error:
            raise PrepareFailed(
                f"the archive cannot be unpacked: {error.strerror} ({error.filename}).",
                remedy="see that the disk has room; " + REMEDY,
            ) from None

    def _entry(self, tar: tarfile.TarFile, entry: tarfile.TarInfo) -> None:
        parts = split_name(entry.name)
        self.budget.take(entry.size if entry.isreg() else 0, entry.name)
        if not parts:
            if not entry.isdir():
                raise refused(entry.name, "it has no name")
            return
        parent = self._resolve_parent(parts[:-1], entry.name)
        path = os.path.join(parent, parts[-1])
        if self.whiteouts and parts[-1].startswith(_WHITEOUT):
            self._whiteout(parent, parts[-1], entry.name)
            return
        if entry.isdir():
            self._directory(path, entry)
        elif entry.issym():
            if not entry.linkname or "\0" in entry.linkname or len(entry.linkname) > 4095:
                raise refused(entry.name, "its link target is not valid")
            self._clear(path)
            os.symlink(entry.linkname, path)
        elif entry.islnk():
            self._hard_link(path, entry)
        elif entry.issparse():
            raise refused(entry.name, "it is a sparse file")
        elif entry.isreg():
            self._file(path, tar, entry)
        else:
            raise refused(entry.name, "it is neither a file nor a directory nor a link")
        self._made.add(path)

    def _directory(self, path: str, entry: tarfile.TarInfo) -> None:
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            os.mkdir(path, 0o755)
            return
        if stat.S_ISDIR(found.st_mode):
            return
        if not self.whiteouts and stat.S_ISLNK(found.st_mode):
            self._resolve_parent(split_name(entry.name), entry.name)
            return
        self._clear(path)
        os.mkdir(path, 0o755)

    def _hard_link(self, path: str, entry: tarfile.TarInfo) -> None:
        target = split_name(entry.linkname)
        if not target:
            raise refused(entry.name, "it is a hard link to nothing")
        parent = self._resolve_parent(target[:-1], entry.name, make=False)
        source = os.path.join(parent, target[-1])
        try:
            usable = stat.S_ISREG(os.lstat(source).st_mode)
        except FileNotFoundError:
            usable = False
        if not usable:
            raise refused(entry.name, f"it is a hard link to {entry.linkname[:200]!r}, not a file")
        if source != path:
            self._clear(path)
            os.link(source, path, follow_symlinks=False)

    def _file(self, path: str, tar: tarfile.TarFile, entry: tarfile.TarInfo) -> None:
        content: IO[bytes] | None = tar.extractfile(entry)
        if content is None:
            raise refused(entry.name, "it has no content")
        self._clear(path)
        mode = 0o755 if entry.mode & 0o111 else 0o644
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with open(fd, "wb", buffering=0) as file:
            left = entry.size
            while left:
                chunk = content.read(min(left, _COPY))
                if not chunk:
                    raise refused(entry.name, "it ends early")
                file.write(chunk)
                left -= len(chunk)

    def _clear(self, path: str) -> None:
        """Remove whatever is at ``path``; what was resolved through it is forgotten."""
        try:
            found = os.lstat(path)
        except FileNotFoundError:
            return
        self._parents.clear()
        if stat.S_ISDIR(found.st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)

    def _whiteout(self, parent: str, name: str, shown: str) -> None:
        if name == _OPAQUE:
            with os.scandir(parent) as scan:
                lower = [item.path for item in scan if not self._is_ours(item.path)]
            for path in lower:
                self._clear(path)
            return
        hidden = name.removeprefix(_WHITEOUT)
        if hidden in ("", ".", ".."):
            raise refused(shown, "it is a whiteout of nothing")
        if not hidden.startswith(_WHITEOUT):  # other markers of old storage drivers hide nothing
            self._clear(os.path.join(parent, hidden))

    def _is_ours(self, path: str) -> bool:
        """Tell whether this layer itself made ``path`` or something below it."""
        below = path + "/"
        return path in self._made or any(made.startswith(below) for made in self._made)

    def _resolve_parent(self, parts: list[str], shown: str, *, make: bool = True) -> str:
        """Return the real directory for ``parts``, following links as if ``root`` were ``/``.

        Missing directories are made. ``..`` in a link stops at the root, as in a chroot.
        """
        key = "/".join(parts)
        known = self._parents.get(key)
        if known is not None:
            return known
        at: list[str] = []
        todo = parts[::-1]
        budget = _MAX_LINKS
        while todo:
            part = todo.pop()
            if part in ("", "."):
                continue
            if part == "..":
                if at:
                    at.pop()
                continue
            path = os.path.join(self.root, *at, part)
            try:
                mode = os.lstat(path).st_mode
            except FileNotFoundError:
                if not make:
                    raise refused(shown, "it links to a file that is not there") from None
                os.mkdir(path, 0o755)
                mode = stat.S_IFDIR
            if stat.S_ISLNK(mode):
                budget -= 1
                target = os.readlink(path)
                if budget < 0 or len(todo) > 4096:
                    raise refused(shown, "the links on its path loop")
                if target.startswith("/"):
                    at.clear()
                todo += target.split("/")[::-1]
            elif stat.S_ISDIR(mode):
                at.append(part)
            else:
                raise refused(shown, f"{part!r} on its path is not a directory")
        found = os.path.join(self.root, *at)
        self._parents[key] = found
        return found
