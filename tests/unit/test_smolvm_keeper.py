"""The keeper of an ordinary user's microVM ends what the program started, whoever ends the keeper.

A shell stands in for the program, and a process in a session of its own for the monitor, which
outlives the program if that is killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import pytest
from unprivileged import as_user

from kernel_provisioner.engines.base import Leftovers, ProcessIdentity
from kernel_provisioner.engines.leftovers import remove_leftovers
from kernel_provisioner.engines.smolvm.launcher import Launch, run_child
from kernel_provisioner.processes import end_child, identify, is_running

_PROGRAM = "setsid sleep 600 & echo $!; exec >&-; wait"
_LONGEST_S = 60.0


@dataclass(frozen=True)
class Kept:
    """A keeper that is this process's child, and what it has to end."""

    keeper: ProcessIdentity
    machine: ProcessIdentity


def launched(backstop_s: float = 600.0) -> Kept:
    """Start a keeper and its program; return once the stand-in for the monitor runs."""
    stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    output, output_end = os.pipe2(os.O_CLOEXEC)
    errors, errors_end = os.pipe2(os.O_CLOEXEC)
    launch = Launch(
        command=["/bin/sh", "-c", _PROGRAM],
        environ={"PATH": "/usr/bin:/bin"},
        stdin=stdin,
        output=output_end,
        errors=errors_end,
        parent=os.getpid(),
        backstop_s=backstop_s,
        open_files=256,
        user=None,
        trees={},
    )
    pid = os.fork()
    if pid == 0:
        run_child(launch)
    os.close(output_end)
    os.close(errors_end)
    with open(errors, "rb") as told, open(output) as said:
        assert told.read() == b""
        machine = identify(int(said.readline()))
    keeper = identify(pid)
    assert keeper is not None and machine is not None
    return Kept(keeper, machine)


def lives_on(kept: Kept) -> bool:
    """Whether the machine lives after its keeper is gone; it is ended in any case."""
    os.waitpid(kept.keeper.pid, 0)
    lives = is_running(kept.machine)
    with suppress(ProcessLookupError):
        os.kill(kept.machine.pid, signal.SIGKILL)
    return lives


def by_a_sweep(kept: Kept) -> None:
    """As one finds it whose supervisor was killed a moment before: the keeper's word is pending."""
    assert remove_leftovers(Leftovers((kept.keeper,)), "session") == []


def by_a_sweep_that_it_does_not_hear(kept: Kept) -> None:
    """As where the keeper has no processor time: it is killed, and what it keeps by the sweep."""
    os.kill(kept.keeper.pid, signal.SIGSTOP)
    by_a_sweep(kept)


def by_the_supervisor(kept: Kept) -> None:
    """As a launch is given up."""
    fd = os.pidfd_open(kept.keeper.pid)
    end_child(fd, _LONGEST_S)
    os.close(fd)


@pytest.mark.parametrize("end", [by_a_sweep, by_a_sweep_that_it_does_not_hear, by_the_supervisor])
def test_who_ends_the_keeper_ends_the_machine(end: Callable[[Kept], None]) -> None:
    def piece() -> bool:
        kept = launched()
        end(kept)
        return lives_on(kept)

    assert as_user(piece) is False


def test_backstop_of_a_user_ends_the_machine() -> None:
    assert as_user(lambda: lives_on(launched(backstop_s=4.0))) is False


def test_machine_ends_with_the_process_that_started_it() -> None:
    def piece() -> list[ProcessIdentity]:
        kept = launched()
        return [kept.keeper, kept.machine]

    # The child that started both ends without a word to either.
    processes = as_user(piece)
    deadline = time.monotonic() + _LONGEST_S
    while left := [process for process in processes if is_running(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def test_a_deaf_process_is_killed_after_it_was_asked() -> None:
    deaf, told = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(told, b"d")
        while True:
            signal.pause()
    assert os.read(deaf, 1) == b"d"
    fd = os.pidfd_open(child)
    try:
        end_child(fd, 0.1)
    finally:
        for each in (fd, deaf, told):
            os.close(each)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
