"""The real SmolVM: what holds in one microVM that these tests share, and what it denies."""

from __future__ import annotations

import os
import signal
import socket

from live import MIB, PROFILE, SLOW, LiveMachine

from kernel_provisioner.engines.smolvm import monitor

_ATTEMPT = """
import os, socket
def attempt(what):
    try:
        return what()
    except OSError as error:
        return error.strerror
"""


def test_guest_is_attested_inside_the_pinned_machine(shared: LiveMachine) -> None:
    facts = shared.engine.verify()
    machine = shared.facts["vm"]
    print(f"\nsmolvm {facts.version}, guest kernel {machine['kernel']}")
    assert facts.version == "1.32.2"
    assert machine["kernel"].startswith("6.18.")
    assert 0.85 * PROFILE.ram_bytes <= machine["memory_bytes"] <= PROFILE.ram_bytes
    assert shared.facts["seccomp_mode"] == 2
    assert shared.facts["uid"] == [10001] * 4
    assert shared.guest.limits["guest_kernel"] == machine["kernel"]


def test_kernel_answers_through_the_exposed_sockets(shared: LiveMachine) -> None:
    assert shared.run("print(6 * 7)") == "42"
    assert shared.run("import os; print(os.getuid(), os.getcwd())") == "10001 /workspace"


def test_no_network_but_loopback(shared: LiveMachine) -> None:
    """A service of the host listens on every address; the guest reaches none."""
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        port = listener.getsockname()[1]
        text = shared.run(
            f"""{_ATTEMPT}
print(open('/proc/net/route').read().count(chr(10)))
print(sorted(line.split(':')[0].strip() for line in open('/proc/net/dev').readlines()[2:]))
for address in ('127.0.0.1', '10.0.2.15', '10.0.2.2', '1.1.1.1'):
    print(attempt(lambda: socket.create_connection((address, {port}), 5)))
print(attempt(lambda: socket.socket(40, socket.SOCK_STREAM)))
"""
        )
    assert text.splitlines() == [
        "1",
        "['lo']",
        "Connection refused",
        "Network is unreachable",
        "Network is unreachable",
        "Network is unreachable",
        "Address family not supported by protocol",
    ]


def test_root_and_sources_are_read_only_and_nothing_else_is_seen(shared: LiveMachine) -> None:
    text = shared.run(
        f"""{_ATTEMPT}
print(attempt(lambda: open('/usr/made', 'w')))
print(attempt(lambda: open('/sources/data/made', 'w')))
print(attempt(lambda: open('/sources/one', 'a')))
print(open('/sources/data/a.txt').read(), '|', open('/sources/one').read())
print(sorted(os.listdir('/sources')))
print(attempt(lambda: os.listdir('/run/backintel')), attempt(lambda: os.listdir('/storage')))
print(attempt(lambda: os.mknod('/tmp/disk', 0o60600, os.makedev(254, 0))))
print(sorted(n for n in os.listdir('/dev') if n.startswith(('vd', 'kmsg', 'vsock'))))
print(repr(open('/proc/cmdline').read()))
"""
    )
    assert text.splitlines() == [
        "Read-only file system",
        "Read-only file system",
        "Read-only file system",
        "of the directory | of the file",
        "['data', 'one']",
        "No such file or directory No such file or directory",
        "Operation not permitted",
        "[]",
        "''",
    ]


def test_full_mounts_are_the_guests_own_trouble(shared: LiveMachine) -> None:
    text = shared.run(
        f"""{_ATTEMPT}
def fill(path):
    with open(path, 'wb') as file:
        for _ in range(200):
            file.write(bytes(1 << 20))
for place in ('/workspace', '/tmp', '/dev/shm'):
    print(attempt(lambda: fill(place + '/big')))
    os.unlink(place + '/big')
"""
    )
    assert text.splitlines() == ["No space left on device"] * 3


def test_interrupt_keeps_the_state(shared: LiveMachine) -> None:
    shared.run("kept = 1")
    shared.begin("while True: pass")
    shared.guest.signal(signal.SIGINT)
    reply = shared.do(shared.client.get_shell_msg(timeout=20 * SLOW))
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    assert shared.run("print(kept)") == "1"


def test_figures_come_from_guest_and_host(shared: LiveMachine) -> None:
    sample = shared.guest.sample()
    assert 20 * MIB < sample.memory_bytes < PROFILE.ram_bytes
    assert sample.cpu_seconds > 0 and sample.tasks > 1 and sample.oom_kills == 0


def test_monitor_is_confined_and_unprivileged(shared: LiveMachine) -> None:
    machine = shared.guest.leftovers.processes[1]
    user = int(str(shared.guest.limits["monitor_uid"]))
    assert user > 10001
    assert monitor.deviations(machine, user) == []
    for name in ("mnt", "pid", "net", "ipc"):
        own = os.readlink(f"/proc/self/ns/{name}")
        assert os.readlink(f"/proc/{machine.pid}/ns/{name}") != own
