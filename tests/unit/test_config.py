"""Configuration: precedence of spec D5, and every refusal with place, key and reason."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernel_provisioner import config
from kernel_provisioner.config import Settings, resolve_settings, standing_engine
from kernel_provisioner.errors import (
    BackIntelError,
    ConfigError,
    ProfileRefused,
    SourceRefused,
)
from kernel_provisioner.profiles import MIB, HostCapacity

HOST = HostCapacity(8, 16384 * MIB)
OWN = """
[profiles.small]
ram_mib = 512
cpus = 1
workspace_mib = 64
artifacts_mib = 32
temp_mib = 64
cell_deadline = 30
run_deadline = 60
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "user.toml", tmp_path / "system.toml"


def resolve(
    files: tuple[Path, ...] = (),
    *,
    cli: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    spec: Mapping[str, object] | None = None,
    default: str = "analysis",
    host: HostCapacity = HOST,
) -> Settings:
    return resolve_settings(
        command_line=cli or {},
        environ=env or {},
        kernelspec=spec or {},
        files=files,
        default_profile=default,
        host=host,
    )


def test_defaults() -> None:
    settings = resolve()
    assert (settings.engine, settings.engine_requested) == ("smolvm", "smolvm")
    assert settings.profile.name == "analysis"
    assert settings.sources == ()
    assert resolve(default="interactive").profile.name == "interactive"


def test_each_place_yields_to_the_one_before(files: tuple[Path, Path]) -> None:
    user, system = files
    system.write_text("cell_deadline = 1\n")
    assert resolve(files).profile.cell_deadline_s == 1
    user.write_text("cell_deadline = 2\n")
    assert resolve(files).profile.cell_deadline_s == 2
    spec = {"cell_deadline": 3}
    assert resolve(files, spec=spec).profile.cell_deadline_s == 3
    assert resolve(files, spec=spec, cli={"cell_deadline": 4}).profile.cell_deadline_s == 4
    # None is an option that was not given.
    assert resolve(files, spec=spec, cli={"cell_deadline": None}).profile.cell_deadline_s == 3


def test_keys_are_resolved_one_by_one(files: tuple[Path, Path]) -> None:
    user, system = files
    user.write_text('on_deadline = "interrupt"\ngrace = 0\n')
    system.write_text('profile = "large"\ngrace = 9\n')
    profile = resolve(files, cli={"run_deadline": 1000}).profile
    assert (profile.name, profile.run_deadline_s, profile.cell_deadline_s) == ("large", 1000, 300)
    assert (profile.on_cell_deadline, profile.grace_s) == ("interrupt", 0)


def test_environment_names_only_the_engine() -> None:
    environ = {"BACKINTEL_SANDBOX": "bwrap", "BACKINTEL_PROFILE": "large", "CELL_DEADLINE": "1"}
    assert resolve(env=environ) == replace(resolve(), engine="bwrap", engine_requested="bwrap")
    assert resolve(env={"BACKINTEL_SANDBOX": ""}) == resolve()
    with pytest.raises(ConfigError, match=r"^BACKINTEL_SANDBOX: 'podman' is not an engine"):
        resolve(env={"BACKINTEL_SANDBOX": "podman"})


def test_the_engine_of_runs_that_name_none(files: tuple[Path, Path]) -> None:
    user, system = files
    assert standing_engine({}, files) == "smolvm"
    system.write_text('engine = "bwrap"\n')
    assert standing_engine({}, files) == "bwrap"
    user.write_text('engine = "smolvm"\n')
    assert standing_engine({}, files) == "smolvm"
    assert standing_engine({"BACKINTEL_SANDBOX": "bwrap"}, files) == "bwrap"
    with pytest.raises(ConfigError, match="'auto' is a word for the command line"):
        standing_engine({"BACKINTEL_SANDBOX": "auto"}, files)


def test_auto_is_a_word_for_the_command_line_only(files: tuple[Path, Path]) -> None:
    resolved = resolve(cli={"engine": "bwrap", "engine_requested": "auto"})
    assert (resolved.engine, resolved.engine_requested) == ("bwrap", "auto")
    assert resolve(cli={"engine": "auto"}).engine == "auto"
    for place in (
        {"env": {"BACKINTEL_SANDBOX": "auto"}},
        {"spec": {"engine": "auto"}},
    ):
        with pytest.raises(ConfigError, match="'auto' is a word for the command line"):
            resolve(**place)  # type: ignore[arg-type]
    files[0].write_text('engine = "auto"\n')
    with pytest.raises(ConfigError, match=r"user\.toml: engine: 'auto' is a word"):
        resolve(files)
    with pytest.raises(ConfigError, match="engine_requested: is not a known key"):
        resolve(spec={"engine_requested": "auto"})


def test_engines_that_are_not() -> None:
    assert resolve(spec={"engine": "smolvm"}).engine == "smolvm"
    with pytest.raises(
        ConfigError, match="'docker' \\(an engine of older set-ups\\) is not an eng"
    ):
        resolve(spec={"engine": "docker"})
    with pytest.raises(ConfigError, match="Did you mean 'bwrap'"):
        resolve(spec={"engine": "bwarp"})


def test_auto_is_named_where_it_may_be_said_and_only_there() -> None:
    for place, remedy in (
        ({"cli": {"engine": "foo"}}, "use smolvm, bwrap, auto."),
        ({"spec": {"engine": "foo"}}, "use smolvm, bwrap."),
        ({"env": {"BACKINTEL_SANDBOX": "foo"}}, "use smolvm, bwrap."),
    ):
        with pytest.raises(ConfigError) as refused:
            resolve(**place)  # type: ignore[arg-type]
        assert refused.value.remedy == remedy


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("cell_dedline = 3", "cell_dedline: is not a known key. Did you mean 'cell_deadline'"),
        ("network = true", "network: a sandbox has no network"),
        ("egress = ['example.org']", "egress: a sandbox has no network"),
        ("allow-hosts = []", "allow-hosts: a sandbox has no network"),
        ("secrets = {}", "secrets: a sandbox is set up without secrets"),
        ("env = {A = 'b'}", "env: a sandbox is set up without secrets"),
        ("cell_deadline = 0", "cell_deadline: is 0; a number of seconds above 0"),
        ("cell_deadline = -1.5", "cell_deadline: is -1.5; a number of seconds above 0"),
        ("cell_deadline = nan", "cell_deadline: is nan; a finite number"),
        ("run_deadline = inf", "run_deadline: is inf; a finite number"),
        ("run_deadline = true", "run_deadline: is True; a number of seconds"),
        ("run_deadline = '60'", "run_deadline: is '60'; a number of seconds"),
        ("run_deadline = 1e300", "run_deadline: is over the longest"),
        ("grace = -1", "grace: is -1; a number of seconds at least 0"),
        ("on_deadline = 'kill'", "on_deadline: is 'kill'; interrupt or cancel"),
        ("profile = 3", "profile: is 3; a text"),
        ("profile = 'analisys'", "profile: 'analisys' is not a profile. Did you mean 'analysis'"),
        ("engine = 7", "engine: is 7; a text"),
        ("sources = 'x=/y'", "sources: is 'x=/y'; a table"),
        ("[sources]\nx = 'data'", "sources.x: 'data' is a relative path"),
        ("[sources]\nx = 3", "sources.x: is 3; a text"),
        ("[sources]\n'a/b' = '/data'", "source name 'a/b' is not allowed"),
        ("[profiles.analysis]\ncpus = 1", "profiles.analysis: is a built-in profile"),
        ("profiles = 3", "profiles: tables"),
        ("[profiles]\nsmall = 3", "profiles.small: is not a table"),
        ("[profiles.x]\ncpus = 1", "profiles.x.ram_mib: is missing"),
        (OWN + "network = 1", "profiles.small.network: a sandbox has no network"),
        (OWN + "cpu = 1", "profiles.small.cpu: is not a known key. Did you mean 'cpus'"),
        (OWN.replace("cpus = 1", "cpus = 1.5"), "profiles.small.cpus: is 1.5; a whole number"),
        (OWN.replace("ram_mib = 512", "ram_mib = 64"), "profiles.small.ram_mib: is 64 MiB, but"),
        (
            OWN.replace("run_deadline = 60", "run_deadline = 9"),
            "profiles.small.cell_deadline: is 3",
        ),
        (OWN + "cells = 0", "profiles.small.cells: is 0"),
        ("cell_deadline = ", "is not TOML"),
        ('x = "\\ud800"', "is not TOML"),
        (
            "cell_deadline = 1000",
            "cell_deadline: profile 'analysis': the cell deadline of 1000 s is over the",
        ),
    ],
)
def test_bad_file_is_refused_by_file_key_and_reason(
    files: tuple[Path, Path], text: str, reason: str
) -> None:
    files[0].write_text(text)
    with pytest.raises(BackIntelError) as refused:
        resolve(files)
    assert isinstance(refused.value, ConfigError | SourceRefused)
    assert str(files[0]) in refused.value.message
    assert reason in refused.value.message
    assert refused.value.remedy


def test_a_key_that_may_be_a_password_is_not_repeated(files: tuple[Path, Path]) -> None:
    canary = "canary-5432"
    for table in ("", OWN):
        files[0].write_text(f'{table}"postgres://u:{canary}@h:1" = "x"\n')
        with pytest.raises(ConfigError) as refused:
            resolve(files)
        assert refused.value.message == f"{files[0]}: holds what is not a known key."
        assert canary not in json.dumps(refused.value.as_dict())


def test_a_bad_value_is_refused_even_where_it_is_overridden(files: tuple[Path, Path]) -> None:
    files[1].write_text("cell_deadline = 'soon'\n")
    with pytest.raises(ConfigError, match=r"system\.toml: cell_deadline"):
        resolve(files, cli={"cell_deadline": 5})


def test_what_was_typed_is_named_as_it_was_typed() -> None:
    for cli, place in (
        ({"cell_deadline": -1.0}, "--cell-deadline: is -1.0; "),
        ({"profile": "huge"}, "--profile: 'huge' is not a profile"),
        ({"engine": "podman"}, "--engine: 'podman' is not an engine"),
        ({"sources": {"a": ""}}, "--source a: is ''; "),
        ({"sources": {"a/b": "/srv"}}, "--source: source name 'a/b' is not allowed"),
    ):
        with pytest.raises(BackIntelError) as refused:
            resolve(cli=cli)
        assert refused.value.message.startswith(place)


def test_kernelspec_errors_name_the_kernelspec() -> None:
    with pytest.raises(ConfigError, match=r"kernelspec: profil: .*Did you mean 'profile'"):
        resolve(spec={"profil": "large"})
    with pytest.raises(ConfigError, match=r"defined in backintel\.toml only"):
        resolve(spec={"profiles": {}})


def test_own_profiles(files: tuple[Path, Path]) -> None:
    user, system = files
    system.write_text(OWN)
    profile = resolve(files, cli={"profile": "small"}).profile
    assert (profile.name, profile.ram_bytes, profile.cpus) == ("small", 512 * MIB, 1)
    assert (profile.cells, profile.grace_s, profile.on_cell_deadline) == (None, 5.0, "cancel")
    user.write_text('profile = "small"' + OWN.replace("cpus = 1", "cpus = 2") + "cells = 7")
    profile = resolve(files).profile
    assert (profile.cpus, profile.cells) == (2, 7)


def test_profile_above_the_host_is_refused_with_figures() -> None:
    with pytest.raises(ProfileRefused, match="3 CPUs, but this process may use 2 and 4096 MiB"):
        resolve(cli={"profile": "large"}, host=HostCapacity(2, 4096 * MIB))


def test_deadlines_of_different_places(files: tuple[Path, Path]) -> None:
    files[0].write_text("cell_deadline = 100\n")
    shorter = resolve(files, cli={"run_deadline": 60}).profile
    assert (shorter.cell_deadline_s, shorter.run_deadline_s) == (60, 60)
    with pytest.raises(ConfigError, match=r"^--cell-deadline, --run-deadline: profile"):
        resolve(files, cli={"run_deadline": 60, "cell_deadline": 61})
    # What contradicts each other may have been written in two places.
    files[0].write_text("run_deadline = 50\n")
    with pytest.raises(
        ConfigError, match=r"^--cell-deadline, /\S+/user\.toml: run_deadline: profile"
    ):
        resolve(files, cli={"cell_deadline": 61})


def test_benchmark_takes_the_value_of_highest_precedence_for_both() -> None:
    def deadlines(cli: dict[str, Any], spec: dict[str, Any]) -> tuple[float, float]:
        profile = resolve(cli={"profile": "benchmark", **cli}, spec=spec).profile
        return profile.cell_deadline_s, profile.run_deadline_s

    assert deadlines({"cell_deadline": 40}, {"run_deadline": 50}) == (40, 40)
    assert deadlines({"run_deadline": 40}, {"cell_deadline": 50}) == (40, 40)
    with pytest.raises(ConfigError, match="has one deadline"):
        deadlines({"run_deadline": 40, "cell_deadline": 30}, {})


def test_sources_of_all_places_add_up(files: tuple[Path, Path], tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).write_text(name)
        (tmp_path / name).chmod(0o644)
    files[0].write_text(f"[sources]\na = '{tmp_path}/one'\nb = '{tmp_path}/one'\n")
    sources = resolve(files, cli={"sources": {"b": f"{tmp_path}/two"}}).sources
    assert [(s.name, s.path.name) for s in sources] == [("a", "one"), ("b", "two")]


def test_a_relative_source_is_the_command_line_s_privilege(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.csv").write_text("x\n")
    (tmp_path / "data.csv").chmod(0o644)
    monkeypatch.chdir(tmp_path)
    (source,) = resolve(cli={"sources": {"d": "data.csv"}}).sources
    assert source.path == tmp_path.resolve() / "data.csv"
    with pytest.raises(ConfigError, match="relative path"):
        resolve(spec={"sources": {"d": "data.csv"}})


def test_path_variables_of_the_server(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir(mode=0o755)
    environ = {"BACKINTEL_FILES_DIR": f"{tmp_path}/f", "BACKINTEL_OTHER": "x"}
    settings = resolve(env=environ, spec={"sources": {"files": f"{tmp_path}/f"}})
    assert settings.environment == {"BACKINTEL_FILES_DIR": "/sources/files"}
    with pytest.raises(SourceRefused, match="BACKINTEL_FILES_DIR names"):
        resolve(env=environ)


def test_the_working_directory_is_never_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in (tmp_path, tmp_path / "backintel"):
        place.mkdir(exist_ok=True)
        (place / "backintel.toml").write_text("network = true")
    monkeypatch.chdir(tmp_path)
    for value in ("", ".", "relative"):
        for file in config.default_files({"XDG_CONFIG_HOME": value}):
            assert file.is_absolute()
            assert not file.is_relative_to(tmp_path)


def test_files_of_the_user_and_the_machine(tmp_path: Path) -> None:
    assert config.default_files({"XDG_CONFIG_HOME": str(tmp_path)}) == (
        tmp_path / "backintel/backintel.toml",
        Path("/etc/backintel/backintel.toml"),
    )


def test_file_that_others_can_write_is_refused(files: tuple[Path, Path]) -> None:
    files[0].write_text("grace = 1\n")
    files[0].chmod(0o646)
    with pytest.raises(ConfigError, match="can be written by others"):
        resolve(files)


def test_file_that_is_none(files: tuple[Path, Path]) -> None:
    files[0].mkdir()
    with pytest.raises(
        ConfigError, match=r"user\.toml: is not a regular file|user\.toml: cannot be read"
    ):
        resolve(files)
    os.mkfifo(files[1])
    with pytest.raises(ConfigError, match="not a regular file"):
        resolve(files[1:])


def test_giant_file_is_refused(files: tuple[Path, Path]) -> None:
    files[0].write_text("#" * (config.MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="is over 1048576 bytes"):
        resolve(files)
