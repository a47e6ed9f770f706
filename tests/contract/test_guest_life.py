"""How a guest is interrupted and ended: without its help, completely, whoever dies first."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from live_guest import PACE, LiveGuest, Starter, small, wait_gone

from kernel_provisioner.artifacts.publish import publish
from kernel_provisioner.artifacts.tarstream import ExportLimits
from kernel_provisioner.engines.base import Leftovers, ProcessIdentity
from kernel_provisioner.engines.bwrap.export import SOCKET
from kernel_provisioner.engines.leftovers import remove_leftovers
from kernel_provisioner.errors import (
    AttestationFailed,
    BackIntelError,
    ExportRefused,
    StartFailed,
)
from kernel_provisioner.paths import guest_code_dir

pytestmark = pytest.mark.sandbox

_FAMILY = """
    import os, signal, subprocess
    for number in (1, 2, 3, 15):
        signal.signal(number, signal.SIG_IGN)
    shells = [
        subprocess.Popen(
            ['/bin/sh', '-c', "trap '' TERM HUP INT; sleep 1000 & sleep 1000 & echo; wait"],
            start_new_session=True, stdout=subprocess.PIPE)
        for index in range(20)]
    for shell in shells:
        shell.stdout.readline()  # its two children are there
    print('family', 'stands')
    while True:
        pass
    """


def test_interrupt_ends_the_cell_and_keeps_the_state(guest: LiveGuest) -> None:
    guest.check("kept = 42")
    message = guest.send("print('busy'); \nimport time\nwhile True: time.sleep(0.01)")
    guest.wait_for_text("busy")
    guest.guest.signal(signal.SIGINT)
    reply = guest.client.get_shell_msg(timeout=10 * PACE)
    assert reply["parent_header"]["msg_id"] == message
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    assert guest.check("print(kept)") == "42"


def test_interrupt_reaches_children(guest: LiveGuest) -> None:
    guest.send(
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '1000'])\n"
        "print('ready', flush=True)\n"
        "child.wait()"
    )
    guest.wait_for_text("ready")
    guest.guest.signal(signal.SIGINT)
    reply = guest.client.get_shell_msg(timeout=60 * PACE)
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    # Its status may have been lost with the wait that was interrupted.
    assert guest.check("child.wait(10)\nprint('gone')") == "gone"


def test_interrupt_while_idle_changes_nothing(guest: LiveGuest) -> None:
    guest.check("x = 1")
    guest.guest.signal(signal.SIGINT)
    assert guest.check("print(x)") == "1"


def test_interrupt_of_a_kernel_that_left_its_group(start: Starter) -> None:
    """The guest may change its process group; the signal must still hit it and nobody else."""
    live = start()
    live.check(
        """
        import os
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            import time; time.sleep(1000)
        try:
            os.setpgid(child, child)
        except OSError:
            pass
        os.setpgid(0, child)
        """
    )
    live.send("print('busy')\nimport time\nwhile True: time.sleep(0.01)")
    live.wait_for_text("busy")
    live.guest.signal(signal.SIGINT)
    assert live.client.get_shell_msg(timeout=10 * PACE)["content"]["ename"] == "KeyboardInterrupt"


def test_kill_ends_signal_ignoring_descendants(start: Starter) -> None:
    live = start()
    live.send(_FAMILY)
    live.wait_for_text("family stands")
    pids = live.processes()
    assert len(pids) > 40 or not live.seen
    begin = time.monotonic()
    live.guest.kill()
    assert live.wait(5).status == -9
    # A machine stays, for its artifacts: what is in it, its agent ended.
    assert wait_gone(pids if live.seen else []) == []
    assert time.monotonic() - begin < 2 * PACE


def test_kill_before_release_and_twice(start: Starter) -> None:
    live = start(release=False)
    live.guest.kill()
    live.guest.kill()
    assert live.wait(5).status == -9
    live.guest.signal(signal.SIGINT)
    live.guest.sample()


def test_exit_status_of_the_kernel_is_known(start: Starter) -> None:
    live = start()
    live.send("import os; os._exit(7)")
    assert live.wait(10).status == 7


def test_kernel_killed_by_itself(start: Starter) -> None:
    live = start()
    live.send("import os; os.kill(os.getpid(), 11)")
    assert live.wait(10).status == -11


def test_release_after_death_tells_why(start: Starter) -> None:
    live = start(release=False)
    live.guest.kill()
    with pytest.raises(StartFailed) as caught:
        live.release()
    assert caught.value.phase == "kernel"


def test_destroy_is_idempotent_and_the_last_figures_stay(start: Starter) -> None:
    live = start()
    live.check("x = bytearray(50 << 20)")
    peak = live.sample().peak_memory_bytes
    for _ in range(3):
        assert list(live.loop.run_until_complete(live.guest.destroy(5 * PACE))) == []
    assert live.guest.sample().peak_memory_bytes >= peak
    live.guest.kill()
    live.guest.signal(signal.SIGINT)
    with pytest.raises(StartFailed):
        live.guest.artifacts()


def _members(live: LiveGuest) -> list[tarfile.TarInfo]:
    with live.guest.artifacts() as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
        return list(tar)


def test_artifacts_after_the_kill(start: Starter) -> None:
    live = start()
    live.check(
        """
        import os
        os.makedirs('/artifacts/d')
        open('/artifacts/d/a.csv', 'w').write('a,b\\n')
        open('/artifacts/empty.txt', 'w').close()
        """
    )
    live.guest.kill()
    live.wait(5)
    names = {member.name: (member.type, member.size) for member in _members(live)}
    assert names == {
        "d": (tarfile.DIRTYPE, 0),
        "d/a.csv": (tarfile.REGTYPE, 4),
        "empty.txt": (tarfile.REGTYPE, 0),
    }


def test_artifacts_show_every_special_entry_as_what_it_is(start: Starter) -> None:
    live = start()
    live.check(
        """
        import os, socket
        os.chdir('/artifacts')
        open('a.txt', 'w').write('x'); os.link('a.txt', 'b.txt')
        os.symlink('/etc/shadow', 'link.txt'); os.mkfifo('fifo.txt')
        s = socket.socket(socket.AF_UNIX); s.bind('sock.txt')
        open(b'\\xff\\n.txt', 'w').close()
        os.symlink('/etc', 'dir')
        """
    )
    live.guest.kill()
    live.wait(5)
    kinds = {member.name: (member.type, member.linkname) for member in _members(live)}
    assert kinds == {
        "a.txt": (tarfile.REGTYPE, ""),
        "b.txt": (tarfile.LNKTYPE, "a.txt"),
        "link.txt": (tarfile.SYMTYPE, "/etc/shadow"),
        "dir": (tarfile.SYMTYPE, "/etc"),
        "fifo.txt": (tarfile.FIFOTYPE, ""),
        "sock.txt": (SOCKET, ""),
        "\udcff\n.txt": (tarfile.REGTYPE, ""),
    }


@pytest.mark.parametrize(
    "code",
    [
        "import os\nfor i in range(5000): open(f'/artifacts/{i}', 'w').close()",
        "import os\np = '/artifacts'\nfor i in range(40):\n    p += '/d'; os.mkdir(p)",
        "import os\nf = open('/artifacts/s', 'w'); f.truncate(700 << 20)",
    ],
    ids=["entries", "depth", "sparse giant"],
)
def test_artifacts_over_a_bound_end_without_a_trailer(start: Starter, code: str) -> None:
    live = start(profile=small(artifacts_bytes=64 << 20))
    live.check(code)
    live.guest.kill()
    live.wait(5)
    with live.guest.artifacts() as stream:
        data = stream.read()
    assert len(data) < 32 << 20
    assert not data.endswith(bytes(1024)) or len(data) % 512


def test_a_reader_that_stops_early_frees_the_export(start: Starter) -> None:
    live = start()
    live.check("open('/artifacts/big.txt', 'wb').write(b'x' * (20 << 20))")
    live.guest.kill()
    with live.guest.artifacts() as stream:
        stream.read(10)
    with live.guest.artifacts() as stream:
        assert len(stream.read()) > 20 << 20


_SUPERVISOR = """
import sys
sys.path.insert(0, {here!r})
from live_guest import LiveGuest
live = LiveGuest({engine!r}).start().release()
live.send({family!r})
live.wait_for_text("family stands")
left = live.guest.leftovers
print(" ".join(str(pid) for pid in live.processes()), flush=True)
print(" ".join(f"{{p.pid}}:{{p.start_time}}" for p in left.processes), flush=True)
print(" ".join(str(path) for path in left.cgroups), flush=True)
print(" ".join(str(path) for path in left.directories), flush=True)
print(live.spec.session, flush=True)
print(live.directory, flush=True)
sys.stdin.read()
"""


def test_sigkill_of_the_supervisor_ends_everything(engine: str) -> None:
    code = _SUPERVISOR.format(here=str(Path(__file__).parent), engine=engine, family=_FAMILY)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        pairs = [word.split(":") for word in parent.stdout.readline().split()]
        cgroups = tuple(Path(word) for word in parent.stdout.readline().split())
        directories = tuple(Path(word) for word in parent.stdout.readline().split())
        session = parent.stdout.readline().strip()
        directory = Path(parent.stdout.readline().strip())
        parent.kill()
        parent.wait()
        assert wait_gone(pids, 2.0) == []
    # Of a microVM the host sees the keeper and the monitor.
    assert len(pids) > (40 if cgroups else 1)

    recorded = tuple(ProcessIdentity(int(pid), int(started)) for pid, started in pairs)
    assert remove_leftovers(Leftovers(recorded, cgroups, directories), session) == []
    assert [path for path in (*cgroups, *directories) if path.exists()] == []
    # A microVM's sockets lie in one of its directories.
    for number in range(1, 6) if cgroups else ():
        (directory / f"g-{number}").unlink()
    directory.rmdir()


def test_stopped_supervisor_does_not_keep_leftovers_alive(start: Starter) -> None:
    """A sweep by another process ends a guest by identity and cgroup, also against its will."""
    live = start()
    live.send(_FAMILY)
    live.wait_for_text("family stands")
    left = live.guest.leftovers
    pids = [pid for pid in live.processes() if pid != left.processes[0].pid]
    assert pids
    session = live.spec.session
    wrong = tuple(ProcessIdentity(p.pid, p.start_time + 1) for p in left.processes)
    other = replace(left, processes=wrong, cgroups=(), directories=())
    assert remove_leftovers(other, session) == []
    assert live.processes() != []
    remove_leftovers(left, session, 3 * PACE)
    assert wait_gone(pids) == []


def test_a_failed_start_leaves_nothing(engine: str, tmp_path: Path) -> None:
    """smolvm#582: The image has no Python: bubblewrap starts and its command does not."""
    for name in ("usr/bin", "etc", "opt/backintel"):
        (tmp_path / "root" / name).mkdir(parents=True)
    tmp_path.chmod(0o755)
    live = LiveGuest(engine, image_root=tmp_path / "root")
    try:
        with pytest.raises(BackIntelError) as caught:
            live.start()
        assert "python3" in str(caught.value)
    finally:
        live.close()


def _changed_guest(directory: Path, name: str, old: str, new: str) -> Path:
    """Copy the guest's code and change one line of it."""
    code = directory / "guest"
    shutil.copytree(guest_code_dir(), code, ignore=shutil.ignore_patterns("__pycache__"))
    text = (code / name).read_text()
    assert old in text
    (code / name).write_text(text.replace(old, new))
    for path in (directory, code):
        path.chmod(0o755)
    return code


def test_a_limit_that_was_not_applied_stops_the_start(engine: str, tmp_path: Path) -> None:
    code = _changed_guest(tmp_path, "init.py", 'limits.apply(plan["rlimits"])', "pass")
    live = LiveGuest(engine, guest_code=code)
    try:
        with pytest.raises(AttestationFailed, match="the limit nproc is"):
            live.start()
        assert live.wait(5).status == -9
    finally:
        live.close()


def test_a_guest_that_breaks_is_quoted(engine: str, tmp_path: Path) -> None:
    code = _changed_guest(tmp_path, "init.py", "    os.umask(0o022)", "    raise OSError('broken')")
    live = LiveGuest(engine, guest_code=code)
    try:
        with pytest.raises(StartFailed, match="OSError: broken") as caught:
            live.start()
        assert caught.value.phase == "attest"
    finally:
        live.close()


def test_a_guest_that_says_nothing_is_given_up(engine: str, tmp_path: Path) -> None:
    """nbval#133: a guest that does not come up is given up in its phase."""
    code = _changed_guest(
        tmp_path, "init.py", "    os.umask(0o022)", "    import time; time.sleep(600)"
    )
    live = LiveGuest(engine, guest_code=code)
    live.attest_timeout = 2.0 * PACE
    try:
        with pytest.raises(StartFailed, match="did not answer in time"):
            live.start()
    finally:
        live.close()


def test_flood_on_standard_error_is_bounded(start: Starter) -> None:
    """The kernel's real standard error is a pipe read at a bounded rate (snekbox#81)."""
    live = start()
    text = live.check(
        """
        import os, sys
        fd = sys.stderr._original_stdstream_copy
        os.set_blocking(fd, False)
        written = 0
        try:
            while written < 1 << 30:
                written += os.write(fd, b'x' * 65536)
        except BlockingIOError:
            print('blocked')
        """
    )
    assert text == "blocked"


def test_input_completion_and_subshell(guest: LiveGuest) -> None:
    client = guest.client
    guest.check("some_long_name = 1")
    client.complete("some_lo", 7)
    assert client.get_shell_msg(timeout=60 * PACE)["content"]["matches"] == ["some_long_name"]
    client.execute("print(input('name? '))", allow_stdin=True)
    assert client.get_stdin_msg(timeout=60 * PACE)["content"]["prompt"] == "name? "
    client.input("me")
    guest.wait_for_text("me\n")
    assert client.get_shell_msg(timeout=60 * PACE)["content"]["status"] == "ok"
    request = client.session.msg("create_subshell_request")
    client.control_channel.send(request)
    reply = client.get_control_msg(timeout=60 * PACE)
    assert reply["content"]["status"] == "ok"


def test_debugger_answers(start: Starter) -> None:
    """The debug adapter answers."""
    client = start().client
    request = client.session.msg(
        "debug_request",
        {"type": "request", "seq": 1, "command": "initialize", "arguments": {"adapterID": "t"}},
    )
    client.control_channel.send(request)
    reply = client.get_control_msg(timeout=60 * PACE)
    assert reply["content"]["success"] is True


def test_heartbeat_answers(guest: LiveGuest) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.REQ) as beat:
        beat.linger = 0
        beat.connect(f"ipc://{guest.guest.channels['hb']}")
        beat.send(b"ping")
        assert beat.poll(30_000 * PACE)
        assert beat.recv() == b"ping"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("for i in range(5000): open(f'/artifacts/{i:04}.csv', 'w').close()", "256 are"),
        ("import os\np = '/artifacts'\nfor i in range(40):\n    p += '/d'; os.mkdir(p)", "deep"),
        ("open('/artifacts/s.csv', 'w').truncate(700 << 20)", "s.csv"),
    ],
)
def test_an_export_over_a_bound_is_refused_with_its_reason(
    start: Starter, tmp_path: Path, code: str, reason: str
) -> None:
    live = start(profile=small(artifacts_bytes=64 << 20))
    live.check(code)
    live.guest.kill()
    with live.guest.artifacts() as stream, pytest.raises(ExportRefused) as caught:
        publish(stream, tmp_path / "out", ExportLimits(max_bytes=64 << 20))
    assert reason in str(caught.value)
    assert not (tmp_path / "out").exists()
