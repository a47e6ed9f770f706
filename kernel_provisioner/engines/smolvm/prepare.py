"""Prepares the pinned release once: copies verified files, lets the program expand its templates.

Under the product's file lock, so that no session pays for the first use or races for it. The
result is moved into place whole, with its receipt; an interruption leaves the old state or none,
and what a killed preparation had begun is removed by the next one.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from kernel_provisioner.engines.bwrap import linux, waiting
from kernel_provisioner.engines.smolvm import failures, host
from kernel_provisioner.engines.smolvm.contents import expanded_digest
from kernel_provisioner.engines.smolvm.launcher import STAGE, Launch, Tree, run_child
from kernel_provisioner.engines.smolvm.release import (
    AGENT_ARCHIVE,
    AGENT_ROOT,
    PROGRAM,
    SCHEMA,
    TEMPLATES,
    Pins,
    Prepared,
    copy_verified,
    find_package,
    home,
    load_pins,
    load_prepared,
    receipt_path,
    release_dir,
)
from kernel_provisioner.engines.smolvm.workspace import new_user
from kernel_provisioner.errors import EngineUnavailable, LockTimeout, PrepareFailed
from kernel_provisioner.images.receipt import settle, stat_listing
from kernel_provisioner.paths import StateDirs
from kernel_provisioner.records import write_json

WARM_S = 300.0
"""Longest that the expansion may take: 25 s on a small machine, disks of 30 GiB, all holes."""
_LOCK_S = 120.0
_DYING_S = 10.0
"""How long a killed preparation's program, which dies with it, may still write what it began."""
_BEGUN = re.compile(r"\.[0-9.]+-[0-9a-f]{12}\.[0-9a-f]{8}(\.warm)?")
"""The names of ``_make`` and ``_expand``."""


def prepare(dirs: StateDirs, progress: Callable[[str], None]) -> Prepared:
    """Return the prepared release, making it if needed.

    Raises EngineUnavailable, HostRefused, LockTimeout, PrepareFailed.
    """
    from filelock import FileLock, Timeout

    host.check_host()
    if not _begun(dirs):
        with contextlib.suppress(EngineUnavailable):
            return load_prepared(dirs)
    dirs.data.mkdir(mode=0o755, parents=True, exist_ok=True)
    try:
        with FileLock(dirs.prepare_lock, timeout=_LOCK_S):
            # Under the lock nobody is at work on any of them.
            _remove(_begun(dirs))
            with contextlib.suppress(EngineUnavailable):
                return load_prepared(dirs)
            _make(dirs, load_pins(), progress)
    except Timeout:
        raise LockTimeout(
            f"another preparation held {dirs.prepare_lock} for {_LOCK_S:g} s.",
            remedy="wait for its end and try again.",
        ) from None
    return load_prepared(dirs)


def _begun(dirs: StateDirs) -> list[Path]:
    """Return the directories of preparations that run or were killed."""
    try:
        with os.scandir(home(dirs)) as scan:
            return [
                Path(entry)
                for entry in scan
                if _BEGUN.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
            ]
    except FileNotFoundError:
        return []


def _remove(directories: list[Path]) -> None:
    deadline = waiting.deadline_in(_DYING_S)
    for path in directories:
        while path.exists():
            try:
                shutil.rmtree(path)
            except OSError as error:
                if not waiting.left(deadline):
                    raise PrepareFailed(
                        f"{path}, left by a killed preparation, cannot be removed "
                        f"({error.strerror}: {error.filename}).",
                        remedy="remove it and try again.",
                    ) from None
                time.sleep(0.05)


def _make(dirs: StateDirs, pins: Pins, progress: Callable[[str], None]) -> None:
    package = find_package()
    place = release_dir(dirs, pins)
    place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    staged = place.parent / f".{place.name}.{secrets.token_hex(4)}"
    try:
        staged.mkdir(mode=0o755)
        progress(f"copying smolmachines {pins.version} ({len(pins.files)} files) and verifying it")
        for name, digest in pins.files.items():
            copy_verified(package / name, staged / name, digest)
        (staged / PROGRAM).chmod(0o755)
        progress("expanding its disk templates and agent (once, about half a minute)")
        _expand(staged)
        _publish(staged, place, pins)
    except OSError as error:
        raise PrepareFailed(
            f"the smolvm engine cannot be prepared ({error.strerror}: {error.filename}).",
            remedy="free some space, or make the product's data directory writable.",
        ) from None
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _publish(staged: Path, place: Path, pins: Pins) -> None:
    receipt = receipt_path(place)
    receipt.unlink(missing_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    staged.rename(place)
    write_receipt(receipt, place, pins)


def write_receipt(receipt: Path, place: Path, pins: Pins) -> None:
    """Write the receipt of a release that lies in its place, whole: up to 2 s. Raises OSError."""
    data = {
        "schema": SCHEMA,
        "version": pins.version,
        "files": dict(pins.files),
        "expanded": expanded_digest(place, pins.files),
    }
    listing = stat_listing(place)
    # A receipt counts only when every ctime lies behind it for sure.
    time.sleep(settle(listing))
    write_json(receipt, {**data, "stat": listing.digest})


def _expand(staged: Path) -> None:
    """Let the program itself do it, as in a first start, but with nothing to boot."""
    user = new_user()
    warm = staged.parent / f"{staged.name}.warm"
    warm.mkdir(mode=0o700)
    try:
        if user is not None:
            os.chown(warm, user, user)
        said = _run_once(staged, warm, user)
        cache = warm / ".cache" / "smolvm"
        roots = [path.parent for path in cache.glob("rootfs/*/.extracted")]
        for name in TEMPLATES:
            # Where it may write beside itself, as a user may, it expands them there at once.
            if (cache / name).is_file():
                (cache / name).rename(staged / name)
        if len(roots) != 1 or not all((staged / name).is_file() for name in TEMPLATES):
            raise PrepareFailed(
                "smol-vmm did not expand its templates. It said: "
                f"{failures.message_of(said)[-600:]}",
                remedy="see `backintel sandbox check`.",
            )
        for marker in roots[0].glob(".smolvm-ready.*"):
            marker.unlink()
        roots[0].rename(staged / AGENT_ROOT)
        _take_over(staged)
    finally:
        shutil.rmtree(warm, ignore_errors=True)


def _take_over(staged: Path) -> None:
    """Make everything ours, so that no session's user can change what the next one boots."""
    owner, group = os.geteuid(), os.getegid()
    for directory, names, files in os.walk(staged):
        for name in (*names, *files):
            os.chown(os.path.join(directory, name), owner, group, follow_symlinks=False)


def _run_once(staged: Path, warm: Path, user: int | None) -> str:
    engine, state = (f"{STAGE}/e", f"{STAGE}/d") if user is not None else (str(staged), str(warm))
    fds = [linux.open_path(path.resolve()) for path in (staged, warm)]
    output, output_end = os.pipe2(os.O_CLOEXEC)
    stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    launch = Launch(
        command=[
            f"{engine}/{PROGRAM}",
            *("--error-format", "json", "--state-dir", state, "machine", "run"),
            *("--mem", "512", "--cpus", "1", "--timeout", "1s", "--", "/bin/true"),
        ],
        environ={
            "HOME": state,
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "SMOLVM_LIB_DIR": engine,
            "SMOLVM_AGENT_ROOTFS_TAR": f"{engine}/{AGENT_ARCHIVE}",
            "SMOLVM_BOOT_BINARY": "/bin/false",
            "SMOLVM_SECCOMP": "enforce",
            "SMOLVM_LANDLOCK": "enforce",
        },
        stdin=stdin,
        output=output_end,
        errors=output_end,
        parent=os.getpid(),
        backstop_s=WARM_S,
        open_files=host.open_files(),
        user=user,
        trees={"e": Tree(fds[0]), "d": Tree(fds[1], writable=True)},
    )
    pid = os.fork()
    if pid == 0:
        run_child(launch)
    for fd in (*fds, stdin, output_end):
        os.close(fd)
    try:
        return _read_to_end(output, waiting.deadline_in(WARM_S))
    finally:
        os.close(output)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # our own child, not reaped yet: it is still this one
        os.waitpid(pid, 0)


def _read_to_end(fd: int, deadline: float) -> str:
    said = bytearray()
    while waiting.ready(fd, waiting.left(deadline)):
        chunk = os.read(fd, 65536)
        if not chunk:
            return said.decode(errors="replace")
        said += chunk
        del said[:-65536]
    raise PrepareFailed(
        f"smol-vmm did not expand its templates within {WARM_S:g} s.",
        remedy="try again when the machine is less busy.",
    )
