"""The real SmolVM: how microVMs end, each test with one of its own; nothing of any is left."""

from __future__ import annotations

import tarfile
import threading
import time
from pathlib import Path

from live import SLOW, LiveMachine

from kernel_provisioner.engines.smolvm import monitor
from kernel_provisioner.processes import is_running


def test_artifacts_after_the_kill_then_nothing_is_left(own: LiveMachine) -> None:
    own.start().release()
    own.run("open('/artifacts/a.csv', 'w').write('a,b\\n')")
    own.begin("while True: pass")
    processes = own.guest.leftovers.processes
    own.guest.kill()
    assert own.wait().status == -9
    with own.guest.artifacts() as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        assert [member.name for member in tar] == ["a.csv"]
    assert own.do(own.guest.destroy(10 * SLOW)) == []
    assert [process for process in processes if is_running(process)] == []


def test_memory_that_ends_is_told_with_evidence(own: LiveMachine) -> None:
    own.start().release()
    own.begin("block = []\nwhile True: block.append(bytearray(16 << 20))")
    assert own.wait(30).status == -9
    assert own.guest.sample().oom_kills > 0


def test_kill_while_booting_leaves_nothing(own: LiveMachine) -> None:
    own.guest = own.do(own.engine.launch(own.spec).claim())
    launcher = own.guest.leftovers.processes[0]
    deadline = time.monotonic() + 10 * SLOW
    while (machine := monitor.find(launcher)) is None:
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)
    own.guest.kill()
    assert own.wait().status == -9
    assert own.do(own.guest.destroy(10 * SLOW)) == []
    assert not is_running(machine) and not is_running(launcher)


def test_monitor_sees_nothing_of_the_hosts_temporary_files(own: LiveMachine) -> None:
    """Its /tmp is a stage of its own with what was put there by name."""
    own.start()
    machine = own.guest.leftovers.processes[1]
    root = Path(f"/proc/{machine.pid}/root")
    assert (root / "tmp/k/agent").is_socket()
    assert sorted(path.name for path in (root / "tmp").iterdir()) == [
        *("d", "dev", "e", "g", "i", "k", "s0", "s1"),
    ]
