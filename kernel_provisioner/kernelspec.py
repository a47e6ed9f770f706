"""The kernelspec of the sandbox: install, list, remove (spec A1, issue item 5).

What a kernelspec holds is the owner's word and is checked when it is installed: an engine of this
version, a known profile, sources and endpoints that may be given. Paths are stored absolute and
canonical. Kernelspecs of other makers are never touched.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kernel_provisioner.config import known_profiles, resolve_settings
from kernel_provisioner.endpoints import shown
from kernel_provisioner.engines.registry import DEFAULT_ENGINE, ENGINES
from kernel_provisioner.errors import UsageError

KERNEL_NAME = "backintel-sandbox"
DISPLAY_NAME = "BackIntel sandbox"
PROVISIONER = "backintel-provisioner"
DEFAULT_PROFILE = "interactive"
_LOGOS = ("logo-svg.svg", "logo-64x64.png", "logo-32x32.png")
_MAX_SPEC_BYTES = 1 << 20
# As jupyter_client has it, without upper case, which it folds.
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Location:
    """Where kernelspecs go: the user's data directory, or below a prefix."""

    user: bool = False
    prefix: Path | None = None

    @classmethod
    def default(cls) -> Location:
        """The environment that this command runs in, or the user's directory outside of one."""
        if sys.prefix != sys.base_prefix:
            return cls(prefix=Path(sys.prefix))
        return cls(user=True)


@dataclass(frozen=True, slots=True)
class Installed:
    """A kernelspec of ours that Jupyter finds."""

    name: str
    path: Path
    engine: str
    profile: str
    sources: Mapping[str, str]
    endpoints: Mapping[str, str]


def build(
    *,
    engine: str | None,
    profile: str | None,
    sources: Mapping[str, str],
    endpoints: Mapping[str, str] | None = None,
    name: str = KERNEL_NAME,
) -> dict[str, object]:
    """Return the content of kernel.json.

    Raises ConfigError, SourceRefused, ProfileRefused, UsageError.
    ``auto`` is refused: a kernelspec outlives the boot proof that ``auto`` rests on (spec B).
    ``name`` is the kernel's: of what Jupyter lists, it tells several of ours apart.
    """
    # Stated, not left open: a later default must not change a kernel that exists.
    words = {"engine": engine or DEFAULT_ENGINE, "profile": profile or DEFAULT_PROFILE}
    settings = resolve_settings(
        # An error names the option.
        command_line={"sources": dict(sources), "endpoints": endpoints},
        environ={},
        kernelspec=words,
        default_profile=DEFAULT_PROFILE,
    )
    _check_words(name, settings.engine, settings.profile.name)
    given = {source.name: str(source.path) for source in settings.sources if source.name in sources}
    config: dict[str, object] = {"engine": settings.engine, "profile": settings.profile.name}
    if given:
        config["sources"] = given
    reached = {
        e.name: f"{e.host}:{e.port}" for e in settings.endpoints if e.name in (endpoints or ())
    }
    if reached:
        config["endpoints"] = reached
    return {
        "argv": ["python3", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": _display_name(name, settings.engine, settings.profile.name),
        "language": "python",
        "interrupt_mode": "signal",
        "metadata": {
            "debugger": True,
            "kernel_provisioner": {"provisioner_name": PROVISIONER, "config": config},
        },
    }


def _display_name(name: str, engine: str, profile: str) -> str:
    """Return what people choose by: all that differs from the kernel that everybody has."""
    differs = [
        part
        for part, usual in ((profile, DEFAULT_PROFILE), (engine, DEFAULT_ENGINE))
        if part != usual
    ]
    if name != KERNEL_NAME and name not in differs:
        differs.insert(0, name)
    return f"{DISPLAY_NAME} ({', '.join(differs)})" if differs else DISPLAY_NAME


def _check_words(name: str, engine: str, profile: str) -> None:
    """Refuse a name that claims another engine or profile than the kernel has."""
    claims = {word for word in (*ENGINES, *known_profiles()) if word not in (engine, profile)}
    if name in claims:
        raise UsageError(
            f"the kernel's name {name!r} is that of an engine or profile which it would not have.",
            remedy="choose another --name.",
        )


def install(spec: Mapping[str, object], name: str, location: Location) -> Path:
    """Install a kernelspec with its logos, replacing one of ours; return its directory.

    Raises UsageError for a bad name, for a name that somebody else's kernel has, or if the
    directory cannot be written.
    """
    from jupyter_client.kernelspec import KernelSpecManager

    _check_name(name)
    resources = Path(__file__).resolve().parent / "resources"
    target = _directory(name, location)
    if target.is_dir() and _read(target) is None:
        raise UsageError(
            f"{target} is a kernel that this product did not install.",
            remedy="choose another --name.",
        )
    with tempfile.TemporaryDirectory(prefix="backintel-kernelspec-") as staged:
        source = Path(staged) / name
        source.mkdir()
        # The modes are copied along; every user of a shared prefix must be able to read them.
        source.chmod(0o755)
        (source / "kernel.json").write_text(json.dumps(spec, indent=1) + "\n")
        for logo in _LOGOS:
            shutil.copyfile(resources / logo, source / logo)
        for file in source.iterdir():
            file.chmod(0o644)
        try:
            path = KernelSpecManager().install_kernel_spec(
                str(source),
                kernel_name=name,
                user=location.user,
                prefix=str(location.prefix) if location.prefix else None,
            )
        except OSError as error:
            raise UsageError(
                f"the kernel cannot be installed into {target} ({error.strerror}).",
                remedy="use --user, or --prefix with a directory that this user can write.",
            ) from None
    return Path(path)


def uninstall(name: str, location: Location | None = None) -> Path:
    """Remove a kernelspec of ours and return where it was.

    Without ``location`` it is the one that Jupyter finds. Raises UsageError if there is none.
    """
    _check_name(name)
    if location is not None:
        directory = _directory(name, location)
        known = {name: directory} if directory.is_dir() else {}
    else:
        known = {item.name: item.path for item in installed()}
    path = known.get(name)
    if path is None or _read(path) is None:
        raise UsageError(
            f"there is no kernel {name!r} of this product.",
            remedy="see `backintel kernel list`.",
        )
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be removed ({error.strerror}).") from None
    return path


def installed() -> list[Installed]:
    """Return the kernelspecs of ours that Jupyter finds, by name."""
    from jupyter_client.kernelspec import KernelSpecManager

    specs = KernelSpecManager().find_kernel_specs()
    found = ((name, Path(path), _read(Path(path))) for name, path in sorted(specs.items()))
    return [
        Installed(
            name,
            path,
            str(config.get("engine", "")),
            str(config.get("profile", "")),
            dict(sources) if isinstance(sources := config.get("sources"), dict) else {},
            shown(config.get("endpoints")),
        )
        for name, path, config in found
        if config is not None
    ]


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a kernel name.",
            remedy="use at most 64 of a-z, 0-9 and . - _, the first a letter or digit.",
        )


def _directory(name: str, location: Location) -> Path:
    from jupyter_core.paths import jupyter_data_dir

    if location.user:
        return Path(jupyter_data_dir()) / "kernels" / name
    assert location.prefix is not None
    return Path(os.path.abspath(location.prefix)) / "share" / "jupyter" / "kernels" / name


def _read(directory: Path) -> dict[str, object] | None:
    """Return the provisioner's config of a kernelspec of ours; None for any other."""
    try:
        with (directory / "kernel.json").open("rb") as file:
            spec = json.loads(file.read(_MAX_SPEC_BYTES))
        entry = spec["metadata"]["kernel_provisioner"]
        if entry["provisioner_name"] != PROVISIONER:
            return None
        config = entry.get("config", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return config if isinstance(config, dict) else {}
