"""Debian packages for the image from the host's own apt configuration, without touching its state.

apt is trusted to verify: lists by the signatures that the host's configuration demands, packages by
the lists' hashes. Lists, cache and status are private to one preparation, so an ordinary user can
do this too, and the solver sees an empty machine and returns the complete closure.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_provisioner.errors import PrepareFailed
from kernel_provisioner.images.extract import Extractor
from kernel_provisioner.images.process import Steps, redact

TOOLS = ("apt-get", "dpkg-deb", "setpriv", "unshare")
IMPORT_REMEDY = (
    "import an image made elsewhere: `backintel sandbox prepare --image-archive FILE` "
    "(what `docker save` or an OCI build tool writes)."
)
_PYTHON = re.compile(r"^Inst python(3\.\d+)-minimal ", re.MULTILINE)
_INSTALL = re.compile(r"^Inst (\S+) ", re.MULTILINE)

# Only the distribution's own archive may supply packages: a third-party repository on the host
# (of a vendor, or a newer Python) must not change what the image is. Hooks of the host act on the
# host's state and are switched off; so is everything that would accept unsigned lists.
_PREFERENCES = """\
Package: *
Pin: release o={origin}
Pin-Priority: 990

Package: *
Pin: release *
Pin-Priority: -1
"""
_CONFIG = """\
Dir::State "{home}/state";
Dir::State::lists "{home}/lists";
Dir::State::status "{home}/status";
Dir::State::extended_states "{home}/extended_states";
Dir::Cache "{home}/cache";
Dir::Cache::archives "{home}/cache/archives";
Dir::Log "{home}/log";
Dir::Etc::preferences "{home}/preferences";
Dir::Etc::preferencesparts "/dev/null";
Acquire::Languages "none";
Acquire::Retries "3";
Acquire::http::Timeout "60";
Acquire::https::Timeout "60";
Acquire::AllowInsecureRepositories "false";
Acquire::AllowWeakRepositories "false";
Acquire::AllowDowngradeToInsecureRepositories "false";
APT::Get::AllowUnauthenticated "false";
APT::Install-Recommends "false";
APT::Install-Suggests "false";
APT::Keep-Downloaded-Packages "true";
Binary::apt-get::APT::Keep-Downloaded-Packages "true";
quiet "1";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Invoke;
#clear DPkg::Pre-Install-Pkgs;
#clear DPkg::Post-Invoke;
"""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The host's distribution, which is also the image's. ``origin`` is apt's name for it."""

    id: str
    version: str
    origin: str


@dataclass(frozen=True, slots=True)
class Package:
    """One unpacked package, for the image's record."""

    name: str
    version: str
    arch: str
    sha256: str


def distribution(os_release: str) -> Distribution:
    """Read os-release's text. Raises PrepareFailed for anything but Debian and Ubuntu."""
    values = {}
    for line in os_release.splitlines():
        key, _, value = line.partition("=")
        values[key.strip()] = value.strip().strip("\"'")
    origins = {"debian": "Debian", "ubuntu": "Ubuntu"}
    name = values.get("ID", "unknown")
    if name not in origins:
        raise PrepareFailed(
            f"the image can be built on Debian and Ubuntu hosts; this one is {name!r}.",
            remedy=IMPORT_REMEDY,
        )
    return Distribution(name, values.get("VERSION_ID", "unknown"), origins[name])


def require_tools(which: Callable[[str], str | None] = shutil.which) -> None:
    """Raise PrepareFailed if the host lacks a tool that building needs."""
    missing = [tool for tool in TOOLS if which(tool) is None]
    if missing:
        raise PrepareFailed(
            f"this host has no {', '.join(missing)}, so the image cannot be built here.",
            remedy=IMPORT_REMEDY,
        )


@dataclass(frozen=True, slots=True)
class Apt:
    """apt-get with private lists, cache and status below ``home``."""

    steps: Steps
    home: Path
    env: Mapping[str, str]

    @classmethod
    def create(cls, steps: Steps, home: Path, host: Distribution) -> Apt:
        """Lay out ``home`` (absolute). Raises PrepareFailed if apt could not read its path."""
        if not re.fullmatch(r"[\w./+@~:-]+", os.fspath(home)):
            raise PrepareFailed(
                f"apt cannot work below {home}: the path has unusual characters.",
                remedy="set BACKINTEL_HOME to a plain path.",
            )
        for part in ("state", "lists/partial", "cache/archives/partial", "log"):
            (home / part).mkdir(parents=True, exist_ok=True)
        # apt's own user checks signatures with files here; the caller's TMPDIR may be closed to it.
        scratch = home / "tmp"
        scratch.mkdir(exist_ok=True)
        scratch.chmod(0o1777)
        (home / "status").touch()
        (home / "preferences").write_text(_PREFERENCES.format(origin=host.origin))
        config = _CONFIG.format(home=home)
        if not all(path.stat().st_mode & 0o001 for path in (home, *home.parents)):
            config += 'APT::Sandbox::User "root";\n'  # its own user could not reach the lists
        (home / "apt.conf").write_text(config)
        env = {**os.environ, "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
        env["TMPDIR"] = str(scratch)
        return cls(steps, home, env)

    def _apt_get(self, *arguments: str, what: str) -> str:
        command = ["apt-get", "-c", str(self.home / "apt.conf"), *arguments]
        return self.steps.run(
            command,
            what=what,
            env=self.env,
            remedy="see that `apt-get update` works on this host, then prepare again; or "
            + IMPORT_REMEDY,
        )

    def update(self) -> str:
        """Fetch the lists and return apt's complaints, if any.

        A broken third-party repository does not matter as long as the packages can be resolved, so
        a failure is not raised here; the lists start empty, so nothing stale can be used instead.
        """
        try:
            self._apt_get("update", what="fetching the package lists (apt-get update)")
        except PrepareFailed as error:
            return error.message
        return ""

    def resolve(self, wanted: Sequence[str], complaints: str) -> tuple[list[str], str]:
        """Return the closure's package names and the Python minor (such as ``3.11``)."""
        try:
            plan = self._apt_get(
                "install", "--simulate", "--no-remove", *wanted, what="resolving the packages"
            )
        except PrepareFailed as error:
            if complaints:
                raise PrepareFailed(complaints, remedy=error.remedy) from None
            raise
        python = _PYTHON.search(plan)
        if python is None:
            raise PrepareFailed(
                "the host's archive offers no python3.X-minimal for the image.",
                remedy=IMPORT_REMEDY,
            )
        return _INSTALL.findall(plan), python.group(1)

    def download(self, wanted: Sequence[str]) -> list[Path]:
        """Download the closure and return the package files, sorted by name."""
        self._apt_get(
            "install",
            "--download-only",
            "--assume-yes",
            "--no-remove",
            *wanted,
            what="downloading the packages (apt-get install --download-only)",
        )
        return sorted((self.home / "cache/archives").glob("*.deb"))


def unpack(
    steps: Steps, files: Sequence[Path], extractor: Extractor, skip: Sequence[str]
) -> list[Package]:
    """Unpack package files into the extractor's root; no maintainer script is run.

    ``skip`` are shell patterns of package names to leave out. Returns what was unpacked.
    """
    env = {**os.environ, "LC_ALL": "C.UTF-8"}
    unpacked = []
    for file in files:
        name, version, arch = _file_facts(file)
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in skip):
            continue
        with steps.start(
            ["dpkg-deb", "--fsys-tarfile", str(file)], env=env, separate=True
        ) as child:
            extractor.apply(child.stdout)
            errors = child.finish()
            if child.status != 0:
                raise PrepareFailed(f"unpacking {file.name} failed: {redact(errors)[-500:]}")
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        unpacked.append(Package(name, version, arch, digest))
    return unpacked


def _file_facts(file: Path) -> tuple[str, str, str]:
    """Split apt's file name ``NAME_VERSION_ARCH.deb``; ``%3a`` stands for the epoch's colon."""
    name, version, arch = file.name.removesuffix(".deb").split("_")
    return name, version.replace("%3a", ":"), arch


def read_list(path: Path) -> list[str]:
    """Return the lines of a list file without comments and blanks."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [line for line in lines if line]
