"""What one session owns on the host: its user, its state directory, its sockets' directory.

Everything is made before the monitor starts, carries the session's name and is removed with it. As
root it belongs to a user that no other process has.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from kernel_provisioner.engines.base import CHANNELS, GuestSpec, SourceMount
from kernel_provisioner.engines.smolvm.command import (
    AGENT,
    MOST_ENDPOINTS,
    SOURCE_FILE,
    View,
    endpoint_name,
    host_name,
)
from kernel_provisioner.engines.smolvm.release import AGENT_ROOT, Prepared
from kernel_provisioner.errors import StartFailed
from kernel_provisioner.paths import StateDirs

_FIRST_USER = 0x70000000
_USERS = 1 << 24
"""A range of user ids that no system gives to anybody: below 2**31, above what containers map."""
_BACKLOG = 64


@dataclass(frozen=True, slots=True)
class Places:
    """The two directories of a session, by which a sweep finds them."""

    directory: Path
    sockets: Path

    @classmethod
    def of(cls, spec: GuestSpec, dirs: StateDirs) -> Places:
        """Return the directories of a session; nothing is made."""
        return cls(dirs.machines / spec.session, spec.socket_dir / spec.session)

    @property
    def state(self) -> Path:
        """The program's state and home. It lets others look in there, so it lies inside."""
        return self.directory / "state"

    @property
    def home(self) -> Path:
        """As a user: a link to the state, as the program is told of it.

        It makes sockets deep below its home. A Unix socket's path has 107 bytes at most, and those
        of an ordinary ``~/.local/share`` had 129: no such machine could boot.
        """
        return self.sockets / "h"

    @property
    def agent(self) -> Path:
        """The host's socket of the guest's agent."""
        return self.sockets / AGENT

    @property
    def channels(self) -> dict[str, Path]:
        """The host's sockets of the kernel's channels."""
        names = (host_name(str(port)) for port in range(1, len(CHANNELS) + 1))
        return {channel: self.sockets / name for channel, name in zip(CHANNELS, names, strict=True)}


def new_user() -> int | None:
    """As root: a user id that no process has now. None as an ordinary user."""
    if os.geteuid() != 0:
        return None
    taken = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                taken.add(os.stat(f"/proc/{name}").st_uid)
    while True:
        user = _FIRST_USER + secrets.randbelow(_USERS)
        if user not in taken:
            return user


def make(places: Places, prepared: Prepared, user: int | None) -> None:
    """Make the directories and the session's own agent root. Raises StartFailed.

    The guest's root writes into its agent root, so no two sessions share one. A hard link instead
    of a copy would change the prepared file's ctime, and with it break the release's receipt.
    """
    try:
        places.directory.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
        for directory in (places.directory, places.state, places.sockets):
            directory.mkdir(mode=0o700)
            _give(directory, user)
        source = prepared.directory / AGENT_ROOT
        _copy_tree(str(source), str(places.state / AGENT_ROOT), user)
    except OSError as error:
        raise StartFailed(
            f"the session's directories cannot be made ({error.strerror}: {error.filename}).",
            remedy="free some space, or make the product's state directory writable.",
            phase="launch",
        ) from None


def _give(path: Path | str, user: int | None) -> None:
    if user is not None:
        os.chown(path, user, user, follow_symlinks=False)


def _copy_tree(source: str, target: str, user: int | None) -> None:
    os.mkdir(target, 0o755)
    with os.scandir(source) as entries:
        for entry in entries:
            to = f"{target}/{entry.name}"
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), to)
            elif entry.is_dir(follow_symlinks=False):
                _copy_tree(entry.path, to, user)
            else:
                shutil.copy2(entry.path, to, follow_symlinks=False)
                _give(to, user)
    os.chmod(target, stat.S_IMODE(os.stat(source).st_mode) | 0o700)
    _give(target, user)


def listen(spec: GuestSpec, places: Places, user: int | None) -> dict[str, socket.socket]:
    """Listen on the host for each endpoint, in the sockets' directory. Raises StartFailed.

    Only the monitor's user can connect: the directory is its own, and so are the sockets.
    """
    if len(spec.endpoints) > MOST_ENDPOINTS:
        raise StartFailed(
            f"{len(spec.endpoints)} endpoints are more than a microVM can have.",
            remedy=f"assign at most {MOST_ENDPOINTS}.",
            phase="launch",
        )
    with contextlib.ExitStack() as opened:
        listeners = {}
        for number, endpoint in enumerate(spec.endpoints):
            path = str(places.sockets / endpoint_name(number))
            sock = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.setblocking(False)
            try:
                sock.bind(path)
                _give(path, user)
                os.chmod(path, 0o600)
                sock.listen(_BACKLOG)
            except OSError as error:
                raise StartFailed(
                    f"the host cannot listen for the endpoint {endpoint.name}: {error}.",
                    remedy="make the product's runtime directory writable, with a shorter path.",
                    phase="launch",
                ) from None
            listeners[endpoint.name] = sock
        opened.pop_all()
        return listeners


def single_files(sources: tuple[SourceMount, ...]) -> frozenset[int]:
    """Return the numbers of the sources that are single files."""
    return frozenset(n for n, source in enumerate(sources) if source.path.is_file())


def own_view(spec: GuestSpec, places: Places, prepared: Prepared) -> View:
    """Return the view of a monitor that runs as this very user: the host's own paths.

    The guest's code and single files are put into the state directory: the monitor shares
    directories only, and refuses some places where a distribution may install the code. Raises
    StartFailed for a path that its options cannot express.
    """
    files = single_files(spec.sources)
    shared = [source.path for number, source in enumerate(spec.sources) if number not in files]
    for path in (places.state, spec.image_root, *shared):
        if ":" in str(path):
            raise StartFailed(
                f"{path} holds a colon, which separates names in the monitor's options.",
                remedy="give it a name without one.",
                phase="launch",
            )
    places.home.symlink_to(places.state)
    code = places.state / "guest"
    shutil.copytree(spec.guest_code, code, ignore=shutil.ignore_patterns("__pycache__"))
    sources = []
    for number, source in enumerate(spec.sources):
        path = source.path
        if number in files:
            directory = places.state / f"f{number}"
            directory.mkdir(mode=0o700)
            try:
                os.link(path, directory / SOURCE_FILE)
            except OSError:  # on another file system
                shutil.copyfile(path, directory / SOURCE_FILE)
            path = directory
        sources.append(str(path))
    return View(
        engine=str(prepared.directory),
        image=str(spec.image_root),
        guest_code=str(code),
        state=str(places.home),
        sockets=str(places.sockets),
        sources=sources,
    )
