"""The first moments of a supervisor: its record, and the signals that are not for it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from session_request import request

from kernel_provisioner.engines.base import Leftovers
from kernel_provisioner.errors import HostRefused
from kernel_provisioner.session.journal import Journal


def test_a_record_that_cannot_be_renewed_is_told_with_its_remedy(tmp_path: Path) -> None:
    start = request(tmp_path, "bwrap")
    journal = Journal(start)
    journal.open()
    shutil.rmtree(start.dirs.sessions)
    start.dirs.sessions.touch()
    with pytest.raises(HostRefused, match=r"cannot be recorded in .*/state \(") as caught:
        journal.note(Leftovers())
    assert caught.value.phase == "record"
    assert "disk is not full" in caught.value.remedy


def test_a_terminals_signals_are_ignored_before_there_is_a_session() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-I", "-m", "kernel_provisioner.session", str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=(theirs.fileno(),)) as child:
        theirs.close()
        deadline = time.monotonic() + 100
        wanted = {signal.SIGINT, signal.SIGHUP}
        while not wanted <= _ignored(child.pid):
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        for number in wanted:
            os.kill(child.pid, number)
        ours.shutdown(socket.SHUT_RDWR)
        assert child.wait(100) == 0, "the end of its owner ends it, no signal"


def _ignored(pid: int) -> set[int]:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(status.partition("SigIgn:")[2].split()[0], 16)
    return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}
