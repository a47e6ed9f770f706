"""Each limit of spec D2 and D3 reached for real: the guest feels it, the host does not."""

from __future__ import annotations

import errno
import json
import time

import pytest
from live_guest import EMULATED, MIB, PACE, PROFILE, LiveGuest, Starter, wait_gone

pytestmark = pytest.mark.sandbox


@pytest.mark.parametrize(
    ("mount", "size"),
    [
        ("/workspace", PROFILE.workspace_bytes),
        ("/artifacts", PROFILE.artifacts_bytes),
        ("/tmp", PROFILE.temp_bytes),
        ("/tmp/private/home", PROFILE.temp_bytes),
        ("/dev/shm", PROFILE.temp_bytes),
    ],
)
def test_full_mount_gives_enospc(guest: LiveGuest, mount: str, size: int) -> None:
    text = guest.check(
        f"""
        import os
        path = {mount!r} + '/fill'
        place = os.statvfs({mount!r})
        print(place.f_blocks * place.f_frsize, place.f_bavail * place.f_frsize)
        written = 0
        try:
            with open(path, 'wb', buffering=0) as file:
                while written < 1 << 30:
                    written += file.write(b'x' * 65536)
        except OSError as error:
            print(error.errno, written)
        finally:
            os.unlink(path)
        """
    )
    whole, free, number, written = (int(word) for word in text.split())
    assert (whole, number) == (size, errno.ENOSPC)
    # Caches lie in /tmp.
    assert size // 2 < free - MIB <= written <= free


def test_all_mounts_full_leave_the_kernel_alive(start: Starter) -> None:
    live = start()
    live.check(
        """
        for mount in ('/workspace', '/artifacts', '/tmp', '/dev/shm'):
            try:
                with open(mount + '/fill', 'wb', buffering=0) as file:
                    while True:
                        file.write(b'x' * 65536)
            except OSError:
                pass
        """
    )
    assert live.check("print('alive')") == "alive"
    assert live.sample().oom_kills == 0


def test_shm_has_its_own_limit(guest: LiveGuest) -> None:
    text = guest.check("import os; s = os.statvfs('/dev/shm'); print(s.f_blocks * s.f_frsize)")
    assert int(text) == PROFILE.temp_bytes


def test_500_forks(guest: LiveGuest) -> None:
    text = guest.check(
        """
        import os, signal, time
        children, failure = [], None
        for _ in range(500):
            try:
                pid = os.fork()
            except OSError as error:
                failure = error.errno
                break
            if pid == 0:
                signal.pause()
                os._exit(0)
            children.append(pid)
        print(len(children), failure)
        for pid in children:
            os.kill(pid, 9); os.waitpid(pid, 0)
        """
    )
    made, failure = (int(word) for word in text.split())
    assert failure == errno.EAGAIN
    assert 90 <= made < PROFILE.tasks
    assert guest.sample().tasks <= PROFILE.tasks + 2


def test_threads_count_as_tasks(guest: LiveGuest) -> None:
    text = guest.check(
        """
        import threading
        stop = threading.Event()
        made = 0
        try:
            for _ in range(500):
                threading.Thread(target=stop.wait, daemon=True).start()
                made += 1
        except RuntimeError as error:
            print(made, error)
        stop.set()
        """
    )
    made, _, reason = text.partition(" ")
    assert int(made) < PROFILE.tasks
    assert reason == "can't start new thread"


def test_sessions_do_not_share_their_tasks(guest: LiveGuest, start: Starter) -> None:
    both = (guest, start())
    for live in both:
        text = live.check(
            """
            import os, signal
            children = []
            for _ in range(80):
                pid = os.fork()
                if pid == 0:
                    signal.pause()
                children.append(pid)
            print(len(children))
            """
        )
        assert text == "80"
    for live in both:
        live.check("for pid in children: os.kill(pid, 9); os.waitpid(pid, 0)")


def test_2000_open_files(guest: LiveGuest) -> None:
    text = guest.check(
        """
        files = []
        try:
            for _ in range(2000):
                files.append(open('/dev/null'))
        except OSError as error:
            print(len(files), error.errno)
        for file in files:
            file.close()
        del files
        """
    )
    made, number = (int(word) for word in text.split())
    assert number == errno.EMFILE
    assert 900 < made < PROFILE.open_files


# In pieces: at once Linux refuses what is more than the machine has, and a microVM has no more.
_ALLOCATE = {
    "anonymous": """
        import mmap
        blocks = []
        for _ in range(48):
            blocks.append(mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            for offset in range(0, 64 << 20, 4096):
                blocks[-1][offset] = 1
        """,
    "shared": """
        import mmap
        blocks = []
        for _ in range(22):
            blocks.append(mmap.mmap(-1, 64 << 20))
            for offset in range(0, 64 << 20, 4096):
                blocks[-1][offset] = 1
        """,
    "memfd": """
        import os
        for number in range(24):
            fd = os.memfd_create(str(number))
            for _ in range(128):
                os.write(fd, b'x' * (1 << 20))
        """,
}


@pytest.mark.parametrize("kind", sorted(_ALLOCATE))
def test_3_gib_end_in_oom_with_evidence(guest: LiveGuest, start: Starter, kind: str) -> None:
    """dockerspawner#196: one guest's end for memory harms neither this process nor another."""
    live = start()
    live.send(_ALLOCATE[kind])
    ended = live.wait(60)
    assert ended.status == -9
    sample = live.sample()
    assert sample.oom_kills >= 1
    assert 0.9 * PROFILE.ram_bytes <= sample.peak_memory_bytes <= PROFILE.ram_bytes
    assert guest.check("print('unharmed')") == "unharmed"
    assert guest.sample().oom_kills == 0


def test_oom_of_a_child_is_evident_and_the_kernel_lives(start: Starter) -> None:
    live = start()
    live.check(
        """
        import subprocess, sys
        code = 'b = [bytes([1]) * (64 << 20) for _ in range(48)]'
        print(subprocess.run([sys.executable, '-c', code]).returncode)
        """
    )
    assert live.sample(lambda sample: sample.oom_kills > 0).oom_kills >= 1
    assert live.check("print('alive')") == "alive"


def test_cpu_is_capped(guest: LiveGuest) -> None:
    text = guest.check(
        """
        import json, os, time
        children = []
        before = os.times()  # of all children so far
        begin = time.monotonic()
        for _ in range(4):
            pid = os.fork()
            if pid == 0:
                while time.monotonic() - begin < 2:
                    pass
                os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)
        elapsed = time.monotonic() - begin
        after = os.times()
        used = sum(after[2:4]) - sum(before[2:4])
        print(json.dumps([used, elapsed]))
        """
    )
    used, elapsed = json.loads(text)
    assert used <= 1.15 * elapsed


def test_no_core_dump(guest: LiveGuest) -> None:
    text = guest.check(
        """
        import glob, os, signal
        pid = os.fork()
        if pid == 0:
            os.kill(os.getpid(), signal.SIGABRT)
        status = os.waitpid(pid, 0)[1]
        print(os.WTERMSIG(status), os.WCOREDUMP(status), glob.glob('/workspace/core*'))
        """
    )
    assert text == "6 False []"


def test_multiprocessing_and_shared_memory(guest: LiveGuest) -> None:
    """pytorch#5040: multiprocessing works in the /dev/shm that is given."""
    text = guest.check(
        """
        import multiprocessing, numpy
        from multiprocessing import shared_memory
        block = shared_memory.SharedMemory(create=True, size=1 << 20)
        with multiprocessing.get_context('fork').Pool(2) as pool:
            print(pool.map(abs, [-1, -2, -3]))
        with multiprocessing.get_context('spawn').Pool(2) as pool:
            print(pool.map(abs, [-4, -5]))
        block.close(); block.unlink()
        """
    )
    assert text.splitlines() == ["[1, 2, 3]", "[4, 5]"]


def test_sample_reads_the_guests_own_figures(start: Starter) -> None:
    live = start()
    before = live.sample(lambda sample: sample.memory_bytes > 0)
    live.check("b = bytearray(100 << 20)\nfor i in range(0, len(b), 4096): b[i] = 1")
    during = live.sample(lambda now: now.memory_bytes - before.memory_bytes >= 90 * MIB)
    live.check("del b")
    after = live.sample()
    assert during.memory_bytes - before.memory_bytes >= 90 * MIB
    assert after.peak_memory_bytes >= during.memory_bytes
    assert after.cpu_seconds > before.cpu_seconds
    methods = ("cgroup", "scope") if live.seen else ("the guest kernel's",)
    assert any(word in after.peak_memory_method for word in methods)


def test_backstop_ends_it_although_the_supervisor_does_nothing(start: Starter) -> None:
    # Longer than a start takes on a busy host.
    backstop_s = 90.0 if EMULATED else 12.0
    live = start(backstop_s=backstop_s)
    live.send("while True: pass")
    begin = time.monotonic()
    pids = live.processes()
    assert pids
    # Only the kernel's own timer runs: this process does nothing but look whether they are there.
    assert wait_gone(pids, backstop_s + 20) == []
    assert time.monotonic() - begin < backstop_s + 2 * PACE
    live.wait(5)
