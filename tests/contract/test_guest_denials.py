"""What a guest must not be able to do: write, reach, gain. Each test tries it for real."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

import pytest
from live_guest import LiveGuest, Starter

from kernel_provisioner.engines.base import SourceMount

pytestmark = pytest.mark.sandbox


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/usr",
        "/usr/bin",
        "/etc",
        "/etc/passwd",
        "/opt/backintel",
        "/opt/backintel/guest",
        "/opt/backintel/guest/site",
        "/docs",
        "/var",
        "/dev",
        "/run",
        "/sources",
        "/proc/sys/kernel",
        "/proc/sys/kernel/core_pattern",
    ],
)
def test_not_writable(guest: LiveGuest, path: str) -> None:
    text = guest.check(
        f"""
        import os
        path = {path!r}
        try:
            if os.path.isdir(path):
                open(path + '/probe', 'w')
            else:
                open(path, 'a').write('x')
            print('WRITTEN')
        except OSError as error:
            print('refused', error.strerror)
        """
    )
    assert text.startswith("refused")


def test_only_the_bounded_mounts_take_files(guest: LiveGuest) -> None:
    text = guest.check(
        """
        import os
        found = set()
        for line in open('/proc/self/mountinfo'):
            target = line.split()[4]
            probe = target.rstrip('/') + '/.probe'
            try:
                os.close(os.open(probe, os.O_CREAT | os.O_WRONLY))
                os.unlink(probe)
                found.add(target)
            except OSError:
                pass
        print(sorted(found))
        """
    )
    assert text == "['/artifacts', '/dev/shm', '/tmp', '/workspace']"


def test_sources_are_read_only_and_unchanged(guest: LiveGuest) -> None:
    """smolvm#1004: what is mounted is there in full, and stays as it is."""
    data, alone = (source.path for source in guest.spec.sources)
    before = [hashlib.sha256(path.read_bytes()).digest() for path in (data / "a.csv", alone)]
    text = guest.check(
        """
        import os
        print(sorted(os.listdir('/sources')), sorted(os.listdir('/sources/data')))
        print(open('/sources/data/a.csv').read().split(), open('/sources/alone').read().strip())
        for path in ('/sources/data/a.csv', '/sources/alone', '/sources/data/new', '/sources/new'):
            try:
                open(path, 'a')
                print('WRITTEN', path)
            except OSError:
                pass
        for change in (os.unlink, lambda p: os.chmod(p, 0o777), lambda p: os.utime(p)):
            try:
                change('/sources/data/a.csv')
                print('CHANGED')
            except OSError:
                pass
        try:
            print('FOLLOWED', open('/sources/data/out').read())
        except OSError as error:
            print('link leads nowhere')
        """
    )
    assert text.splitlines() == [
        "['alone', 'data'] ['a.csv', 'out']",
        "['a,b', '1,2'] x",
        "link leads nowhere",
    ]
    after = [hashlib.sha256(path.read_bytes()).digest() for path in (data / "a.csv", alone)]
    assert after == before
    assert sorted(path.name for path in data.iterdir()) == ["a.csv", "out"]


def test_only_loopback(guest: LiveGuest) -> None:
    assert list(guest.facts["interfaces"]) == ["lo"]
    text = guest.check("print([l.split(':')[0].strip() for l in open('/proc/net/dev')][2:])")
    assert text == "['lo']"


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM"])
@pytest.mark.parametrize("address", ["192.0.2.1", "1.1.1.1", "169.254.169.254", "10.0.0.1"])
def test_no_way_out(guest: LiveGuest, kind: str, address: str) -> None:
    text = guest.check(
        f"""
        import socket
        sock = socket.socket(socket.AF_INET, socket.{kind})
        sock.settimeout(3)
        try:
            sock.connect(({address!r}, 53))
            print('CONNECTED')
        except OSError as error:
            print(error.strerror)
        """
    )
    assert text == "Network is unreachable"


def test_no_dns(guest: LiveGuest) -> None:
    result = guest.run("import socket; socket.getaddrinfo('example.org', 443)")
    assert result.ename == "gaierror"
    text = guest.check("import socket; print(socket.gethostbyname('localhost'))")
    assert text == "127.0.0.1"


def test_host_loopback_is_out_of_reach(guest: LiveGuest) -> None:
    """libkrun#860: the guest's loopback is not the host's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        text = guest.check(
            f"""
            import socket
            try:
                socket.create_connection(('127.0.0.1', {port}), 3)
                print('CONNECTED')
            except OSError as error:
                print(error.strerror)
            """
        )
    assert text == "Connection refused"


def test_own_loopback_works(guest: LiveGuest) -> None:
    text = guest.check(
        """
        import socket
        server = socket.create_server(('127.0.0.1', 0))
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        client.sendall(b'hello'); print(peer.recv(5))
        """
    )
    assert text == "b'hello'"


def test_host_unix_sockets_are_out_of_reach(guest: LiveGuest) -> None:
    name = f"backintel-canary-{os.getpid()}"
    path = guest.directory / "host.sock"
    with (
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
    ):
        abstract.bind(f"\0{name}")
        abstract.listen()
        named.bind(str(path))
        named.listen()
        try:
            text = guest.check(
                f"""
                import socket
                for address in ('\\0{name}', {str(path)!r}, '{guest.directory}/g-1'):
                    try:
                        socket.socket(socket.AF_UNIX).connect(address)
                        print('CONNECTED')
                    except OSError as error:
                        print(error.strerror)
                """
            )
        finally:
            path.unlink()
    assert text.splitlines() == ["Connection refused"] + ["No such file or directory"] * 2


@pytest.mark.parametrize(
    ("family", "refusal"),
    [
        ("AF_VSOCK", "Address family not supported by protocol"),
        ("AF_PACKET", "Address family not supported by protocol"),
        ("AF_NETLINK", "Operation not supported"),
        ("AF_ALG", "Address family not supported by protocol"),
        ("AF_BLUETOOTH", "Address family not supported by protocol"),
    ],
)
def test_address_families(guest: LiveGuest, family: str, refusal: str) -> None:
    text = guest.check(
        f"""
        import socket
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
            try:
                socket.socket(getattr(socket, {family!r}, 40), kind)
                print('MADE')
            except OSError as error:
                print(error.strerror)
        """
    )
    assert set(text.splitlines()) == {refusal}


def test_raw_sockets(guest: LiveGuest) -> None:
    result = guest.run("import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)")
    assert result.ename == "PermissionError"


def test_two_guests_do_not_see_each_other(guest: LiveGuest, start: Starter) -> None:
    """libkrun#818, libkrun#819: two guests share no loopback and no bind."""
    first, second = guest, start()
    first.check("import socket; s = socket.create_server(('127.0.0.1', 4567))")
    first.check("a = socket.socket(socket.AF_UNIX); a.bind('\\0both'); a.listen()")
    first.check("open('/dev/shm/mine', 'w').write('x'); open('/tmp/mine', 'w').write('x')")
    text = second.check(
        """
        import os, socket
        for family, address in ((socket.AF_INET, ('127.0.0.1', 4567)), (socket.AF_UNIX, '\\0both')):
            try:
                socket.socket(family).connect(address)
                print('CONNECTED')
            except OSError as error:
                print(error.strerror)
        print(os.path.exists('/dev/shm/mine'), os.path.exists('/tmp/mine'))
        """
    )
    first.check(
        "import os; s.close(); a.close(); os.unlink('/dev/shm/mine'); os.unlink('/tmp/mine')"
    )
    assert text.splitlines() == ["Connection refused"] * 2 + ["False False"]


def test_terminal_injection(guest: LiveGuest) -> None:
    """CVE-2017-5226: characters pushed into a terminal, also through high bits of the request."""
    text = guest.check(
        """
        import ctypes, os, pty
        libc = ctypes.CDLL(None, use_errno=True)
        main, worker = pty.openpty()
        print(os.path.exists('/dev/tty'), os.ttyname(worker).startswith('/dev/pts/'))
        for request in (0x5412, 0x541C, 0x5412 | 1 << 32, 0x541C | 1 << 40):
            ctypes.set_errno(0)
            result = libc.syscall(
                {'x86_64': 16, 'aarch64': 29}[os.uname().machine],
                ctypes.c_long(worker), ctypes.c_ulong(request), b'x')
            print(result, ctypes.get_errno())
        try:
            os.open('/dev/tty', os.O_RDWR)
            print('TERMINAL')
        except OSError as error:
            print(error.strerror)
        os.close(main), os.close(worker)
        """
    )
    lines = text.splitlines()
    assert lines[1:5] == ["-1 1"] * 4
    assert lines[5] in ("No such device or address", "No such file or directory")


def test_nested_user_namespaces(guest: LiveGuest) -> None:
    """CVE-2021-41133, by every call that makes one."""
    text = guest.check(
        """
        import ctypes, os, platform
        libc = ctypes.CDLL(None, use_errno=True)
        numbers = {'x86_64': (272, 56, 435), 'aarch64': (97, 220, 435)}[platform.machine()]
        unshare, clone, clone3 = numbers
        for space in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x02000000):
            print('unshare', libc.syscall(unshare, space), ctypes.get_errno())
            result = libc.syscall(clone, space | 17, 0, 0, 0, 0)
            if result == 0:
                os._exit(0)
            print('clone', result, ctypes.get_errno())
        print('clone3', libc.syscall(clone3, 0, 0), ctypes.get_errno())
        """
    )
    lines = text.splitlines()
    assert set(lines[:-1]) == {"unshare -1 1", "clone -1 1"}
    assert lines[-1] == "clone3 -1 38"


def test_mounting(guest: LiveGuest) -> None:
    text = guest.check(
        """
        import ctypes
        libc = ctypes.CDLL(None, use_errno=True)
        for call in (lambda: libc.mount(b't', b'/workspace', b'tmpfs', 0, None),
                     lambda: libc.mount(b'none', b'/usr', None, 0x1000 | 0x20, None),
                     lambda: libc.umount2(b'/dev', 2), lambda: libc.chroot(b'/workspace')):
            print(call(), ctypes.get_errno())
        """
    )
    assert set(text.splitlines()) == {"-1 1"}


def test_setuid_gains_nothing(guest: LiveGuest) -> None:
    result = guest.run("import os; os.setuid(0)")
    assert result.ename in ("PermissionError", "OSError")
    text = guest.check(
        """
        import os, shutil, subprocess
        shutil.copy('/usr/bin/id', '/workspace/id'); os.chmod('/workspace/id', 0o6755)
        print(subprocess.run(['/workspace/id', '-u'], capture_output=True, text=True).stdout)
        """
    )
    assert text == "10001"


def test_device_nodes(guest: LiveGuest) -> None:
    result = guest.run("import os, stat; os.mknod('/workspace/d', stat.S_IFBLK | 0o600, 0x801)")
    assert result.ename == "PermissionError"


def test_other_processes_memory(guest: LiveGuest) -> None:
    text = guest.check(
        """
        import os
        for path in ('/proc/1/environ', '/proc/kcore', '/proc/kmsg', '/dev/mem',
                     '/proc/sysrq-trigger'):
            try:
                with open(path, 'rb+' if 'sysrq' in path else 'rb') as file:
                    print(path, 'READ', len(file.read(1)))
            except OSError as error:
                print(path, 'refused')
        """
    )
    # What may be read must hold nothing: process 1 is bubblewrap and the same user's, and a microVM
    # shows an empty file in place of its kernel's memory.
    empty = ("/proc/1/environ READ 0", *(() if guest.seen else ("/proc/kcore READ 0",)))
    for line in text.splitlines():
        assert line.endswith("refused") or line in empty


def test_process_1_cannot_be_killed(guest: LiveGuest) -> None:
    text = guest.check(
        """
        import os
        for number in (9, 15, 19):
            try:
                os.kill(1, number)
            except PermissionError:
                print('refused')
        """
    )
    # In a microVM it is root's.
    assert text.split() == ([] if guest.seen else ["refused"] * 3)
    assert guest.check("print('alive')") == "alive"


def test_source_swapped_for_a_link_is_refused(engine: str, tmp_path: Path) -> None:
    """CVE-2024-42472: what was checked is not what is mounted."""
    from kernel_provisioner.errors import StartFailed

    link = tmp_path / "data"
    link.symlink_to("/etc")
    live = LiveGuest(engine, sources=(SourceMount("data", link),))
    try:
        with pytest.raises(StartFailed, match="without following links"):
            live.start()
    finally:
        live.close()
