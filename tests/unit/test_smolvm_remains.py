"""What is read of a monitor's own directory, in which its user may have put anything."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernel_provisioner.engines.smolvm.monitor import Remains, remains

INSIDE = ("state", ".cache", "smolvm", "vms", "vm-1")
RECORD, CONSOLE = "vmm-exit.json", "agent-console.log"


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    place = tmp_path.joinpath("session", *INSIDE)
    place.mkdir(parents=True)
    return place


def read(machine: Path) -> Remains:
    return remains(machine.parents[len(INSIDE) - 1])


def test_record_and_console_are_read(machine: Path) -> None:
    (machine / RECORD).write_text('{"cause": "exited", "exit_code": 0}')
    (machine / CONSOLE).write_bytes(b"booting\n\xffkernel panic\n")
    found = read(machine)
    assert found.record == {"cause": "exited", "exit_code": 0}
    assert found.console == "booting\n\ufffdkernel panic\n"


def test_nothing_left_is_nothing_found(tmp_path: Path, machine: Path) -> None:
    assert read(machine) == Remains()
    assert remains(tmp_path / "never was") == Remains()


def test_no_link_is_followed(tmp_path: Path, machine: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"cause": "secret"}')
    for name in (RECORD, CONSOLE):
        (machine / name).symlink_to(secret)
    assert read(machine) == Remains()


@pytest.mark.parametrize("name", INSIDE)
def test_no_directory_on_the_way_may_be_a_link(tmp_path: Path, machine: Path, name: str) -> None:
    (machine / RECORD).write_text('{"cause": "elsewhere"}')
    place = next(path for path in (machine, *machine.parents) if path.name == name)
    elsewhere = tmp_path / "elsewhere"
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    assert read(machine) == Remains()


def test_pipe_holds_nobody_up(machine: Path) -> None:
    for name in (RECORD, CONSOLE):
        os.mkfifo(machine / name)
    assert read(machine) == Remains()


def test_what_cannot_be_read_hides_nothing_else_and_costs_no_descriptor(machine: Path) -> None:
    before = os.listdir("/proc/self/fd")
    for name in ("a.lock", "z.lock"):
        (machine.parent / name).touch()
    (machine / RECORD).mkdir()
    (machine / CONSOLE).write_text("kernel panic")
    assert read(machine) == Remains(None, "kernel panic")
    assert os.listdir("/proc/self/fd") == before


def test_only_the_last_of_a_huge_console_is_read(machine: Path) -> None:
    with (machine / CONSOLE).open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"the end")
    found = read(machine).console
    assert found.endswith("the end") and len(found) == 65536


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 65536, "\0"])
def test_record_that_is_none_counts_as_absent(machine: Path, text: str) -> None:
    (machine / RECORD).write_text(text)
    assert read(machine).record is None
