"""The doctor: every check reports, a broken one fails, and each failure has a remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from filelock import FileLock

from kernel_provisioner import doctor
from kernel_provisioner.checks import Check, Status, judge, run_step, table
from kernel_provisioner.cli.main import main
from kernel_provisioner.engines.registry import CHOOSE_WEAKER, get_engine
from kernel_provisioner.engines.smolvm import failures, host, release
from kernel_provisioner.engines.smolvm.monitor import Remains
from kernel_provisioner.errors import BackIntelError, HostRefused
from kernel_provisioner.paths import StateDirs


@pytest.fixture
def dirs(tmp_path: Path) -> StateDirs:
    return StateDirs(tmp_path / "home", tmp_path / "home", tmp_path / "run")


def _find(checks: list[Check], name: str) -> Check:
    (found,) = [check for check in checks if check.name == name]
    return found


def test_without_an_image_the_remedy_is_to_prepare(dirs: StateDirs) -> None:
    checks = doctor.examine(dirs)
    image = _find(checks, "image")
    assert image.status == "fail"
    assert "sandbox prepare" in image.remedy
    proof = _find(checks, "boot proof bwrap")
    assert (proof.status, proof.remedy) == ("warn", "run `backintel sandbox check --boot`.")


def test_every_failure_and_warning_has_a_remedy(dirs: StateDirs) -> None:
    checks = doctor.examine(dirs)
    assert [check.name for check in checks if check.status != "ok" and not check.remedy] == []
    assert {"platform", "python", "user namespaces", "limits", "profiles", "kernels"} <= {
        check.name for check in checks
    }


def test_a_refusal_inside_a_check_becomes_its_finding() -> None:
    def refuse() -> list[Check]:
        raise HostRefused("no memory limit.", remedy="delegate one.")

    (check,) = run_step("limits", refuse)
    assert check == Check("limits", "fail", "no memory limit.", "delegate one.")


def test_a_check_that_breaks_is_a_failure_not_silence() -> None:
    def broken() -> list[Check]:
        raise FileNotFoundError(2, "No such file or directory", "/proc/x")

    (check,) = run_step("x", broken)
    assert check.status == "fail"
    assert "/proc/x" in check.found


def test_a_directory_that_cannot_be_written_fails() -> None:
    bad = StateDirs(Path("/proc/self/x"), Path("/proc/self/x"), Path("/tmp/x"))
    checks = list(doctor._state(bad))
    assert [check.status for check in checks] == ["fail", "fail"]
    assert "/proc/self/x cannot be written" in checks[0].found


def test_a_held_lock_is_seen_from_another_process(dirs: StateDirs) -> None:
    dirs.data.mkdir()
    assert next(iter(doctor._lock(dirs))).status == "ok"
    with FileLock(dirs.prepare_lock):
        source = (
            "import sys; from pathlib import Path; from kernel_provisioner import doctor;"
            "from kernel_provisioner.paths import StateDirs; p = Path(sys.argv[1]);"
            "print(next(iter(doctor._lock(StateDirs(p, p, p)))).status)"
        )
        done = subprocess.run(
            [sys.executable, "-c", source, str(dirs.data)],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
    assert done.stdout.strip() == "warn"


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        (
            {"apparmor_restrict_unprivileged_userns": "1", "max_user_namespaces": "9"},
            "AppArmor",
        ),
        ({"max_user_namespaces": "0"}, "user.max_user_namespaces"),
        ({"unprivileged_userns_clone": "0"}, "kernel.unprivileged_userns_clone"),
        ({"max_user_namespaces": "9"}, "container"),
    ],
)
def test_the_remedy_fits_what_forbids_user_namespaces(
    settings: dict[str, str], remedy: str
) -> None:
    """bubblewrap#632: Ubuntu 24.04's restriction is named with its remedy."""
    assert remedy in doctor.namespace_remedy(settings)


def test_the_apparmor_remedy_does_not_open_the_host() -> None:
    """bubblewrap#632: what is advised allows bubblewrap and weakens nothing else."""
    remedy = doctor.namespace_remedy({"apparmor_restrict_unprivileged_userns": "1"})
    assert "leave the restriction on" in remedy


def test_trying_a_namespace_leaves_this_process_as_it_was() -> None:
    before = os.readlink("/proc/self/ns/user"), os.geteuid(), os.getgroups()
    doctor._try_user_namespace()
    assert (os.readlink("/proc/self/ns/user"), os.geteuid(), os.getgroups()) == before


def test_the_table_shows_remedies_below() -> None:
    checks = [Check("a", "ok", "fine"), Check("long", "fail", "bad", "mend it.")]
    assert table(checks).splitlines() == [
        "ok    a     fine",
        "fail  long  bad",
        "            -> mend it.",
    ]


def test_check_exits_3_when_something_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BACKINTEL_HOME", str(tmp_path))
    assert main(["sandbox", "check", "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["ok"]) == ("backintel.check/1", False)
    assert {"name", "status", "found", "remedy"} == set(report["checks"][0])


class RefusingEngine:
    """An engine whose own check of the host or of its files says no."""

    def __init__(self, refuse: Callable[[], object]) -> None:
        self._refuse = refuse

    def verify(self, *, deep: bool = False) -> NoReturn:
        self._refuse()
        raise AssertionError("it was expected to refuse")


def _no_device() -> None:
    host.check_kvm(Path("/nonexistent/kvm"))


def _no_permission() -> None:
    device = os.stat("/dev/null")
    raise host.refused_device(Path("/dev/kvm"), device)


def _old_libc() -> None:
    host.check_libc("glibc", "2.31")


def _wrong_platform() -> None:
    release.load_pins("windows-AMD64")


def _cannot_boot() -> None:
    raise failures.explain("no boot progress for 30 seconds", Remains(), "smol-vmm ended", "boot")


REFUSALS: dict[Callable[[], None], tuple[str, str]] = {
    _no_device: ("does not exist", "firmware"),
    _no_permission: ("may not use", "read and write access"),
    _old_libc: ("glibc 2.34 or newer", "newer distribution"),
    _wrong_platform: ("does not run on windows-AMD64", "Linux on x86-64 or arm64"),
    _cannot_boot: ("cannot boot it", "nested virtualization"),
}


@pytest.mark.parametrize("refuse", REFUSALS)
def test_each_reason_against_a_microvm_has_its_own_words_and_remedy(
    refuse: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none hides what the doctor says of the other engine."""
    real = get_engine

    def engines(name: str) -> object:
        return RefusingEngine(refuse) if name == "smolvm" else real(name)

    monkeypatch.setattr(doctor, "get_engine", engines)
    checks = {check.name: check for check in doctor._engines(deep=False)}
    with pytest.raises(BackIntelError) as caught:
        refuse()
    assert caught.value.permanent, "an autorestart does not try it again"
    found, remedy = REFUSALS[refuse]
    assert found in checks["engine smolvm"].found
    assert remedy in checks["engine smolvm"].remedy
    assert checks["engine bwrap"].status == "ok"
    others = [words for other, words in REFUSALS.items() if other is not refuse]
    assert not [words for words, _ in others if words in checks["engine smolvm"].found]
    assert checks["engine smolvm"].remedy.endswith(CHOOSE_WEAKER)


def test_a_remedy_of_an_engine_is_told_once(
    dirs: StateDirs, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = get_engine

    def engines(name: str) -> object:
        return RefusingEngine(_no_permission) if name == "smolvm" else real(name)

    monkeypatch.setattr(doctor, "get_engine", engines)
    checks = doctor.examine(dirs)
    engine = _find(checks, "engine smolvm")
    assert [check.name for check in checks if engine.remedy in check.remedy] == [engine.name]
    assert [check.name for check in checks if engine.found in check.found] == [engine.name]
    assert _find(checks, "boot proof smolvm").remedy == "see engine smolvm above."
    assert "what is said of smolvm above" in _find(checks, "default engine").remedy


def _engine_checks(smolvm: Status, bwrap: Status, *, proof: Status = "ok") -> list[Check]:
    return [
        Check("engine smolvm", smolvm, "x", "mend it.", "smolvm"),
        Check("engine bwrap", bwrap, "x", "mend it.", "bwrap"),
        Check("boot proof smolvm", proof, "x", "mend it.", "smolvm"),
        Check("boot proof bwrap", bwrap, "x", "mend it.", "bwrap"),
    ]


@pytest.mark.parametrize(
    ("engines", "stated", "expected"),
    [
        (_engine_checks("ok", "ok"), "", "ok"),
        (_engine_checks("ok", "ok", proof="warn"), "", "warn"),
        (_engine_checks("ok", "fail"), "", "ok"),
        (_engine_checks("fail", "ok"), "", "warn"),
        (_engine_checks("ok", "ok", proof="fail"), "", "warn"),
        (_engine_checks("fail", "ok"), "bwrap", "ok"),
        (_engine_checks("fail", "fail"), "", "fail"),
    ],
)
def test_an_engine_that_cannot_run_is_a_failure_only_where_no_other_can(
    engines: list[Check],
    stated: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("BACKINTEL_SANDBOX", stated)
    image = Check("image", "fail", "none", "prepare it.")
    checks = judge([image, *engines])
    assert _find(checks, "image").status == "fail", "no engine can do without it"
    default = _find(checks, "default engine")
    assert default.status == expected
    failed = [check for check in checks if check.status == "fail" and check.engine]
    assert bool(failed) == (expected == "fail")
    assert len(checks) == len(engines) + 2
    if default.found == "smolvm, which has not been booted here yet":
        assert "check --boot" in default.remedy
    elif expected == "warn":
        assert default.found.startswith("smolvm cannot run here")
        assert "`--engine bwrap` of `backintel run` and `backintel kernel install`" in (
            default.remedy
        )
