"""Sources (spec E): which host paths may be shown, read-only, to a guest.

The owner names sources and is trusted to mean them, but not to know what they contain: credentials,
the host's own directories, the product's state and anything that is more than data (a socket in a
read-only mount can still be connected to) are refused. Links inside a source are neither followed
here nor a way out: the guest resolves them among its own files.
"""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from kernel_provisioner.engines.base import GUEST_GID, GUEST_UID
from kernel_provisioner.errors import SourceRefused
from kernel_provisioner.paths import StateDirs

GUEST_ROOT = PurePosixPath("/sources")
MAX_NAME = 100
MAX_ENTRIES = 1_000_000
"""Entries of one source that are looked at; more are refused, not skipped.

Each takes 5 to 40 microseconds, inside the run deadline.
"""
PATH_VARIABLES = ("BACKINTEL_SQLITE_PATH", "BACKINTEL_FILES_DIR", "BACKINTEL_PARQUET_DIR")

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_SYSTEM_TREES = ("/etc", "/proc", "/sys", "/dev", "/run")  # refused with all below them
_SYSTEM_ROOTS = ("/", "/var", "/root")  # refused themselves; data may lie below
_SECRETS = (
    ".ssh",
    ".aws",
    ".gnupg",
    ".config",
    ".docker",
    ".kube",
    ".netrc",
    ".local/share/keyrings",
)
_DOCKER_SOCKETS = ("/var/run/docker.sock", "/run/docker.sock")
_SQLITE_MAGIC = b"SQLite format 3\0"
_SPECIAL = {
    stat.S_IFSOCK: "a socket",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}

Kind = Literal["dir", "file", "sqlite"]


@dataclass(frozen=True, slots=True)
class Source:
    """A checked source: canonical host ``path``, seen in the guest as ``/sources/<name>``."""

    name: str
    path: Path
    kind: Kind

    @property
    def guest_path(self) -> PurePosixPath:
        """Where the guest sees it."""
        return GUEST_ROOT / self.name


@dataclass(frozen=True, slots=True)
class Reader:
    """Who will read a source: ``identity`` is (uid, gid), or None for this very user."""

    identity: tuple[int, int] | None

    @classmethod
    def of_this_process(cls) -> Reader:
        """Root starts guests as 10001 without groups; an ordinary user starts them as itself."""
        return cls((GUEST_UID, GUEST_GID) if os.geteuid() == 0 else None)


def parse_source(text: str) -> tuple[str, str]:
    """Split ``NAME=PATH``, the path not looked at. Raises SourceRefused for a bad form or name."""
    name, equals, path = text.partition("=")
    if not equals or not name or not path:
        raise SourceRefused(
            f"source {text!r} is not NAME=PATH.",
            remedy="write for example --source sales=/data/sales.csv.",
        )
    check_name(name)
    return name, path


def parse_sources(texts: Iterable[str]) -> dict[str, str]:
    """Split several ``NAME=PATH``. Raises SourceRefused also for two sources of one name."""
    sources: dict[str, str] = {}
    for text in texts:
        name, path = parse_source(text)
        if name in sources:
            raise SourceRefused(
                f"two sources are named {name!r}.", remedy="give each source a name of its own."
            )
        sources[name] = path
    return sources


def check_name(name: str) -> None:
    """Raise SourceRefused unless ``name`` is a plain file name of A-Z a-z 0-9 . _ -."""
    if not _NAME.fullmatch(name) or name in (".", "..") or len(name) > MAX_NAME:
        raise SourceRefused(
            f"source name {name[:MAX_NAME]!r} is not allowed.",
            remedy=f"use 1 to {MAX_NAME} letters, digits, '.', '_' and '-', but not '.' or '..'.",
        )


def check_source(
    name: str,
    path: str | os.PathLike[str],
    dirs: Sequence[StateDirs],
    *,
    reader: Reader | None = None,
    homes: Iterable[Path] | None = None,
) -> Source:
    """Return the source with its canonical path, or raise SourceRefused with the reason (spec E4).

    ``dirs`` are all places where the product may keep state. ``reader`` and ``homes`` (the home
    directories whose secrets are protected) default to those of this process. Everything below a
    directory is looked at, from the source on; its ancestors do not matter, for the engine binds
    the source itself. POSIX ACLs are not considered.
    """
    check_name(name)
    text = os.fspath(path)
    if not text or "\0" in text:
        raise _refused(name, text, "is not a path", "give the path of a file or directory.")
    try:
        canonical = Path(text).resolve(strict=True)
        info = canonical.stat()
    except FileNotFoundError:
        raise _refused(
            name, text, "does not exist", "give the path of a file or directory that exists."
        ) from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
        reason = error.strerror if isinstance(error, OSError) else "a loop of links"
        raise _refused(name, text, f"cannot be opened ({reason})", "check the path.") from None
    protected = _protected(list(_homes() if homes is None else homes), dirs)
    reason = _place(canonical, protected)
    if reason:
        raise _refused(
            name, str(canonical), reason, "give a directory or file that holds only the data."
        )
    who = reader or Reader.of_this_process()
    if stat.S_ISDIR(info.st_mode):
        _check_tree(name, canonical, protected, who)
        return Source(name, canonical, "dir")
    if not stat.S_ISREG(info.st_mode):
        kind = _SPECIAL.get(stat.S_IFMT(info.st_mode), "a special file")
        raise _refused(name, str(canonical), f"is {kind}", "give a regular file or a directory.")
    _check_inode(name, canonical, info, protected)
    if not _readable(canonical, info, who):
        raise _unreadable(name, canonical, canonical, who)
    return Source(name, canonical, "sqlite" if _is_sqlite(name, canonical) else "file")


def guest_environment(environ: Mapping[str, str], sources: Sequence[Source]) -> dict[str, str]:
    """Return PATH_VARIABLES of ``environ`` as paths in the guest (spec E3).

    Pass the sources as checked, not as staged. An empty variable counts as unset. Raises
    SourceRefused if a variable's path lies in no source.
    """
    rewritten = {}
    for variable in PATH_VARIABLES:
        value = environ.get(variable, "")
        if value:
            rewritten[variable] = str(rewrite(variable, Path(os.path.realpath(value)), sources))
    return rewritten


def rewrite(variable: str, path: Path, sources: Sequence[Source]) -> PurePosixPath:
    """Return where the guest sees the canonical host ``path``. Raises SourceRefused if nowhere."""
    holders = [
        source
        for source in sources
        if path == source.path or (source.kind == "dir" and path.is_relative_to(source.path))
    ]
    if not holders:
        raise SourceRefused(
            f"{variable} names {str(path)!r}, which lies in no declared source.",
            remedy=f"declare it with --source NAME=PATH, or unset {variable}.",
        )
    nearest = max(holders, key=lambda source: len(source.path.parts))
    return nearest.guest_path / path.relative_to(nearest.path)


@dataclass(frozen=True, slots=True)
class _Protected:
    """Refused places: ``trees`` with all below and around them, ``roots`` themselves."""

    trees: Mapping[Path, str]
    roots: Mapping[Path, str]
    inodes: Mapping[tuple[int, int], str]


def _protected(homes: Sequence[Path], dirs: Sequence[StateDirs]) -> _Protected:
    trees = {Path(tree): f"is {tree} or lies below it" for tree in _SYSTEM_TREES}
    roots = {Path(root): f"is {root}" for root in _SYSTEM_ROOTS}
    for home in homes:
        roots[home] = "is a home directory"
        for secret in _SECRETS:
            trees[home / secret] = f"holds or is part of the credentials in ~/{secret}"
    for socket in _DOCKER_SOCKETS:
        trees[Path(socket)] = "is Docker's socket"
    for places in dirs:
        for place in (places.data, places.state, places.runtime):
            trees[place] = "overlaps the product's own state"
    # Bind mounts and links give a place other names, but not other inodes.
    inodes = {}
    for place, reason in (trees | roots).items():
        try:
            info = place.stat()
        except OSError:
            continue
        inodes[(info.st_dev, info.st_ino)] = reason
    resolved = {place.resolve(): reason for place, reason in trees.items()}
    return _Protected(trees | resolved, roots | {r.resolve(): t for r, t in roots.items()}, inodes)


def _place(path: Path, protected: _Protected) -> str | None:
    """Return why a canonical path is refused for where it lies, or None."""
    if path in protected.roots:
        return protected.roots[path]
    for tree, reason in protected.trees.items():
        if path.is_relative_to(tree) or tree.is_relative_to(path):
            return reason
    for root in protected.roots:
        if root.is_relative_to(path):
            return f"contains {str(root)!r}"
    # The ancestors decide too, under whatever name they were mounted; roots allow what is below.
    open_roots = set(protected.roots.values())
    for ancestor in path.parents:
        info = ancestor.stat()
        found = protected.inodes.get((info.st_dev, info.st_ino))
        if found and found not in open_roots:
            return found
    return None


def _check_inode(name: str, path: str | Path, info: os.stat_result, protected: _Protected) -> None:
    found = protected.inodes.get((info.st_dev, info.st_ino))
    if found:
        raise _refused(name, str(path), found, "give only the data.")


def _check_tree(name: str, root: Path, protected: _Protected, reader: Reader) -> None:
    for count, (path, info) in enumerate(_walk(name, root, reader), 1):
        if count > MAX_ENTRIES:
            raise _refused(
                name,
                str(root),
                f"has more than {MAX_ENTRIES} entries",
                "give a smaller directory.",
            )
        special = _SPECIAL.get(stat.S_IFMT(info.st_mode))
        if special:
            raise _refused(
                name, str(path), f"is {special}", "give a directory of plain files without it."
            )
        _check_inode(name, path, info, protected)
        if not stat.S_ISLNK(info.st_mode) and not _readable(path, info, reader):
            raise _unreadable(name, root, path, reader)


def _walk(name: str, root: Path, reader: Reader) -> Iterator[tuple[str, os.stat_result]]:
    """Yield a directory and all below it, links not followed. A directory comes before it is read.

    What vanishes meanwhile is skipped.
    """
    yield str(root), root.stat()
    pending = [str(root)]
    while pending:
        folder = pending.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    yield entry.path, info
                    if stat.S_ISDIR(info.st_mode):
                        pending.append(entry.path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            raise _unreadable(name, root, folder, reader) from None


def _readable(path: str | Path, info: os.stat_result, reader: Reader) -> bool:
    directory = stat.S_ISDIR(info.st_mode)
    if reader.identity is None:
        effective = os.access in os.supports_effective_ids
        return os.access(path, os.R_OK | os.X_OK if directory else os.R_OK, effective_ids=effective)
    return mode_allows(info.st_mode, (info.st_uid, info.st_gid), reader.identity)


def mode_allows(mode: int, owner: tuple[int, int], reader: tuple[int, int]) -> bool:
    """Tell whether permission bits let ``reader`` (uid, gid; no other groups) read a file.

    A directory must be searchable too. The first class that matches decides, as in the kernel.
    """
    shift = 6 if reader[0] == owner[0] else 3 if reader[1] == owner[1] else 0
    needed = 0o5 if stat.S_ISDIR(mode) else 0o4
    return (mode >> shift) & needed == needed


def _is_sqlite(name: str, path: Path) -> bool:
    try:
        # O_NONBLOCK: should a FIFO have taken its place, nothing waits for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            return file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC
    except OSError as error:
        raise _refused(
            name, str(path), f"cannot be read ({error.strerror})", "check its permissions."
        ) from None


def _homes() -> set[Path]:
    """Return the home directories to protect.

    The environment may move HOME but not the check, so the account's own home counts too; root
    sees every person's files, so all their homes count.
    """
    accounts = [pwd.getpwuid(os.geteuid())] if _has_account() else []
    if os.geteuid() == 0:
        accounts += [entry for entry in pwd.getpwall() if 1000 <= entry.pw_uid < 60000]
    homes = {Path(entry.pw_dir) for entry in accounts} | {Path(os.environ.get("HOME") or "/")}
    return {home for home in homes if home.is_absolute() and home != Path("/")}


def _has_account() -> bool:
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return True


def _refused(name: str, path: str, reason: str, remedy: str) -> SourceRefused:
    return SourceRefused(f"source {name!r}: {path!r} {reason}.", remedy=remedy)


def _unreadable(name: str, root: Path, path: str | Path, reader: Reader) -> SourceRefused:
    if reader.identity is None:
        return _refused(
            name,
            str(path),
            "cannot be read by this user",
            "change its permissions or leave it out.",
        )
    return _refused(
        name,
        str(path),
        f"cannot be read by the guest's user (uid {reader.identity[0]}, gid {reader.identity[1]})",
        f"chmod -R o+rX -- {str(root)!r}, or leave it out.",
    )
