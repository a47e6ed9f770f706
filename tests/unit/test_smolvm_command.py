"""What the monitor is told, what the guest is told, and what a failed start tells a person."""

from __future__ import annotations

import itertools
import json
import os
import stat
from pathlib import Path

import pytest
from unprivileged import as_user

from kernel_provisioner.engines.base import GuestEndpoint, GuestSpec, SourceMount
from kernel_provisioner.engines.bwrap import output
from kernel_provisioner.engines.bwrap.command import Link
from kernel_provisioner.engines.bwrap.layout import Item, Layout
from kernel_provisioner.engines.smolvm import command, failures, host
from kernel_provisioner.engines.smolvm.monitor import Remains
from kernel_provisioner.errors import EngineUnavailable, HostRefused, StartFailed
from kernel_provisioner.profiles import BUILTIN

VIEW = command.View("/tmp/e", "/tmp/i", "/tmp/g", "/tmp/d", "/tmp/k", ("/tmp/s0", "/tmp/s1"))


def spec(**changes: object) -> GuestSpec:
    values: dict[str, object] = {
        "session": "0123456789abcdef",
        "profile": BUILTIN["analysis"],
        "image_root": Path("/images/root"),
        "guest_code": Path("/code"),
        "socket_dir": Path("/run/sockets"),
        "sources": (SourceMount("a", Path("/data")), SourceMount("b", Path("/one.csv"))),
        "environment": {"PGPASSWORD": "canary-value"},
        "backstop_s": 12.2,
    }
    return GuestSpec(**{**values, **changes})  # type: ignore[arg-type]


def test_no_option_opens_a_network_or_a_writable_mount() -> None:
    words = command.arguments(spec(), VIEW)
    for forbidden in ("--net", "--port", "-p", "--dns", "--mount-socket", "--unprivileged"):
        assert forbidden not in words
    volumes = [words[n + 1] for n, word in enumerate(words) if word == "--volume"]
    assert volumes == ["/tmp/g:/mnt/g:ro", "/tmp/s0:/mnt/s0:ro", "/tmp/s1:/mnt/s1:ro"]


def test_six_sockets_are_exposed_and_no_more() -> None:
    words = command.arguments(spec(), VIEW)
    exposed = [words[n + 1] for n, word in enumerate(words) if word == "--expose-socket"]
    assert exposed == [
        "/run/backintel/agent:/tmp/k/agent",
        *(f"/run/backintel/{port}:/tmp/k/g-{port}" for port in range(1, 6)),
    ]


def test_each_endpoint_is_a_socket_of_a_neutral_name() -> None:
    endpoints = (
        GuestEndpoint("db", "db.internal", "127.0.1.1", 5432),
        GuestEndpoint("web", "10.9.8.7", "10.9.8.7", 443),
    )
    asked = spec(endpoints=endpoints)
    words = command.arguments(asked, VIEW)
    mounted = [words[n + 1] for n, word in enumerate(words) if word == "--mount-socket"]
    assert mounted == [f"/tmp/k/e-{n}:/run/backintel/e-{n}" for n in range(2)]
    assert command.endpoints(asked) == {
        "op": "endpoints",
        "endpoints": [
            ["127.0.1.1", 5432, "/run/backintel/e-0"],
            ["10.9.8.7", 443, "/run/backintel/e-1"],
        ],
    }
    assert not [word for word in words for told in ("db", "5432", "10.9") if told in word]


def test_limits_come_from_the_profile() -> None:
    words = command.arguments(spec(), VIEW)
    options = dict(itertools.pairwise(words))
    assert (options["--cpus"], options["--mem"]) == ("2", "2032")
    assert (options["--storage"], options["--overlay"]) == ("3", "1")
    # Later than the launcher's own timer, which is later than the watchdog.
    assert options["--timeout"] == "18s"


def test_secrets_are_neither_arguments_nor_environment() -> None:
    everything = [*command.arguments(spec(), VIEW), *command.environ(VIEW, 60).values()]
    assert not [word for word in everything if "canary-value" in word]


def test_environment_is_exact_and_enforces_confinement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOLVM_BOOT_BINARY", "/evil")
    found = command.environ(VIEW, 60)
    assert found["SMOLVM_SECCOMP"] == found["SMOLVM_LANDLOCK"] == "enforce"
    assert found["SMOLVM_BOOT_BINARY"] == "/tmp/e/smol-vmm"
    assert set(found) == {
        "HOME",
        "PATH",
        "LANG",
        "SMOLVM_LIB_DIR",
        "SMOLVM_BOOT_BINARY",
        "SMOLVM_AGENT_ROOTFS",
        "SMOLVM_SECCOMP",
        "SMOLVM_LANDLOCK",
        "SMOLVM_AGENT_READY_TIMEOUT_SECS",
        "SMOLVM_START_TIMEOUT_SECS",
    }


def test_plan_binds_a_single_file_as_a_file() -> None:
    layout = Layout(
        {},
        (
            Item("/usr", "image", "usr"),
            Item("/opt/backintel/guest", "guest"),
            Item("/sources/a", "source-0"),
            Item("/sources/b", "source-1"),
        ),
        (Link("/bin", "usr/bin"),),
    )
    plan = command.guest_plan(spec(), layout, frozenset({1}), b"\x01\x02")
    assert plan["binds"] == [
        ["/usr", "/usr"],
        ["/mnt/g", "/opt/backintel/guest"],
        ["/mnt/s0", "/sources/a"],
        ["/mnt/s1/file", "/sources/b"],
    ]
    assert plan["links"] == [["usr/bin", "/bin"]]
    assert plan["seccomp"] == "0102"


@pytest.mark.parametrize(
    ("printed", "kind", "phase", "words"),
    [
        ("kvm permission denied: Cannot access", EngineUnavailable, "launch", "/dev/kvm"),
        ("no boot progress for 30 seconds", HostRefused, "boot", "cannot boot"),
        ("os error 24: Too many open files", HostRefused, "boot", "open files"),
        ("io: No space left on device", HostRefused, "boot", "no space"),
        ("something else", StartFailed, "attest", "did not come up"),
    ],
)
def test_failed_start_names_phase_reason_and_remedy(
    printed: str, kind: type[Exception], phase: str, words: str
) -> None:
    error = failures.explain(printed, Remains(), "smol-vmm ended", "attest")
    assert type(error) is kind
    assert error.phase == phase
    assert words in error.message
    assert error.remedy


def test_json_error_of_the_program_is_quoted_without_the_rest() -> None:
    printed = 'noise\n{"error":{"code":"SMOLVM_ERROR","message":"what happened"}}\nmore noise\n'
    left = Remains({"cause": "killed", "exit_code": None})
    error = failures.explain(printed, left, "smol-vmm ended", "boot")
    assert "SMOLVM_ERROR: what happened" in error.message
    assert "noise" not in error.message
    assert "the monitor's end: killed" in error.message


def test_unexplained_end_quotes_the_last_of_the_guests_console() -> None:
    """Its beginning, which the program quotes, never says why a guest ended."""
    left = Remains({"cause": "exited", "exit_code": 0}, "begin\n" + "x" * 5000 + "\nkernel panic\n")
    error = failures.explain("nothing that is known", left, "smol-vmm ended", "boot")
    assert error.message.endswith("x | kernel panic") and "begin" not in error.message
    assert len(error.message) < 1500
    assert "--engine bwrap" in error.remedy and not error.permanent


_NEVER_READY = "monitor agent: {}boot process exited (code 1) before the agent was ready"


def test_reason_that_the_monitor_gives_is_not_laid_to_kvm() -> None:
    """Met with a user's home so deep that the monitor could not bind its socket."""
    reason = "Error: add vsock port: socket path is 129 bytes, over the 107-byte limit ("
    error = failures.explain(_NEVER_READY.format(reason), Remains(), "smol-vmm ended", "boot")
    assert isinstance(error, StartFailed) and not error.permanent
    assert "socket path is 129 bytes" in error.message and "KVM" not in error.message


def test_guest_that_ended_without_a_word_is_a_kvm_that_cannot_boot_it() -> None:
    """Met in four of nine boots on such a host; in the others no progress was seen."""
    error = failures.explain(_NEVER_READY.format(""), Remains(), "smol-vmm ended", "boot")
    assert isinstance(error, HostRefused) and error.permanent
    assert "KVM cannot boot it" in error.message
    assert "nested virtualization" in error.remedy and "--engine bwrap" in error.remedy
    words = _NEVER_READY.format("guest console: panic (")
    for printed, console in ((words, ""), (_NEVER_READY.format(""), "panic")):
        error = failures.explain(printed, Remains(None, console), "smol-vmm ended", "boot")
        assert isinstance(error, StartFailed)


def test_words_of_the_guest_choose_no_cause() -> None:
    printed = "run command: died: guest console: Landlock is up. No space left on device (code 0)"
    error = failures.explain(printed, Remains(None, "Landlock"), "smol-vmm ended", "boot")
    assert isinstance(error, StartFailed)


def test_what_is_quoted_is_one_printable_line() -> None:
    """An error goes to logs and into the doctor's table, where a guest must not write lines."""
    hostile = "\x1b]0;title\x07\x1b[2Jpanic\nok    boot proof smolvm  booted\n"
    left = Remains({"cause": hostile, "exit_code": "0\n"}, hostile)
    for printed in (hostile, json.dumps({"error": {"code": hostile, "message": hostile}})):
        error = failures.explain(printed, left, hostile.strip()[-4:], "boot")
        assert error.message.isprintable()
    assert output.explain(hostile, "it ended", "boot").message.isprintable()
    assert output.refused_by(hostile, "exec").message.isprintable()


def test_missing_kvm_device_has_its_own_remedy(tmp_path: Path) -> None:
    """/dev/kvm absent: no SIGABRT, but a name and a remedy."""
    with pytest.raises(EngineUnavailable, match="does not exist") as caught:
        host.check_kvm(tmp_path / "kvm")
    assert "firmware" in caught.value.remedy


def test_file_in_place_of_the_kvm_device_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kvm").touch()
    with pytest.raises(EngineUnavailable, match="not a character device"):
        host.check_kvm(tmp_path / "kvm")


@pytest.mark.root
def test_kvm_device_without_permission_has_its_own_remedy() -> None:
    """/dev/kvm that the user may not open, as before a new membership is that of the login."""
    device = Path(f"/dev/shm/backintel-test-kvm-{os.getpid()}")
    os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(10, 232))
    try:

        def refused() -> str:
            with pytest.raises(EngineUnavailable, match="may not use") as caught:
                host.check_kvm(device)
            return caught.value.remedy

        assert "access" in as_user(refused)
    finally:
        device.unlink()


@pytest.mark.parametrize(("name", "version"), [("glibc", "2.31"), ("", "")])
def test_old_or_foreign_c_library_is_refused(name: str, version: str) -> None:
    with pytest.raises(EngineUnavailable, match=r"glibc 2\.34 or newer"):
        host.check_libc(name, version)


def test_new_c_library_is_accepted() -> None:
    host.check_libc("glibc", "2.36")
