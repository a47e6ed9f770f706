"""Builds the image on a Debian or Ubuntu host: signed packages, hash-locked wheels, caches.

Nothing is installed on the host. Programs of the image (its Python, fc-cache) run only to compile
and to fill caches, in namespaces with the image as their root and no network: as uid 10001 if we
are root, as ourselves otherwise. Where users may not make namespaces, the image's own dynamic
linker starts them.
"""

from __future__ import annotations

import os
import platform
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_provisioner.errors import PrepareFailed
from kernel_provisioner.images import apt, tree, wheels
from kernel_provisioner.images.extract import Extractor
from kernel_provisioner.images.process import Steps, Stopped

BUILD_UID = 10001
_JOBS = 2
_FONT_CACHE = "var/cache/fontconfig"
_PLOT_CACHE = "opt/backintel/cache/matplotlib"
_CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"


@dataclass(frozen=True, slots=True)
class Built:
    """What was built: the Python minor and the architecture of the image."""

    python: str
    arch: str


def host_arch() -> str:
    """Return the machine's architecture as Linux names it. Raises PrepareFailed for others."""
    arch = platform.machine()
    if arch not in wheels.ARCHES:
        raise PrepareFailed(
            f"there is no analysis image for {arch!r} machines "
            f"(there is for {', '.join(wheels.ARCHES)}).",
        )
    return arch


def build(steps: Steps, *, staging: Path, root: Path, guest: Path) -> Built:
    """Build the image as ``root`` (which must not exist), with scratch space in ``staging``.

    ``guest`` is the guest code directory (lists in ``image/``, offline guidance in ``docs/``).
    Raises PrepareFailed, which names the step and what its tool said.
    """
    apt.require_tools()
    recipe = guest / "image"
    host = apt.distribution(Path("/etc/os-release").read_text())
    arch = host_arch()
    wanted = apt.read_list(recipe / "debian-packages.txt")
    debian = apt.Apt.create(steps, staging / "apt", host)
    with steps.step(f"package lists of {host.origin} {host.version}"):
        complaints = debian.update()
        names, python = debian.resolve(wanted, complaints)
    lock = wheels.lock_for(recipe, python, arch)
    site = f"usr/local/lib/python{python}/dist-packages"
    tree.make_skeleton(root)
    packages: list[apt.Package] = []

    def system() -> None:
        with steps.step(f"{len(names)} system packages"):
            files = debian.download(wanted)
            skip = apt.read_list(recipe / "skip-packages.txt")
            packages.extend(apt.unpack(steps, files, Extractor(root), skip))

    def stack() -> None:
        with steps.step(f"{len(wheels.pins(lock.read_text()))} Python packages"):
            wheels.install(
                steps,
                python=python,
                arch=arch,
                lock=lock,
                target=staging / "wheels",
                scratch=staging / "pip",
            )

    both(steps, system, stack)
    with steps.step("arranging the tree"):
        (root / site).parent.mkdir(parents=True, exist_ok=True)
        os.rename(staging / "wheels", root / site)
        tree.strip(root, apt.read_list(recipe / "strip.txt"))
        wheels.settle(root / site, root / _CERTIFICATES)
        _add_what_scripts_would(root)
        tree.relativize_links(root)
        tree.drop_dangling(root)
        tree.make_mount_points(root)
        _add_records(root, packages, python, lock)
        add_docs(root, guest)
        tree.finish(root, os.geteuid(), os.getegid())
    _require(root, ("usr/bin/python3", "usr/bin/bash", f"{site}/ipykernel/__init__.py"))
    inside = Inside.enter(steps, root, python)
    with steps.step("byte-compiling"):
        _compile(inside, recipe, site)
    with steps.step("font caches"):
        _warm_fonts(inside, recipe)
    with steps.step("setting modes and owners"):
        tree.finish(root, os.geteuid(), os.getegid())
    return Built(python, arch)


def both(steps: Steps, first: Callable[[], None], second: Callable[[], None]) -> None:
    """Run two tasks at the same time; when one fails the other is stopped and the cause raised."""
    failures: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            failures.append(error)
            steps.stop.set()

    other = threading.Thread(target=guarded, args=(second,), name="prepare-wheels")
    other.start()
    guarded(first)
    other.join()
    causes = [error for error in failures if not isinstance(error, Stopped)]
    if causes:
        raise causes[0]
    steps.check()


def _add_what_scripts_would(root: Path) -> None:
    """Make what maintainer scripts make on an installed system, as far as it is needed."""
    tree.link_if_missing(root, "usr/bin/python", "python3")
    tree.link_if_missing(root, "usr/bin/awk", "mawk")
    tree.link_if_missing(root, "usr/bin/sh", "dash")
    tree.link_if_missing(root, "usr/bin/which", "which.debianutils")
    bundle = root / _CERTIFICATES
    bundle.parent.mkdir(parents=True, exist_ok=True)
    found = sorted((root / "usr/share/ca-certificates").rglob("*.crt"))
    bundle.write_bytes(b"".join(path.read_bytes().rstrip(b"\n") + b"\n" for path in found))
    localtime = root / "etc/localtime"
    tree.remove(localtime)
    localtime.symlink_to("../usr/share/zoneinfo/UTC")
    (root / "etc/timezone").write_text("UTC\n")


def _add_records(root: Path, packages: Sequence[apt.Package], python: str, lock: Path) -> None:
    """Write what the image is made of, for people and programs inside it."""
    home = root / "opt/backintel"
    home.mkdir(parents=True, exist_ok=True)
    lines = [f"{p.name} {p.version} {p.arch} sha256:{p.sha256}\n" for p in packages]
    (home / "system-packages.txt").write_text("".join(lines))
    versions = [f"python=={python}", *wheels.pins(lock.read_text())]
    (home / "package-versions.txt").write_text("\n".join(versions) + "\n")


def add_docs(root: Path, guest: Path) -> None:
    """Replace /docs by the offline guidance; only plain files and directories are taken."""
    target = root / "docs"
    tree.remove(target)
    target.mkdir()
    source = guest / "docs"
    for path in sorted(source.rglob("*")) if source.is_dir() else ():
        copy = target / path.relative_to(source)
        if path.is_symlink() or "__pycache__" in path.parts:
            continue
        if path.is_dir():
            copy.mkdir()
        elif path.is_file():
            shutil.copyfile(path, copy)


def _require(root: Path, names: Sequence[str]) -> None:
    for name in names:
        if not (root / name).is_file():
            raise PrepareFailed(
                f"the built image has no /{name}.",
                remedy="report this with the output of `backintel sandbox prepare`.",
            )


@dataclass(frozen=True, slots=True)
class Inside:
    """Runs programs of the image. ``isolated`` tells whether the image is their root directory."""

    steps: Steps
    root: Path
    python: str
    isolated: bool

    @classmethod
    def enter(cls, steps: Steps, root: Path, python: str) -> Inside:
        """Find out how programs of the image can be run here."""
        inside = cls(steps, root, python, isolated=True)
        try:
            inside.run(["/usr/bin/true"], what="running a program of the image")
        except PrepareFailed:
            steps.check()
            if os.geteuid() == 0:
                raise
            return cls(steps, root, python, isolated=False)
        return inside

    @property
    def prefix(self) -> str:
        """Return where the programs see the image's root: at nothing if they are isolated."""
        return "" if self.isolated else os.fspath(self.root)

    def run(self, program: Sequence[str], *, what: str, stdin: str = "") -> str:
        """Run ``program`` (its first item a path in the image) and return its output."""
        env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/nonexistent"}
        env |= {"PYTHONDONTWRITEBYTECODE": "1", "MPLCONFIGDIR": f"{self.prefix}/{_PLOT_CACHE}"}
        env |= {"OPENBLAS_NUM_THREADS": "1"}
        command = [*self._launcher(program[0]), *program[1:]]
        return self.steps.run(command, what=what, env=env, stdin=stdin)

    def _launcher(self, program: str) -> list[str]:
        if self.isolated:
            command = ["unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child"]
            command += ["--root", os.fspath(self.root)]
            if os.geteuid() == 0:
                user = str(BUILD_UID)
                before = ["setpriv", "--clear-groups", "--no-new-privs"]
                return [*before, *command, "--setgid", user, "--setuid", user, program]
            return [*command, "--user", "--map-current-user", program]
        linkers = sorted(self.root.glob("usr/lib*/ld-linux-*.so.*"))
        if not linkers:
            raise PrepareFailed("the built image has no dynamic linker in /usr/lib*.")
        libraries = sorted(path.parent for path in self.root.glob("usr/lib/*/libc.so.6"))
        search = ":".join(os.fspath(path) for path in libraries)
        return [os.fspath(linkers[0]), "--library-path", search, f"{self.prefix}{program}"]

    def give(self, *directories: Path) -> None:
        """Let the programs write into directories (made if need be) until modes are set."""
        for directory in directories:
            directory.mkdir(parents=True, exist_ok=True)
            if os.geteuid() == 0:
                os.chown(directory, BUILD_UID, BUILD_UID)


def _compile(inside: Inside, recipe: Path, site: str) -> None:
    """Write unchecked-hash .pyc files for the standard library and the wheels, in two processes."""
    sources = []
    for base in (f"usr/lib/python{inside.python}", "usr/lib/python3", site):
        sources += [path for path in (inside.root / base).rglob("*.py") if path.is_file()]
    inside.give(*{path.parent / "__pycache__" for path in sources})
    sources.sort(key=lambda path: (-path.stat().st_size, path))
    script = (recipe / "compile_pyc.py").read_text()

    def task(share: Sequence[Path]) -> Callable[[], None]:
        names = "".join(f"/{path.relative_to(inside.root)}\n" for path in share)
        command = [f"/usr/bin/python{inside.python}", "-I", "-S", "-c", script, inside.prefix]
        return lambda: _ignore(inside.run(command, what="byte-compiling", stdin=names))

    shares = [sources[index::_JOBS] for index in range(_JOBS)]
    both(inside.steps, task(shares[0]), task(shares[1]))


def _ignore(_output: str) -> None:
    """Drop a program's output: its failure was already raised."""


def _warm_fonts(inside: Inside, recipe: Path) -> None:
    """Fill fontconfig's and Matplotlib's caches."""
    inside.give(inside.root / _FONT_CACHE, inside.root / _PLOT_CACHE)
    if inside.isolated:  # with --sysroot fc-cache mixes in what the host has; none is better
        inside.run(
            ["/usr/bin/fc-cache", "--force", "--system-only"],
            what="filling the font cache (fc-cache)",
        )
    else:
        inside.steps.say("the font cache is left out: this user may not make namespaces here")
    script = (recipe / "warm_fonts.py").read_text()
    inside.run(
        [
            f"/usr/bin/python{inside.python}",
            "-s",
            "-c",
            script,
            inside.prefix,
            f"{inside.prefix}/{_PLOT_CACHE}",
        ],
        what="filling Matplotlib's font cache",
    )
