"""The doctor: every check reports, a broken one fails, and each failure has a remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from kernel_provisioner import doctor
from kernel_provisioner.cli.main import main
from kernel_provisioner.errors import HostRefused
from kernel_provisioner.paths import StateDirs


@pytest.fixture
def dirs(tmp_path: Path) -> StateDirs:
    return StateDirs(tmp_path / "home", tmp_path / "home", tmp_path / "run")


def _find(checks: list[doctor.Check], name: str) -> doctor.Check:
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
    def refuse() -> list[doctor.Check]:
        raise HostRefused("no memory limit.", remedy="delegate one.")

    (check,) = doctor._run("limits", refuse)
    assert check == doctor.Check("limits", "fail", "no memory limit.", "delegate one.")


def test_a_check_that_breaks_is_a_failure_not_silence() -> None:
    def broken() -> list[doctor.Check]:
        raise FileNotFoundError(2, "No such file or directory", "/proc/x")

    (check,) = doctor._run("x", broken)
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
            timeout=30,
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
    checks = [doctor.Check("a", "ok", "fine"), doctor.Check("long", "fail", "bad", "mend it.")]
    assert doctor.table(checks).splitlines() == [
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
