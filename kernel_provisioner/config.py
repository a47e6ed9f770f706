"""Settings of one session from all places that may hold them (spec D5), each key by precedence.

Command line > environment of the server process > kernelspec (with Jupyter's own configuration) >
the user's backintel.toml > the machine's. The notebook, its directory and a kernel-start request
are never asked. These places are the owner's and trusted to mean what they say, but everything that
is unknown, malformed or asks for what a sandbox never gets is refused by file, key and reason.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TypeVar

from kernel_provisioner import profiles
from kernel_provisioner.endpoints import Endpoint, assign, read_table
from kernel_provisioner.engines.base import GuestEndpoint
from kernel_provisioner.engines.registry import DEFAULT_ENGINE, ENGINES
from kernel_provisioner.errors import ConfigError, ProfileRefused, SourceRefused
from kernel_provisioner.paths import StateDirs, state_dirs
from kernel_provisioner.profiles import MIB, Profile
from kernel_provisioner.sources import Source, check_name, check_source, guest_environment

ENGINE_VARIABLE = "BACKINTEL_SANDBOX"
_COMMAND_LINE = "command line"
_ENVIRONMENT = "environment"
SYSTEM_FILE = Path("/etc/backintel/backintel.toml")
MAX_FILE_BYTES = 1024 * 1024

_T = TypeVar("_T")

_PLAIN_KEY = re.compile(r"[A-Za-z0-9._-]+")
_KEYS = (
    "engine",
    "profile",
    "cell_deadline",
    "run_deadline",
    "on_deadline",
    "after_end",
    "grace",
    "sources",
    "endpoints",
)
# profile key in a file -> (field of Profile, bytes in one unit; 0: not a size)
_PROFILE_KEYS = {
    "ram_mib": ("ram_bytes", MIB),
    "workspace_mib": ("workspace_bytes", MIB),
    "artifacts_mib": ("artifacts_bytes", MIB),
    "temp_mib": ("temp_bytes", MIB),
    "cpus": ("cpus", 1),
    "cells": ("cells", 1),
    "cell_deadline": ("cell_deadline_s", 0),
    "run_deadline": ("run_deadline_s", 0),
    "grace": ("grace_s", 0),
    "on_deadline": ("on_cell_deadline", 0),
    "after_end": ("after_end", 0),
}
_OPTIONS = {"sources": "source", "endpoints": "endpoint"}  # where they differ from their keys
# keys whose value is one of a few words
_WORDS = {"on_deadline": profiles.DEADLINE_ACTIONS, "after_end": profiles.AFTER_END}
_PROFILE_OPTIONAL = {"cells": None, "grace": 5.0, "on_deadline": "cancel", "after_end": "stay"}
_NETWORK = "a sandbox has no network; that is not configurable"
_SECRETS = "a sandbox is set up without secrets and without variables of the host"
_REFUSED = {
    **dict.fromkeys(
        ("network", "net", "internet", "allow_network", "dns", "proxy", "ports", "publish"),
        _NETWORK,
    ),
    **dict.fromkeys(
        ("egress", "allow_hosts", "allowed_hosts", "allow_host", "allow_cidr", "allow_cidrs"),
        _NETWORK,
    ),
    **dict.fromkeys(
        ("secret", "secrets", "credentials", "env", "environment", "password", "token", "tokens"),
        _SECRETS,
    ),
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What one session is started with.

    ``engine`` differs from ``engine_requested`` only where ``auto`` was typed; it is still "auto"
    if the caller has not resolved that yet. ``environment`` holds the guest's variables for paths
    in sources (spec E3).
    """

    engine: str
    engine_requested: str
    profile: Profile
    sources: tuple[Source, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    endpoints: tuple[GuestEndpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class _Layer:
    """One place's own values, checked one by one; None where it is silent."""

    origin: str
    engine: str | None = None
    engine_requested: str | None = None
    profile: str | None = None
    cell_deadline: float | None = None
    run_deadline: float | None = None
    on_deadline: str | None = None
    after_end: str | None = None
    grace: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    endpoints: Mapping[str, Endpoint] = field(default_factory=dict)
    profiles: Mapping[str, Profile] = field(default_factory=dict)


def default_files(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the configuration files in order of precedence, whether or not they exist.

    A relative XDG_CONFIG_HOME is ignored, as its specification says: it would mean a file in the
    current directory.
    """
    base = environ.get("XDG_CONFIG_HOME", "")
    home = Path(base) if base.startswith("/") else Path.home() / ".config"
    return home / "backintel" / "backintel.toml", SYSTEM_FILE


def resolve_settings(
    *,
    command_line: Mapping[str, object],
    environ: Mapping[str, str],
    kernelspec: Mapping[str, object],
    files: Sequence[Path] | None = None,
    default_profile: str,
    host: profiles.HostCapacity | None = None,
) -> Settings:
    """Return the settings of one session (spec D5, E).

    Keys: engine, profile, cell_deadline, run_deadline, on_deadline, after_end, grace (seconds),
    sources ({name: path}) and endpoints ({name: "HOST:PORT"}); files also define
    ``[profiles.NAME]``. None is an unset value. The command line alone may say ``engine = "auto"``
    and, resolved, what was ``engine_requested``. Sources and endpoints of all places add up; of one
    name the place of highest precedence counts. ``files`` are given by precedence and may be
    missing; ``host`` defaults to this host.

    Raises ConfigError (place, key, reason), EngineUnavailable, ProfileRefused (also if the profile
    is above the host), SourceRefused.
    """
    paths = default_files(environ) if files is None else files
    layers = [
        _layer(_COMMAND_LINE, command_line),
        _environment(environ),
        _layer("kernelspec", kernelspec),
        *(_file_layer(path) for path in paths),
    ]
    requested, engine = _engine(layers)
    profile = _profile(layers, default_profile)
    profiles.admit(profile, host or profiles.host_capacity())
    sources = _sources(layers, environ)
    variables = guest_environment(environ, sources)
    return Settings(engine, requested, profile, sources, variables, _endpoints(layers))


def standing_engine(environ: Mapping[str, str], files: Sequence[Path] | None = None) -> str:
    """Return the engine of a run that names none. Raises ConfigError."""
    paths = default_files(environ) if files is None else files
    return _engine([_environment(environ), *(_file_layer(path) for path in paths)])[1]


def known_profiles(files: Sequence[Path] | None = None) -> dict[str, Profile]:
    """Return all profiles that can be named, built in and of the configuration files.

    Raises ConfigError.
    """
    paths = default_files(os.environ) if files is None else files
    known: dict[str, Profile] = {}
    for layer in reversed([_file_layer(path) for path in paths]):
        known |= layer.profiles
    known |= profiles.BUILTIN
    return known


def _environment(environ: Mapping[str, str]) -> _Layer:
    return _layer(_ENVIRONMENT, {"engine": environ.get(ENGINE_VARIABLE) or None})


def _engine(layers: Sequence[_Layer]) -> tuple[str, str]:
    engine = next((layer.engine for layer in layers if layer.engine), DEFAULT_ENGINE)
    return layers[0].engine_requested or engine, engine


def _profile(layers: Sequence[_Layer], default: str) -> Profile:
    known: dict[str, Profile] = {}
    for layer in reversed(layers):
        known |= layer.profiles
    known |= profiles.BUILTIN
    origin, name = next(
        ((layer.origin, layer.profile) for layer in layers if layer.profile), ("default", default)
    )
    if name not in known:
        raise ConfigError(
            f"{_place(origin, 'profile')}: {name!r} is not a profile.{_hint(name, known)}",
            remedy=f"choose one of {', '.join(sorted(known))}, or define [profiles.NAME].",
        )
    profile = known[name]
    cell_rank, cell = _first([layer.cell_deadline for layer in layers])
    run_rank, run = _first([layer.run_deadline for layer in layers])
    if name in profiles.ONE_DEADLINE:
        # One value for both: what was said with the higher precedence is it.
        if cell_rank < run_rank:
            run = None
        elif run_rank < cell_rank:
            cell = None
    elif cell is not None and run is not None and run_rank < cell_rank:
        # A shorter run asked for with higher precedence wins over a standing cell deadline.
        cell = min(cell, run)
    given = (("cell_deadline", cell, cell_rank), ("run_deadline", run, run_rank))
    try:
        profile = profiles.with_deadlines(profile, cell_s=cell, run_s=run)
    except ProfileRefused as error:
        places = [
            _place(layers[rank].origin, key) for key, value, rank in given if value is not None
        ]
        raise ConfigError(f"{', '.join(places)}: {error.message}", remedy=error.remedy) from None
    _, action = _first([layer.on_deadline for layer in layers])
    _, grace = _first([layer.grace for layer in layers])
    if action is not None:
        profile = replace(profile, on_cell_deadline=action)
    _, after_end = _first([layer.after_end for layer in layers])
    if after_end is not None:
        profile = replace(profile, after_end=after_end)
    if grace is not None:
        profile = replace(profile, grace_s=grace)
    return profile


def _first(values: Sequence[_T | None]) -> tuple[int, _T | None]:
    """Return (rank, value) of the first that is set, or (number of values, None)."""
    for rank, value in enumerate(values):
        if value is not None:
            return rank, value
    return len(values), None


def _sources(layers: Sequence[_Layer], environ: Mapping[str, str]) -> tuple[Source, ...]:
    given: dict[str, str] = {}
    for layer in reversed(layers):
        given |= layer.sources
    if not given:
        return ()
    # Moving the state must not open what another session of this user keeps where it stood.
    dirs: list[StateDirs] = [state_dirs(environ), state_dirs(), state_dirs({})]
    return tuple(check_source(name, path, dirs) for name, path in sorted(given.items()))


def _endpoints(layers: Sequence[_Layer]) -> tuple[GuestEndpoint, ...]:
    given: dict[str, tuple[Callable[[str], str], Endpoint]] = {}
    for layer in reversed(layers):
        for name, endpoint in layer.endpoints.items():
            given[name] = (partial(_place, layer.origin), endpoint)
    return assign(given)


def _file_layer(path: Path) -> _Layer:
    origin = str(path)
    try:
        # O_NONBLOCK: a FIFO in its place must be refused, not waited for.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode):
                raise ConfigError(f"{origin}: is not a regular file.", remedy="replace it.")
            if info.st_mode & 0o002 or info.st_uid not in (0, os.geteuid()):
                raise ConfigError(
                    f"{origin}: can be written by others (owner uid {info.st_uid}, mode "
                    f"{stat.S_IMODE(info.st_mode):04o}), and so could open this host's files.",
                    remedy=f"chown it to yourself or root and chmod o-w -- {origin!r}.",
                )
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return _Layer(origin)
    except OSError as error:
        raise ConfigError(
            f"{origin}: cannot be read ({error.strerror}).", remedy="mend or remove it."
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{origin}: is over {MAX_FILE_BYTES} bytes.", remedy="shorten it.")
    try:
        values = tomllib.loads(data.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{origin}: is not TOML ({error}).", remedy="correct it.") from None
    return _layer(origin, values, from_file=True)


def _layer(origin: str, values: Mapping[str, object], *, from_file: bool = False) -> _Layer:
    """Check one place's values, key by key. Raises ConfigError, EngineUnavailable."""
    typed = origin == _COMMAND_LINE
    allowed = (*_KEYS, *(("profiles",) if from_file else ()))
    layer = _Layer(origin)
    for key, value in values.items():
        if value is None:
            continue
        match key:
            case "engine":
                layer = replace(layer, engine=_engine_name(origin, value, typed))
            case "engine_requested" if typed:
                layer = replace(layer, engine_requested=_engine_name(origin, value, typed))
            case "profile":
                layer = replace(layer, profile=_text(origin, key, value))
            case "cell_deadline":
                layer = replace(layer, cell_deadline=_seconds(origin, key, value))
            case "run_deadline":
                layer = replace(layer, run_deadline=_seconds(origin, key, value))
            case "grace":
                layer = replace(layer, grace=_seconds(origin, key, value, zero_allowed=True))
            case "on_deadline":
                layer = replace(layer, on_deadline=_word(origin, key, key, value))
            case "after_end":
                layer = replace(layer, after_end=_word(origin, key, key, value))
            case "sources":
                layer = replace(layer, sources=_source_paths(origin, value, relative=typed))
            case "endpoints":
                layer = replace(layer, endpoints=read_table(partial(_place, origin), value))
            case "profiles" if from_file:
                layer = replace(layer, profiles=_profile_tables(origin, value))
            case _:
                raise _unknown(origin, key, key, allowed)
    return layer


def _unknown(origin: str, shown: str, key: str, allowed: Sequence[str]) -> ConfigError:
    if str(key).lower().replace("-", "_") in _REFUSED:
        return ConfigError(
            f"{_place(origin, shown)}: {_REFUSED[str(key).lower().replace('-', '_')]}.",
            remedy="remove the key.",
        )
    if key == "profiles":
        return ConfigError(
            f"{_place(origin, key)}: own profiles are defined in backintel.toml only.",
            remedy="move the table there.",
        )
    # Another key is not repeated: it may be a URL with a password, put before the equals sign.
    plain = _PLAIN_KEY.fullmatch(shown)
    place = f"{_place(origin, shown)}: is" if plain else f"{origin}: holds what is"
    return ConfigError(
        f"{place} not a known key.{_hint(str(key), allowed)}",
        remedy=f"known keys are {', '.join(allowed)}.",
    )


def _hint(word: str, known: Sequence[str] | Mapping[str, object]) -> str:
    close = get_close_matches(word[:100], list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _text(origin: str, key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _bad(origin, key, f"is {_brief(value)}; a text is needed")
    return value


def _engine_name(origin: str, value: object, typed: bool) -> str:
    name = _text(origin, "engine", value)
    if name in ENGINES:
        return name
    if name == "auto":
        if typed:
            return name
        raise _bad(
            origin,
            "engine",
            "'auto' is a word for the command line only, where its choice is seen",
            f"name the engine: {', '.join(ENGINES)}.",
        )
    older = " (an engine of older set-ups)" if name == "docker" else ""
    raise _bad(
        origin,
        "engine",
        f"{_brief(name)}{older} is not an engine.{_hint(name, ENGINES)}".removesuffix("."),
        f"use {', '.join((*ENGINES, 'auto') if typed else ENGINES)}.",
    )


def _seconds(origin: str, key: str, value: object, *, zero_allowed: bool = False) -> float:
    reason = profiles.seconds_problem(value, zero_allowed=zero_allowed)
    if reason or not isinstance(value, int | float):
        raise _bad(origin, key, reason or "is not a number")
    return float(value)


def _word(origin: str, key: str, word: str, value: object) -> str:
    if value not in _WORDS[word]:
        raise _bad(origin, key, f"is {_brief(value)}; {' or '.join(_WORDS[word])} is needed")
    return str(value)


def _source_paths(origin: str, value: object, *, relative: bool) -> dict[str, str]:
    """Return {name: absolute path}. Only a person at a command line has a current directory."""
    if not isinstance(value, Mapping):
        raise _bad(origin, "sources", f"is {_brief(value)}; a table of name = path is needed")
    paths = {}
    for name, path in value.items():
        key = f"sources.{name}"
        try:
            check_name(str(name))
        except SourceRefused as error:
            raise SourceRefused(
                f"{_place(origin, 'sources')}: {error.message}", remedy=error.remedy
            ) from None
        text = os.path.expanduser(_text(origin, key, path))
        if not os.path.isabs(text) and not relative:
            raise _bad(
                origin,
                key,
                f"{_brief(path)} is a relative path",
                "give the full path (~/ is fine).",
            )
        # Not normalized: `..` after a link means the link's target.
        paths[str(name)] = os.path.join(os.getcwd(), text)
    return paths


def _profile_tables(origin: str, value: object) -> dict[str, Profile]:
    if not isinstance(value, Mapping):
        raise _bad(origin, "profiles", "tables [profiles.NAME] are needed")
    return {str(name): _profile_table(origin, str(name), table) for name, table in value.items()}


def _profile_table(origin: str, name: str, table: object) -> Profile:
    key = f"profiles.{name}"
    if name in profiles.BUILTIN:
        raise _bad(origin, key, "is a built-in profile", "choose another name.")
    if not isinstance(table, Mapping):
        raise _bad(origin, key, "is not a table")
    fields: dict[str, object] = {"name": name}
    for word, value in table.items():
        if word not in _PROFILE_KEYS:
            raise _unknown(origin, f"{key}.{word}", word, tuple(_PROFILE_KEYS))
        target, unit = _PROFILE_KEYS[word]
        fields[target] = _profile_value(origin, f"{key}.{word}", word, unit, value)
    for word, (target, _) in _PROFILE_KEYS.items():
        if target not in fields:
            if word not in _PROFILE_OPTIONAL:
                raise _bad(origin, f"{key}.{word}", "is missing", "add it.")
            fields[target] = _PROFILE_OPTIONAL[word]
    profile = Profile(**fields)  # type: ignore[arg-type]  # each value was checked by its key
    found = profiles.problem(profile)
    if found:
        words = {target: word for word, (target, _) in _PROFILE_KEYS.items()}
        raise _bad(origin, f"{key}.{words.get(found[0], found[0])}", found[1])
    return profile


def _profile_value(origin: str, key: str, word: str, unit: int, value: object) -> object:
    if word in _WORDS:
        return _word(origin, key, word, value)
    if not unit:
        return _seconds(origin, key, value, zero_allowed=word == "grace")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _bad(origin, key, f"is {_brief(value)}; a whole number of at least 1 is needed")
    return value * unit


def _brief(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _bad(origin: str, key: str, reason: str, remedy: str = "correct the value.") -> ConfigError:
    return ConfigError(f"{_place(origin, key)}: {reason}.", remedy=remedy)


def _place(origin: str, key: str) -> str:
    """Return what a person wrote: an option, a variable, or a key of a file or kernelspec."""
    if origin == _ENVIRONMENT:
        return ENGINE_VARIABLE
    if origin == _COMMAND_LINE:
        word, _, name = key.partition(".")
        option = _OPTIONS.get(word, word.replace("_", "-"))
        return f"--{option} {name}".rstrip()
    return f"{origin}: {key}"
