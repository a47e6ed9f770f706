"""Processes by identity."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from kernel_provisioner.engines.base import ProcessIdentity
from kernel_provisioner.engines.bwrap import linux
from kernel_provisioner.processes import identify, kill_and_wait, open_pidfd


@pytest.fixture
def outlived_leader() -> Iterator[ProcessIdentity]:
    """A process that is gone while its number still names the session of its child."""
    readable, writable = os.pipe()
    leader = os.fork()
    if leader == 0:
        os.setsid()
        member = os.fork()
        if member == 0:
            signal.pause()
        os.write(writable, str(member).encode())
        signal.pause()
    member = int(os.read(readable, 16))
    identity = identify(leader)
    assert identity is not None
    os.kill(leader, signal.SIGKILL)
    os.waitpid(leader, 0)
    assert os.getsid(member) == leader
    yield identity
    os.kill(member, signal.SIGKILL)
    for fd in (readable, writable):
        os.close(fd)


def test_number_that_only_names_a_session_is_no_process(outlived_leader: ProcessIdentity) -> None:
    """Linux 6.12 says EINVAL there, and a sweep once took that for a failure of its own."""
    assert open_pidfd(outlived_leader.pid) is None
    assert linux.open_identity(outlived_leader) is None
    assert kill_and_wait(outlived_leader, 0.0)


def test_number_of_a_thread_is_no_process() -> None:
    """A dead process's number may be a thread's by now; that thread is left alone."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert thread.native_id is not None and thread.native_id != os.getpid()
        gone = ProcessIdentity(thread.native_id, 1)
        assert open_pidfd(gone.pid) is None
        assert linux.open_identity(gone) is None
        assert kill_and_wait(gone, 0.0)
    finally:
        over.set()
        thread.join()


def test_other_kernels_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine's kernel does not say, said by a stand-in for the system call."""

    def says(number: int) -> None:
        def stand_in(pid: int) -> int:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "pidfd_open", stand_in)

    for number in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
        says(number)
        assert open_pidfd(1) is None
    says(errno.EMFILE)
    with pytest.raises(OSError, match="Too many open files"):
        kill_and_wait(ProcessIdentity(1, 1), 0.0)


def test_process_is_killed_by_its_identity_alone() -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
    found = identify(child)
    assert found is not None
    assert kill_and_wait(ProcessIdentity(child, found.start_time + 1), 0.0)
    assert identify(child) == found
    assert kill_and_wait(found, 20.0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
