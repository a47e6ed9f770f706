"""Interfaces of the host's kernel that lead out of weaker sandboxes, tried with real calls."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
from live_guest import LiveGuest

pytestmark = pytest.mark.sandbox

_IPC_SETTINGS = ("msgmax", "msgmnb", "msgmni", "sem", "shmall", "shmmax", "shmmni", "pid_max")


def _settings() -> dict[str, str]:
    paths = [Path("/proc/sys/kernel") / name for name in _IPC_SETTINGS]
    paths += sorted(Path("/proc/sys/fs/mqueue").glob("*"))
    paths += [Path("/proc/sys/kernel/core_pattern"), Path("/proc/sys/kernel/hostname")]
    return {str(path): path.read_text() for path in paths}


def test_writing_every_kernel_setting_changes_none_of_the_hosts(guest: LiveGuest) -> None:
    before = _settings()
    text = guest.check(
        """
        import os
        tried = 0
        for folder, _, names in os.walk('/proc/sys'):
            for name in names:
                tried += 1
                try:
                    with open(f'{folder}/{name}', 'r+b', buffering=0) as file:
                        file.write(b'4242')
                except OSError:
                    pass
        print(tried > 100)
        """
    )
    assert text == "True"
    assert _settings() == before


def test_process_1_shows_nothing_of_the_host(guest: LiveGuest) -> None:
    text = guest.check(
        """
        import os
        try:
            print(sorted(os.listdir('/proc/1/root')) == sorted(os.listdir('/')))
            for name in os.listdir('/proc/1/fd'):
                try:
                    print(os.readlink(f'/proc/1/fd/{name}').split(':')[0])
                except OSError:
                    pass
        except PermissionError:
            print('refused')
        """
    )
    first, *descriptors = text.splitlines()
    # In a microVM it is root's.
    assert first == ("True" if guest.seen else "refused")
    assert set(descriptors) <= {"/dev/null", "pipe", "anon_inode"}


def test_climbing_by_dot_dot_and_magic_links_stays_inside(guest: LiveGuest) -> None:
    canary = Path(f"/var/tmp/backintel-canary-{os.getpid()}")
    canary.write_text("the host's")
    try:
        text = guest.check(
            f"""
            import os
            for base in ('/', '/workspace', '/proc/self/root', '/proc/self/cwd', '/proc/1/root',
                         '/proc/self/task/' + str(os.getpid()) + '/root', '/dev/fd/0'):
                path = base + '/..' * 40 + {str(canary)!r}
                print(os.path.exists(path), end=' ')
            fd = os.open('/', os.O_PATH)
            for _ in range(40):
                fd = os.open('..', os.O_PATH, dir_fd=fd)
            print(os.path.sameopenfile(fd, os.open('/', os.O_PATH)))
            """
        )
    finally:
        canary.unlink()
    assert text.split() == ["False"] * 7 + ["True"]


@pytest.mark.parametrize("source", ["/usr/bin/python3", "/etc/passwd", "/proc/self/exe"])
def test_nothing_read_only_can_be_linked_to_where_it_is_writable(
    guest: LiveGuest, source: str
) -> None:
    text = guest.check(
        f"""
        import os
        for follow in (True, False):
            try:
                os.link({source!r}, '/artifacts/link.csv', follow_symlinks=follow)
                print('LINKED')
            except OSError as error:
                print('refused')
        """
    )
    assert text.split() == ["refused"] * 2


def test_refused_system_calls(guest: LiveGuest) -> None:
    text = guest.check(
        """
        import ctypes, platform
        libc = ctypes.CDLL(None, use_errno=True)
        x86 = platform.machine() == 'x86_64'
        calls = {'io_uring_setup': 425, 'bpf': 321 if x86 else 280, 'keyctl': 250 if x86 else 219,
                 'add_key': 248 if x86 else 217, 'ptrace': 101 if x86 else 117,
                 'process_vm_writev': 311 if x86 else 271, 'pidfd_getfd': 438,
                 'userfaultfd': 323 if x86 else 282, 'perf_event_open': 298 if x86 else 241,
                 'open_by_handle_at': 304 if x86 else 265, 'setns': 308 if x86 else 268,
                 'kexec_load': 246 if x86 else 104, 'fanotify_init': 300 if x86 else 262}
        print([name for name, number in calls.items()
               if (libc.syscall(number, 1, 0, 0, 0, 0, 0), ctypes.get_errno()) != (-1, 1)])
        """
    )
    assert text == "[]"


_FOREIGN = {
    "x86_64": {
        "int 0x80": "import mmap; m = mmap.mmap(-1, 4096, prot=7)\n"
        "m.write(bytes([0xb8, 20, 0, 0, 0, 0xcd, 0x80, 0xc3]))\n"
        "address = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(address)()",
        "x32": "ctypes.CDLL(None).syscall(0x40000000 + 39)",
    }
}


@pytest.mark.parametrize("abi", sorted(_FOREIGN.get(platform.machine(), {})))
def test_a_foreign_abi_kills_its_process(guest: LiveGuest, abi: str) -> None:
    code = _FOREIGN[platform.machine()][abi]
    text = guest.check(
        f"""
        import ctypes, os, signal
        pid = os.fork()
        if pid == 0:
            exec({code!r})
            os._exit(0)
        print(signal.Signals(-os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).name)
        """
    )
    # The microVM's kernel does not have the 32-bit one at all.
    assert text == "SIGSYS" or (not guest.seen and abi == "int 0x80" and text == "SIGSEGV")


def test_signals_to_everybody_reach_nobody_outside(guest: LiveGuest) -> None:
    text = guest.check(
        """
        import os, signal
        survivor = os.fork()
        if survivor == 0:
            os.setsid()
            signal.pause()
        for number in range(1, 65):
            try:
                os.kill(1, number)
            except OSError:
                pass
        os.kill(-1, signal.SIGKILL)
        print('alive', os.waitstatus_to_exitcode(os.waitpid(survivor, 0)[1]))
        """
    )
    assert text == "alive -9"
