"""Kernelspecs: what is written, what is refused at install time, what is never touched."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

import pytest
from jupyter_client.kernelspec import KernelSpecManager

from kernel_provisioner import kernelspec, proofs
from kernel_provisioner.cli.main import main
from kernel_provisioner.engines.registry import CHOOSE_WEAKER, get_engine
from kernel_provisioner.engines.smolvm import host
from kernel_provisioner.errors import BackIntelError, ConfigError, SourceRefused, UsageError
from kernel_provisioner.paths import state_dirs


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "prefix/share/jupyter"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "user"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("BACKINTEL_HOME", str(tmp_path / "home"))
    return tmp_path / "prefix"


def _config(path: Path) -> dict[str, object]:
    spec = json.loads((path / "kernel.json").read_text())
    config: dict[str, object] = spec["metadata"]["kernel_provisioner"]["config"]
    return config


def test_the_installed_kernel_is_found_by_jupyter(prefix: Path) -> None:
    assert main(["kernel", "install", "--prefix", str(prefix)]) == 0
    spec = KernelSpecManager().get_kernel_spec("backintel-sandbox")
    assert spec.display_name == "BackIntel sandbox"
    assert spec.language == "python"
    assert spec.interrupt_mode == "signal"
    assert spec.metadata["debugger"] is True
    assert spec.metadata["kernel_provisioner"] == {
        "provisioner_name": "backintel-provisioner",
        "config": {"engine": "smolvm", "profile": "interactive"},
    }


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], "BackIntel sandbox"),
        (["--profile", "analysis"], "BackIntel sandbox (analysis)"),
        (["--profile", "analysis", "--name", "analysis"], "BackIntel sandbox (analysis)"),
        (["--name", "sales"], "BackIntel sandbox (sales)"),
        (["--engine", "smolvm"], "BackIntel sandbox"),
        (["--engine", "bwrap"], "BackIntel sandbox (bwrap)"),
        (
            ["--name", "sales", "--profile", "analysis", "--engine", "bwrap"],
            "BackIntel sandbox (sales, analysis, bwrap)",
        ),
    ],
)
def test_kernels_that_differ_are_told_apart_in_the_launcher(
    prefix: Path, words: list[str], shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kernel", "install", "--prefix", str(prefix), *words]) == 0
    name = words[words.index("--name") + 1] if "--name" in words else "backintel-sandbox"
    assert KernelSpecManager().get_kernel_spec(name).display_name == shown
    assert f"installed '{shown}' as {name} " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["bwrap", "analysis"])
def test_a_name_that_claims_what_the_kernel_has_not_is_refused(
    prefix: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kernel", "install", "--prefix", str(prefix), "--name", name]) == 2
    assert f"{name!r}" in capsys.readouterr().err
    assert not (prefix / "share/jupyter/kernels" / name).exists()


def test_its_files_can_be_read_by_every_user(prefix: Path) -> None:
    previous = os.umask(0o077)
    try:
        main(["kernel", "install", "--prefix", str(prefix)])
    finally:
        os.umask(previous)
    path = prefix / "share/jupyter/kernels/backintel-sandbox"
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.iterdir()}
    assert modes == dict.fromkeys(
        ("kernel.json", "logo-svg.svg", "logo-64x64.png", "logo-32x32.png"), 0o644
    )
    assert path.stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("size", [32, 64])
def test_the_logos_have_the_size_that_jupyter_expects(size: int) -> None:
    data = (Path(kernelspec.__file__).parent / "resources" / f"logo-{size}x{size}.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[at : at + 4]) for at in (16, 20))
    assert (width, height) == (size, size)


def test_the_isolation_is_said(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["kernel", "install", "--prefix", str(prefix)])
    assert "isolation microVM\n" in capsys.readouterr().out
    main(["kernel", "install", "--prefix", str(prefix), "--engine", "bwrap"])
    assert "namespaces: weaker isolation" in capsys.readouterr().out


def test_that_the_engine_was_not_booted_is_said_until_there_is_a_proof(
    prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["kernel", "install", "--prefix", str(prefix), "--engine", "bwrap"]
    assert main(words) == 0
    told = "bwrap has not been booted here yet: `backintel sandbox check --boot`."
    assert told in capsys.readouterr().err
    proofs.store(state_dirs(), proofs.proof_key(get_engine("bwrap").verify()), {})
    assert main(words) == 0
    assert capsys.readouterr().err == ""


def test_a_kernel_that_cannot_start_here_is_installed_and_the_owners_choice_is_named(
    prefix: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "check_host", lambda: host.check_kvm(prefix / "kvm"))
    assert main(["kernel", "install", "--prefix", str(prefix)]) == 0
    said = capsys.readouterr().err
    assert "this kernel will not start here yet" in said
    assert "does not exist" in said and CHOOSE_WEAKER in said
    path = prefix / "share/jupyter/kernels/backintel-sandbox"
    assert _config(path)["engine"] == "smolvm"


def test_sources_are_stored_by_canonical_path(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir(mode=0o755)
    (tmp_path / "data/a.csv").write_text("x")
    (tmp_path / "link").symlink_to("data")
    monkeypatch.chdir(tmp_path)
    main(["kernel", "install", "--prefix", str(prefix), "--source", "sales=link"])
    path = prefix / "share/jupyter/kernels/backintel-sandbox"
    assert _config(path)["sources"] == {"sales": str((tmp_path / "data").resolve())}


def test_endpoints_are_stored_and_listed(prefix: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--endpoint", "sales=DB.example.org:5432", "--endpoint", "files=localhost:9000"]
    assert main(["kernel", "install", "--prefix", str(prefix), *words]) == 0
    path = prefix / "share/jupyter/kernels/backintel-sandbox"
    expected = {"files": "localhost:9000", "sales": "db.example.org:5432"}
    assert _config(path)["endpoints"] == expected
    capsys.readouterr()
    assert main(["kernel", "list"]) == 0
    assert "    endpoint sales  db.example.org:5432\n" in capsys.readouterr().out
    assert main(["kernel", "list", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["kernels"]
    assert listed["endpoints"] == expected


def test_endpoints_of_a_file_are_not_copied_into_the_kernel(prefix: Path, tmp_path: Path) -> None:
    file = tmp_path / "config/backintel/backintel.toml"
    file.parent.mkdir(parents=True)
    file.write_text('[endpoints]\nfiles = "localhost:9000"\n')
    words = ["kernel", "install", "--prefix", str(prefix)]
    assert main(words) == 0
    path = prefix / "share/jupyter/kernels/backintel-sandbox"
    assert "endpoints" not in _config(path)
    assert main([*words, "--endpoint", "sales=db:5432"]) == 0
    assert _config(path)["endpoints"] == {"sales": "db:5432"}


def test_the_list_shows_no_password_that_somebody_wrote_into_a_kernel(
    prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kernel", "install", "--prefix", str(prefix)]) == 0
    file = prefix / "share/jupyter/kernels/backintel-sandbox/kernel.json"
    spec = json.loads(file.read_text())
    config = spec["metadata"]["kernel_provisioner"]["config"]
    password = secrets.token_hex(8)
    address = f"postgres://analyst:{password}@db:5432"
    config["endpoints"] = {"sales": address, address: "db:5432"}
    file.write_text(json.dumps(spec))
    capsys.readouterr()
    for words in ([], ["--json"]):
        assert main(["kernel", "list", *words]) == 0
        said = capsys.readouterr().out
        assert "(refused: is a URL.)" in said and "(refused name)" in said
        assert password not in said


@pytest.mark.parametrize(
    ("words", "kind", "reason"),
    [
        ({"engine": "auto"}, ConfigError, "command line"),
        ({"engine": "docker"}, ConfigError, "docker"),
        ({"profile": "huge"}, ConfigError, "huge"),
        ({"sources": {"x": "/etc"}}, SourceRefused, "/etc"),
        ({"sources": {"x": "/nowhere"}}, SourceRefused, "does not exist"),
        ({"sources": {"..": "/srv"}}, SourceRefused, "not allowed"),
        ({"endpoints": {"x": "db"}}, ConfigError, "--endpoint x: has no port"),
        ({"endpoints": {"..": "db:80"}}, ConfigError, "not allowed"),
    ],
)
def test_what_could_not_start_is_refused_at_install_time(
    prefix: Path, words: dict[str, object], kind: type[BackIntelError], reason: str
) -> None:
    given: dict[str, object] = {"engine": None, "profile": None, "sources": {}} | words
    with pytest.raises(kind, match=reason):
        kernelspec.build(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--endpoint", "web=bad"], "backintel: --endpoint web: has no port"),
        (["--endpoint", "a=db:1", "--endpoint", "b=db:1"], "--endpoint b: is the same as"),
    ],
)
def test_an_error_names_the_option(
    prefix: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert main(["kernel", "install", "--prefix", str(prefix), *words]) == 2
    assert reason in capsys.readouterr().err


def test_two_sources_of_one_name_are_refused(
    prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["kernel", "install", "--prefix", str(prefix)]
    assert main([*words, "--source", "a=/srv", "--source", "a=/opt"]) == 2
    assert "two sources are named 'a'" in capsys.readouterr().err
    assert not prefix.exists()


@pytest.mark.parametrize("name", ["..", ".", "a/b", "", "A", "a b", "-x", "ä", "x" * 65])
def test_bad_kernel_names_are_refused(prefix: Path, name: str) -> None:
    spec = kernelspec.build(engine=None, profile=None, sources={})
    with pytest.raises(UsageError, match="is not a kernel name"):
        kernelspec.install(spec, name, kernelspec.Location(prefix=prefix))


def test_a_kernel_of_another_maker_is_neither_replaced_nor_removed(prefix: Path) -> None:
    other = prefix / "share/jupyter/kernels/theirs"
    other.mkdir(parents=True)
    (other / "kernel.json").write_text('{"argv": ["x"], "display_name": "T", "language": "R"}')
    spec = kernelspec.build(engine=None, profile=None, sources={})
    with pytest.raises(UsageError, match="did not install"):
        kernelspec.install(spec, "theirs", kernelspec.Location(prefix=prefix))
    with pytest.raises(UsageError, match="no kernel 'theirs' of this product"):
        kernelspec.uninstall("theirs")
    with pytest.raises(UsageError, match="no kernel 'theirs' of this product"):
        kernelspec.uninstall("theirs", kernelspec.Location(prefix=prefix))
    assert (other / "kernel.json").exists()


def test_a_prefix_that_cannot_be_written_is_named(prefix: Path) -> None:
    spec = kernelspec.build(engine=None, profile=None, sources={})
    with pytest.raises(UsageError, match=r"cannot be installed into /proc/self/x"):
        kernelspec.install(spec, "k", kernelspec.Location(prefix=Path("/proc/self/x")))


def test_install_list_reinstall_and_uninstall(
    prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for profile in ("analysis", "benchmark"):
        words = ["kernel", "install", "--user", "--name", "mine", "--profile", profile]
        assert main(words) == 0
    capsys.readouterr()
    assert main(["kernel", "list", "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert listing["schema"] == "backintel.kernels/1"
    assert [(item["name"], item["profile"]) for item in listing["kernels"]] == [
        ("mine", "benchmark")
    ]
    assert main(["kernel", "uninstall", "--name", "mine"]) == 0
    assert kernelspec.installed() == []
    assert main(["kernel", "uninstall", "--name", "mine"]) == 2
