"""The command line: parsing, exit statuses, JSON, and what it imports before it has to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from kernel_provisioner import __version__, doctor, proofs
from kernel_provisioner.cli import sandbox
from kernel_provisioner.cli.main import build_parser, main
from kernel_provisioner.cli.run import settings_of
from kernel_provisioner.engines.base import EngineFacts, ProcessIdentity
from kernel_provisioner.engines.registry import CHOOSE_WEAKER
from kernel_provisioner.engines.smolvm import host
from kernel_provisioner.engines.smolvm import prepare as smolvm_prepare
from kernel_provisioner.errors import (
    AttestationFailed,
    BackIntelError,
    ConfigError,
    DeadlineReached,
    EngineUnavailable,
    HostRefused,
    ImageInvalid,
    ImageMissing,
    LockTimeout,
    PrepareFailed,
    ProfileRefused,
    SourceRefused,
    StartFailed,
)
from kernel_provisioner.images import store
from kernel_provisioner.images.receipt import Image
from kernel_provisioner.paths import StateDirs, state_dirs
from kernel_provisioner.records import Record, write_record


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKINTEL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def notebook(tmp_path: Path) -> Path:
    path = tmp_path / "n.ipynb"
    nbformat.write(new_notebook(cells=[new_code_cell("1")]), path)
    return path


def _refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the message of a call that ends with status 2."""
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"backintel {__version__}\n"


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["run", "--help"],
        ["sandbox", "prepare", "--help"],
        ["sandbox", "check", "--help"],
        ["sandbox", "gc", "--help"],
        ["kernel", "install", "--help"],
        ["kernel", "uninstall", "--help"],
        ["kernel", "list", "--help"],
        ["sessions", "--help"],
    ],
)
def test_the_exit_statuses_stand_in_the_help(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if words[-1] != "--help":
        assert main(words) == 2
        return
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 0
    assert "6 completed but export refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [[], ["fly"], ["run", "n.ipynb", "--fly"], ["kernel", "install", "--user", "--prefix", "x"]],
)
def test_wrong_usage_is_status_2_and_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    message = _refused(words, capsys)
    assert message.count("\n") == 1
    assert "--help" in message


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["run", "n.ipynb", "--endpont=web=P"], "unrecognized arguments: --endpont."),
        (["run", "n.ipynb", "--endpont", "web=P"], "--endpont, an argument that is not known."),
        (["run", "n.ipynb", "P"], "unrecognized arguments: an argument that is not known."),
        (["run", "n.ipynb", "--P"], "unrecognized arguments: an argument that is not known."),
        (["sandbox", "check", "--endpoint", "web=P"], "unrecognized arguments: --endpoint, an "),
        (["kernel", "install", "--en=P"], "ambiguous option: --en could match --engine"),
        (["run", "n.ipynb", "--json=P"], "argument --json: it takes no value."),
        (["run", "n.ipynb", "--cell-deadline", "P"], "argument --cell-deadline: invalid float"),
        (["--endpoint", "web=P", "run", "n.ipynb"], "invalid choice (choose from 'run', "),
        (["P"], "invalid choice (choose from 'run', "),
    ],
)
def test_wrong_usage_repeats_no_password(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    canary = "canary-5432"
    for start in ("postgres://u:", "u:", "u:' (choose from \n"):
        message = _refused([word.replace("P", f"{start}{canary}@h:1") for word in words], capsys)
        assert reason in message
        assert canary not in message


def test_a_plain_word_that_is_no_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "invalid choice: 'fly' (choose from 'run', " in _refused(["fly"], capsys)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--fly"], ""),
        (["--fly", "sessions"], ""),
        (["run", "n.ipynb", "--fly"], " run"),
        (["sandbox"], " sandbox"),
        (["sandbox", "--fly", "gc"], " sandbox"),
        (["sandbox", "prepare", "--fly"], " sandbox prepare"),
        (["sandbox", "check", "--fly"], " sandbox check"),
        (["sandbox", "gc", "--fly"], " sandbox gc"),
        (["sandbox", "gc", "word"], " sandbox gc"),
        (["kernel", "install", "--fly"], " kernel install"),
        (["kernel", "uninstall", "--fly"], " kernel uninstall"),
        (["kernel", "list", "--fly"], " kernel list"),
        (["sessions", "--fly"], " sessions"),
        (["export", "0123456789abcdef", "--out", "x", "--fly"], " export"),
    ],
)
def test_wrong_usage_points_to_the_help_of_the_very_command(
    words: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _refused(words, capsys).endswith(f" Remedy: see `backintel{command} --help`.\n")


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["run", ""], "NOTEBOOK"),
        (["run", "n.ipynb", "--out", ""], "--out"),
        (["export", "0123456789abcdef", "--out="], "--out"),
        (["sandbox", "prepare", "--image-archive", ""], "--image-archive"),
        (["kernel", "install", "--name", ""], "--name"),
        (["kernel", "install", "--prefix", ""], "--prefix"),
        (["kernel", "uninstall", "--name", ""], "--name"),
    ],
)
def test_an_empty_word_is_wrong_usage(
    words: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"argument {option}: it is empty. Remedy: " in _refused(words, capsys)


def test_the_help_of_run_says_where_results_go(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    assert "(default: out-<notebook>-<time> here)" in capsys.readouterr().out


def test_an_error_is_json_when_json_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "/nowhere.ipynb", "--json"]) == 2
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["schema"] == "backintel.error/1"
    assert report["exit_status"] == 2
    assert "'/nowhere.ipynb' does not exist" in report["error"]["message"]
    assert "does not exist" in captured.err


def test_only_what_was_typed_is_a_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    parse = build_parser().parse_args
    assert settings_of(parse(["run", "n.ipynb"])) == {}
    words = ["--profile", "large", "--cell-deadline", "2.5", "--source", "a=x/y"]
    words += ["--endpoint", "sales=db:5432", "--endpoint", "files=localhost:9000"]
    assert settings_of(parse(["run", "n.ipynb", *words])) == {
        "profile": "large",
        "cell_deadline": 2.5,
        "sources": {"a": str(tmp_path / "x/y")},
        "endpoints": {"sales": "db:5432", "files": "localhost:9000"},
    }


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--engine", "docker"], "--engine: 'docker'"),
        (["--profile", "huge"], "--profile: 'huge' is not a profile"),
        (["--source", "a"], "is not NAME=PATH"),
        (["--source", "a=/srv", "--source", "a=/opt"], "two sources are named 'a'"),
        (["--source", "a=/nowhere"], "does not exist"),
        (["--endpoint", "db:80"], "backintel: --endpoint: is not NAME=HOST:PORT"),
        (["--endpoint", "a=db:80", "--endpoint", "a=db:81"], "two endpoints have this name"),
        (["--endpoint", "a=db"], "backintel: --endpoint a: has no port"),
        (["--endpoint", "a=db:80", "--endpoint", "b=db:80"], "--endpoint b: is the same as"),
        (["--param", "x"], "has no '='"),
        (["--param", "a-b=1"], "is not a name"),
        (["--cell-deadline", "-1"], "backintel: --cell-deadline: is -1.0"),
        (["--cell-deadline", "1000"], "backintel: --cell-deadline: profile"),
        (["--cell-deadline", "x"], "invalid float"),
        (["--run-deadline", "nan"], "backintel: --run-deadline: is nan"),
    ],
)
def test_bad_words_of_run_are_refused_and_leave_nothing(
    words: list[str],
    reason: str,
    notebook: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    assert reason in _refused(["run", str(notebook), "--out", str(out), *words], capsys)
    assert not out.exists()


def test_auto_without_a_proof_names_the_remedy(
    notebook: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(notebook), "--engine", "auto"]) == 3
    assert "backintel sandbox check --boot" in capsys.readouterr().err


def test_without_an_image_run_names_prepare_and_leaves_nothing(
    notebook: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["run", str(notebook), "--out", str(out), "--engine", "bwrap"]) == 3
    assert "backintel sandbox prepare" in capsys.readouterr().err
    assert not out.exists()


def test_gc_and_sessions_without_any_session(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "gc"]) == 0
    assert capsys.readouterr().out == "nothing was left behind.\n"
    assert main(["sandbox", "gc", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema": "backintel.gc/1",
        "done": [],
        "left": [],
    }
    assert main(["sessions", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"schema": "backintel.sessions/1", "sessions": []}


def test_gc_tells_what_it_could_not_remove_and_exits_3(capsys: pytest.CaptureFixture[str]) -> None:
    sessions = state_dirs().sessions
    sessions.mkdir(parents=True)
    record = Record("0123456789abcdef", "", "bwrap", "tiny", "", ProcessIdentity(1, 1), sessions, 0)
    for name, place in (("0" * 16, sessions), ("1" * 16, state_dirs().runtime / ("a" * 16))):
        write_record(state_dirs(), replace(record, session=name, socket_dir=place))
    left = f"session {'0' * 16}: {sessions} is not a place of ours; left alone"
    assert main(["sandbox", "gc", "--json"]) == 3
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {
        "schema": "backintel.gc/1",
        "done": [f"session {'1' * 16}: removed what its supervisor left"],
        "left": [left],
    }
    assert main(["sandbox", "gc"]) == 3
    printed = capsys.readouterr()
    assert printed.out == f"NOT REMOVED  {left}\n"
    assert "1 not removed" in printed.err
    # Nothing is forgotten, and once the reason is mended it goes.
    write_record(
        state_dirs(),
        replace(record, session="0" * 16, socket_dir=state_dirs().runtime / ("b" * 16)),
    )
    assert main(["sandbox", "gc"]) == 0


def test_an_internal_error_does_not_blame_the_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kernel_provisioner.cli import sessions

    def broken(_: object) -> int:
        raise ZeroDivisionError("\x1b[31mtext of a stranger")

    monkeypatch.setitem(sessions.COMMANDS, "sessions", broken)
    assert main(["sessions", "--json"]) == 3
    captured = capsys.readouterr()
    assert "internal error" in captured.err
    assert "\x1b" not in captured.err
    assert json.loads(captured.out)["error"]["code"] == "internal"


def test_help_and_listing_import_nothing_of_jupyter() -> None:
    source = (
        "import sys; from kernel_provisioner.cli.main import main; main(['sessions']);"
        "print(sorted({m.partition('.')[0] for m in sys.modules}"
        " & {'jupyter_client', 'nbformat', 'nbclient', 'zmq', 'traitlets', 'jsonschema'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


BACKINTEL = [
    sys.executable,
    "-c",
    "import sys; from kernel_provisioner.cli.main import main; sys.exit(main(sys.argv[1:]))",
]


def _with_streams(redirection: str, *words: str) -> tuple[int, str]:
    """Run a command under a shell's redirections; return its status and what is on stderr."""
    done = subprocess.run(
        ["bash", "-c", f'set -o pipefail; "$@" {redirection}', "bash", *BACKINTEL, *words],
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_reader_that_left_is_no_error() -> None:
    readable, writable = os.pipe()
    os.close(readable)
    with subprocess.Popen(
        [*BACKINTEL, "sessions"], stdout=writable, stderr=subprocess.PIPE, text=True
    ) as child:
        os.close(writable)
        _, errors = child.communicate(timeout=100)
    assert child.returncode == 0
    assert errors == ""


@pytest.mark.parametrize("redirection", [">/dev/full", ">/dev/full 2>&1", ">/dev/full 2>&-"])
def test_a_listing_that_cannot_be_printed_is_not_done(redirection: str) -> None:
    status, errors = _with_streams(redirection, "sessions", "--json")
    assert status == 3
    if redirection == ">/dev/full":
        assert errors.count("\n") == 1
        assert "could not be written to standard output (No space left on device)" in errors


@pytest.mark.parametrize(
    "redirection",
    [">/dev/full 2>/dev/full", ">&- 2>&-", "<&- >&- 2>&-", "2>&1 | true", "2>/dev/full"],
)
def test_a_failure_stays_that_failure_when_nobody_can_be_told(redirection: str) -> None:
    status, _ = _with_streams(redirection, "run", "/nowhere", "--json")
    assert status == 2


@pytest.mark.parametrize("redirection", [">/dev/full", "| true", ">&-"])
def test_help_that_cannot_be_printed_ends_quietly(redirection: str) -> None:
    assert _with_streams(redirection, "--help") == (0, "")


def test_closed_streams_do_not_become_other_files() -> None:
    code = (
        "from kernel_provisioner.cli.main import main; main(['sessions']); import os\n"
        "os.write(int(os.sys.argv[1]), ' '.join(os.readlink(f'/proc/self/fd/{n}')"
        " for n in range(3)).encode())"
    )
    readable, writable = os.pipe()
    shell = ["bash", "-c", '"$@" <&- >&- 2>&-', "bash", sys.executable, "-c", code, str(writable)]
    subprocess.run(shell, pass_fds=(writable,), timeout=100, check=True)
    os.close(writable)
    with open(readable) as pipe:
        assert pipe.read() == "/dev/null /dev/null /dev/null"


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_unwinds(signum: signal.Signals, status: int) -> None:
    source = (
        "import os, sys, time; from kernel_provisioner.cli import sessions, main\n"
        "def slow(options):\n"
        "    try:\n"
        "        os.write(1, b'ready\\n'); time.sleep(60)\n"
        "    finally:\n"
        "        os.write(1, b'cleaned\\n')\n"
        "sessions.COMMANDS['sessions'] = slow; sys.exit(main.main(['sessions']))"
    )
    # Whatever runs the tests may ignore SIGHUP, and its children inherit that.
    command = ["env", "--default-signal=HUP", sys.executable, "-c", source]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signum)
        rest, _ = child.communicate(timeout=100)
    assert (child.returncode, rest) == (status, "cleaned\n")


def test_prepare_says_why_the_microvm_is_left_out_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "check_host", lambda: host.check_kvm(tmp_path / "kvm"))
    dirs = StateDirs(tmp_path, tmp_path, tmp_path / "run")
    refusals = sandbox._prepare_engines(dirs)
    said = capsys.readouterr().err
    assert "the engine smolvm is left out" in said
    assert "does not exist" in said and "firmware" in said
    told = sandbox._default(dirs, "smolvm", refusals.get("smolvm"))
    assert told.startswith("smolvm, which cannot run here")
    assert CHOOSE_WEAKER in told
    told = sandbox._default(dirs, "bwrap", refusals.get("bwrap"))
    assert told.startswith("bwrap (namespaces: weaker isolation), not booted yet")
    with pytest.raises(EngineUnavailable, match="no namespaces"):
        sandbox._leave_out(refusals, "bwrap", EngineUnavailable("no namespaces."))


class StandInEngine:
    """Stands for an engine that is installed and verified; it starts nothing."""

    isolation = "stand-in"

    def __init__(self, name: str) -> None:
        self.name = name

    def verify(self, *, deep: bool = False) -> EngineFacts:
        return EngineFacts(self.name, f"1-{self.name}", {"file": self.name})


class StandInBoots:
    """Stands for the boots of a host, which no host has all of: what refuses each engine."""

    def __init__(self, **refusals: BaseException) -> None:
        self.refusals = refusals
        self.tried: list[str] = []

    async def boot(
        self, engine: str, on_phase: Callable[[str, float], None]
    ) -> Mapping[str, float]:
        self.tried.append(engine)
        if engine in self.refusals:
            raise self.refusals[engine]
        return {"ready": 0.5}


class StandInStore:
    """Stands for a store whose image was prepared before."""

    def __init__(self, dirs: StateDirs) -> None:
        self._root = dirs.image / "stand-in"

    def prepare(self, *_: object, **__: object) -> Image:
        return Image(self._root, "sha256:0", self._root, "3.11", "x86_64", "2026-01-01", "stand-in")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StandInBoots]:
    """Put stand-ins in the place of engines, image store and boots."""

    def put(**refusals: BaseException) -> StandInBoots:
        boots = StandInBoots(**refusals)
        for module in (sandbox, doctor):
            monkeypatch.setattr(module, "get_engine", StandInEngine)
        monkeypatch.setattr(proofs, "_DEVICES", {})
        monkeypatch.setattr(proofs, "boot", boots.boot)
        monkeypatch.setattr(store, "ImageStore", StandInStore)
        monkeypatch.setattr(smolvm_prepare, "prepare", lambda dirs, progress: None)
        return boots

    return put


_DOES_NOT_BOOT = [
    EngineUnavailable("it is gone."),
    HostRefused("no memory limit."),
    StartFailed("it does not boot."),
    AttestationFailed("it is not as asked."),
]


@pytest.mark.parametrize("error", _DOES_NOT_BOOT, ids=lambda error: error.code)
def test_prepare_proves_the_engine_that_boots_and_says_so_in_json(
    error: BackIntelError,
    stand_ins: Callable[..., StandInBoots],
    capsys: pytest.CaptureFixture[str],
) -> None:
    boots = stand_ins(bwrap=error)
    assert main(["sandbox", "prepare", "--json"]) == 0
    said = capsys.readouterr()
    root = state_dirs().image / "stand-in"
    assert json.loads(said.out) == {
        "schema": "backintel.prepare/1",
        "image": {"id": "sha256:0", "root": str(root), "source": "stand-in", "python": "3.11"},
        "engines": {"smolvm": "1-smolvm"},
        "proof": {"engine": "smolvm", "booted": True},
        "default_engine": {"name": "smolvm", "refusal": None},
    }
    assert f"the engine bwrap is left out: {error}" in said.err
    assert boots.tried == ["bwrap", "smolvm"]


def test_prepare_names_what_refuses_the_default_engine_in_json(
    stand_ins: Callable[..., StandInBoots],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stand_ins()

    def refuse(_dirs: StateDirs, _progress: object) -> None:
        host.check_kvm(tmp_path / "kvm")

    monkeypatch.setattr(smolvm_prepare, "prepare", refuse)
    assert main(["sandbox", "prepare", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["engines"] == {"bwrap": "1-bwrap"}
    assert report["proof"] == {"engine": "bwrap", "booted": True}
    assert report["default_engine"]["name"] == "smolvm"
    assert report["default_engine"]["refusal"]["code"] == "engine_unavailable"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--image-sha256", "zz"], "'zz' is not a sha256 digest"),
        (["--image-sha256", ""], "'' is not a sha256 digest"),
        (["--image-archive", "/nope"], "/nope cannot be opened"),
        (["--image-archive", "/"], "/ is not a file"),
    ],
)
def test_prepare_refuses_wrong_words_before_anything_is_prepared(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prepared: list[str] = []
    monkeypatch.setattr(sandbox, "_prepare_engines", lambda dirs: prepared.append("engines") or {})
    assert main(["sandbox", "prepare", "--json", *words]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["error"]["code"] == "usage"
    assert said in report["error"]["message"]
    assert report["error"]["remedy"]
    assert not prepared and not state_dirs().image.exists()


def test_prepare_exits_3_when_no_engine_is_left(
    stand_ins: Callable[..., StandInBoots], capsys: pytest.CaptureFixture[str]
) -> None:
    stand_ins(bwrap=HostRefused("no memory limit."), smolvm=StartFailed("it does not boot."))
    assert main(["sandbox", "prepare", "--json"]) == 3
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert (report["schema"], report["exit_status"]) == ("backintel.error/1", 3)
    assert report["error"]["code"] == "start_failed"
    assert "bwrap is left out: no memory limit" in said.err
    assert "smolvm is left out" not in said.err


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a bad key."),
        SourceRefused("a source is missing."),
        ProfileRefused("the host is too small."),
        DeadlineReached("a short run."),
        ImageMissing("no image."),
        ImageInvalid("another image."),
        LockTimeout("a held lock."),
        PrepareFailed("no space."),
    ],
    ids=lambda error: error.code,
)
def test_what_is_no_engines_fault_ends_prepare_at_once(
    error: BackIntelError,
    stand_ins: Callable[..., StandInBoots],
    capsys: pytest.CaptureFixture[str],
) -> None:
    boots = stand_ins(bwrap=error)
    assert main(["sandbox", "prepare"]) == error.exit_status
    said = capsys.readouterr()
    assert said.out == ""
    assert error.message in said.err and "left out" not in said.err
    assert boots.tried == ["bwrap"]


@pytest.mark.parametrize(
    ("error", "left_out"),
    [(LockTimeout("a held lock."), False), (PrepareFailed("a bad copy."), True)],
)
def test_a_held_lock_is_no_fault_of_the_engine_that_waits_for_it(
    error: BackIntelError,
    left_out: bool,
    stand_ins: Callable[..., StandInBoots],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    boots = stand_ins()

    def refuse(_dirs: StateDirs, _progress: object) -> None:
        raise error

    monkeypatch.setattr(smolvm_prepare, "prepare", refuse)
    assert main(["sandbox", "prepare"]) == (0 if left_out else 3)
    assert ("smolvm is left out" in capsys.readouterr().err) == left_out
    assert boots.tried == (["bwrap"] if left_out else [])


def test_prepare_again_boots_nothing_and_keeps_the_proof(
    stand_ins: Callable[..., StandInBoots], capsys: pytest.CaptureFixture[str]
) -> None:
    boots = stand_ins()
    assert main(["sandbox", "prepare"]) == 0
    assert "proof   bwrap booted just now" in capsys.readouterr().out
    proof = state_dirs().proofs / "bwrap.json"
    before = proof.stat()
    assert main(["sandbox", "prepare"]) == 0
    assert "proof   bwrap still valid" in capsys.readouterr().out
    assert boots.tried == ["bwrap"]
    after = proof.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize(
    ("failure", "told"),
    [(StartFailed("it does not boot."), "it does not boot"), (KeyboardInterrupt(), "interrupted")],
)
def test_a_boot_that_fails_or_is_interrupted_leaves_no_proof_of_an_earlier_one(
    failure: BaseException,
    told: str,
    stand_ins: Callable[..., StandInBoots],
    capsys: pytest.CaptureFixture[str],
) -> None:
    boots = stand_ins()
    dirs = state_dirs()
    doctor.examine(dirs, boot=True)
    assert boots.tried == ["smolvm", "bwrap"]
    assert proofs.resolve_auto(dirs, StandInEngine).engine == "smolvm"
    boots.refusals["smolvm"] = failure
    main(["sandbox", "check", "--boot"])
    assert told in "".join(capsys.readouterr())
    assert proofs.resolve_auto(dirs, StandInEngine).engine == "bwrap"
    main(["sandbox", "check", "--json"])
    checks = {item["name"]: item for item in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["boot proof smolvm"]["status"] == "warn"
    assert checks["boot proof bwrap"]["status"] == "ok"
    assert checks["default engine"]["status"] == "warn"


def test_no_boot_is_tried_beside_a_proof_that_cannot_be_removed(
    stand_ins: Callable[..., StandInBoots], capsys: pytest.CaptureFixture[str]
) -> None:
    boots = stand_ins()
    (state_dirs().proofs / "bwrap.json").mkdir(parents=True)
    assert main(["sandbox", "prepare"]) == 3
    assert "boot proofs cannot be kept in" in capsys.readouterr().err
    assert boots.tried == []
