"""The doctor behind ``backintel sandbox check``: what was checked, what was found, what to do.

Every check runs whatever the others found, and none changes the host beyond files that it removes
again. A check that cannot be made counts as failed: silence is not health.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from kernel_provisioner.checks import Check, Status, judge, run_step
from kernel_provisioner.engines.base import GUEST_GID, GUEST_UID
from kernel_provisioner.engines.registry import ENGINES, get_engine
from kernel_provisioner.errors import BackIntelError, ProfileRefused
from kernel_provisioner.paths import StateDirs

_MIB = 1 << 20
_TMP_NEEDED = 64 * _MIB
_DATA_WANTED = 2048 * _MIB
_CLONE_NEWNET = 0x40000000
_CLONE_NEWUSER = 0x10000000
_PR_SET_DUMPABLE = 4
_APPARMOR = Path("/proc/sys/kernel/apparmor_restrict_unprivileged_userns")
_MACHINES = ("x86_64", "aarch64")
_PREPARE = "run `backintel sandbox prepare`."


def examine(dirs: StateDirs, *, deep: bool = False, boot: bool = False) -> list[Check]:
    """Run all checks. ``deep`` digests image and engine anew, ``boot`` boots each engine."""
    steps: list[tuple[str, Callable[[], Iterable[Check]], str]] = [
        ("platform", _platform, ""),
        ("python", _python, ""),
        ("user namespaces", _user_namespaces, "bwrap"),
        ("limits", _limits, "bwrap"),
        ("engine", lambda: _engines(deep), ""),
        ("image", lambda: _image(dirs, deep), ""),
        ("preparation lock", lambda: _lock(dirs), ""),
        ("state", lambda: _state(dirs), ""),
        ("temporary space", lambda: _temporary_space(dirs), ""),
        ("profiles", _profiles, ""),
        ("boot proof", lambda: _proofs(dirs, boot), ""),
        ("kernels", _kernels, ""),
    ]
    return judge([check for step in steps for check in run_step(*step)])


def _platform() -> Iterable[Check]:
    found = f"{platform.system()} {platform.release()} on {platform.machine()}"
    if platform.system() != "Linux" or platform.machine() not in _MACHINES:
        yield Check(
            "platform", "fail", found, "use Linux on x86-64 or arm64; this version has no other."
        )
    else:
        yield Check("platform", "ok", found)


def _python() -> Iterable[Check]:
    yield Check("python", "ok", f"{platform.python_version()} in {sys.prefix}")


def _user_namespaces() -> Iterable[Check]:
    """Make one in a child that holds what the engine's launcher holds: no privileges."""
    failure = _try_user_namespace()
    if not failure:
        found = "can be made without privileges"
        yield Check("user namespaces", "ok", found)
        return
    settings = _settings()
    # There the engine's bwrap may have a profile that this process lacks: only a boot can tell.
    status: Status = "warn" if _is_apparmor(settings) else "fail"
    yield Check("user namespaces", status, failure, namespace_remedy(settings), "bwrap")


def _settings() -> dict[str, str]:
    """Return the kernel settings that forbid user namespaces, by name."""
    settings = {}
    for path in (
        Path("/proc/sys/user/max_user_namespaces"),
        Path("/proc/sys/kernel/unprivileged_userns_clone"),
        _APPARMOR,
    ):
        if path.exists():
            settings[path.name] = path.read_text().strip()
    return settings


def namespace_remedy(settings: Mapping[str, str]) -> str:
    """Return what lets this product make user namespaces, never what opens them to everybody."""
    if _is_apparmor(settings):
        return (
            "AppArmor restricts user namespaces to programs with a profile: give one with "
            "`userns,` to the engine's bwrap, leave the restriction on, then run "
            "`backintel sandbox check --boot`."
        )
    if settings.get("max_user_namespaces") == "0":
        return "set user.max_user_namespaces to at least 64 with sysctl."
    if settings.get("unprivileged_userns_clone") == "0":
        return "set kernel.unprivileged_userns_clone to 1 with sysctl."
    return "allow user namespaces; inside a container this is its runtime's seccomp profile."


def _is_apparmor(settings: Mapping[str, str]) -> bool:
    return settings.get(_APPARMOR.name, "0") != "0"


def _try_user_namespace() -> str:
    """Return an empty string, or which step failed and why. The child makes a network, too."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writable, _namespace_steps().encode()[:500])
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as answers:
        answer = answers.read(501).decode(errors="replace")
    os.waitpid(child, 0)
    return "" if answer == "ok" else answer or "the trial process died"


def _namespace_steps() -> str:
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if os.geteuid() == 0:
            step = "dropping privileges"
            os.setgroups([])
            os.setresgid(GUEST_GID, GUEST_GID, GUEST_GID)
            os.setresuid(GUEST_UID, GUEST_UID, GUEST_UID)
            # Changing the uid gave /proc/self to root; only this gives it back.
            libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
        uid = os.getuid()
        step = "making a user namespace"
        if libc.unshare(_CLONE_NEWUSER):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        # Under AppArmor's restriction the namespace can be made, but is worth nothing.
        step = "setting up its uid map"
        if os.path.exists("/proc/self/setgroups"):
            Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        step = "making a network namespace inside it"
        if libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    except OSError as error:
        return f"{step} failed: {error.strerror}"
    return "ok"


def _limits() -> Iterable[Check]:
    from kernel_provisioner.engines.bwrap.cgroups import HostView, choose
    from kernel_provisioner.engines.bwrap.scope import choose_scope

    group = choose("check", HostView.read(), choose_scope)
    yield Check("limits", "ok", f"memory, CPU and tasks by {group.kind}")


def _engines(deep: bool) -> Iterable[Check]:
    for name in ENGINES:
        engine = get_engine(name)
        try:
            facts = engine.verify(deep=deep)
        except BackIntelError as error:
            yield Check(f"engine {name}", "fail", error.message, error.remedy, name)
            continue
        found = f"{facts.version}, {len(facts.digests)} files as pinned; {engine.isolation}"
        yield Check(f"engine {name}", "ok", found)


def _image(dirs: StateDirs, deep: bool) -> Iterable[Check]:
    from kernel_provisioner.images.receipt import check_receipt, load_image

    image = load_image(dirs)
    check_receipt(image)
    found = f"{image.id[:19]}… ({image.source}, Python {image.python}, {image.arch})"
    if not deep:
        yield Check("image", "ok", f"{found}, unchanged by its receipt")
        return
    from kernel_provisioner.images.digest import tree_digest

    digest = tree_digest(image.root)
    if digest != image.id:
        yield Check("image", "fail", f"its tree has the digest {digest[:19]}…", _PREPARE)
    else:
        yield Check("image", "ok", f"{found}, every file digested")


def _lock(dirs: StateDirs) -> Iterable[Check]:
    from filelock import FileLock, Timeout

    if not dirs.prepare_lock.exists():
        yield Check("preparation lock", "ok", "free")
        return
    try:
        with FileLock(dirs.prepare_lock, timeout=0):
            yield Check("preparation lock", "ok", "free")
    except Timeout:
        yield Check("preparation lock", "warn", "held: a preparation runs", "wait for its end.")


def _state(dirs: StateDirs) -> Iterable[Check]:
    for name, path in (("data", dirs.data), ("state", dirs.state)):
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path) as file:
                file.write(b"\0" * 4096)
                file.flush()
        except OSError as error:
            found = f"{path} cannot be written ({error.strerror})"
            yield Check(
                name, "fail", found, "make it writable, or set BACKINTEL_HOME to another directory."
            )
            continue
        free = shutil.disk_usage(path).free
        found = f"{path} is writable, {free // _MIB} MiB free"
        if name == "data" and free < _DATA_WANTED and not dirs.image.exists():
            yield Check(name, "warn", found, "an image needs about 2 GiB; free some space.")
        else:
            yield Check(name, "ok", found)


def _temporary_space(dirs: StateDirs) -> Iterable[Check]:
    free = shutil.disk_usage(dirs.runtime.parent).free
    found = f"{free // _MIB} MiB free in {dirs.runtime.parent}"
    if free < _TMP_NEEDED:
        yield Check("temporary space", "fail", found, "free some space; sockets live there.")
    else:
        yield Check("temporary space", "ok", found)


def _profiles() -> Iterable[Check]:
    from kernel_provisioner.profiles import BUILTIN, admit, host_capacity

    host = host_capacity()
    admitted, refused = [], []
    for profile in BUILTIN.values():
        try:
            admit(profile, host)
        except ProfileRefused:
            refused.append(profile.name)
        else:
            admitted.append(profile.name)
    found = f"{host.cpus} CPUs and {host.ram_bytes // _MIB} MiB admit {', '.join(admitted) or '-'}"
    if refused:
        found += f", but not {', '.join(refused)}"
    if not admitted:
        yield Check("profiles", "fail", found, "use a host with at least 1 CPU and 1 GiB.")
    elif refused:
        yield Check("profiles", "warn", found, "use a larger host for these.")
    else:
        yield Check("profiles", "ok", found)
    yield from _free_memory()


def _free_memory() -> Iterable[Check]:
    from kernel_provisioner.profiles import ADMISSION_NOTE, BUILTIN

    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            break
    else:
        return
    tight = [p.name for p in BUILTIN.values() if p.ram_bytes > available]
    found = f"{available // _MIB} MiB available now"
    if tight:
        found += f", less than {', '.join(tight)} may use"
        yield Check("free memory", "warn", found, f"end other programs. {ADMISSION_NOTE}")
    else:
        yield Check("free memory", "ok", found)


def _proofs(dirs: StateDirs, boot: bool) -> Iterable[Check]:
    from kernel_provisioner import proofs
    from kernel_provisioner.cli.sandbox import prove

    for name in ENGINES:
        try:
            key = proofs.proof_key(get_engine(name).verify())
        except BackIntelError:
            # The line of the engine has reason and remedy already.
            yield Check(
                f"boot proof {name}",
                "fail",
                "not to be had: this engine cannot run here as it is",
                f"see engine {name} above.",
                name,
            )
            continue
        try:
            if boot:
                prove(dirs, name)
        except BackIntelError as error:
            yield Check(f"boot proof {name}", "fail", error.message, error.remedy, name)
            continue
        if proofs.is_valid(dirs, key):
            found = "booted just now" if boot else "booted since this machine started"
            yield Check(f"boot proof {name}", "ok", found)
        else:
            yield Check(
                f"boot proof {name}",
                "warn",
                "none for this boot and these engine files",
                "run `backintel sandbox check --boot`.",
            )


def _kernels() -> Iterable[Check]:
    from kernel_provisioner.kernelspec import installed

    found = installed()
    if found:
        yield Check(
            "kernels",
            "ok",
            ", ".join(f"{item.name} ({item.engine}) in {item.path}" for item in found),
        )
    else:
        yield Check(
            "kernels", "warn", "none is installed for Jupyter", "run `backintel kernel install`."
        )
