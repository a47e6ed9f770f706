"""Each fact of spec D3, seen from user code and from the host, not from what was asked."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from live_guest import MIB, PROFILE, LiveGuest, Starter, as_root, small

pytestmark = pytest.mark.sandbox


def test_identity_is_10001_without_groups(guest: LiveGuest) -> None:
    text = guest.check("import os; print(os.getresuid(), os.getresgid(), os.getgroups())")
    groups = r"\[\]" if as_root() else r"\[(65534|10001|, )*\]"
    ids = r"\(10001, 10001, 10001\)"
    assert re.fullmatch(f"{ids} {ids} {groups}", text)


def test_host_sees_no_privileged_process(guest: LiveGuest) -> None:
    # Of a microVM the host sees the monitor, which as root has a user of its own.
    inside = guest.guest.limits.get("monitor_uid", 10001)
    wanted = str(inside if as_root() else os.getuid())
    seen = guest.processes()
    assert len(seen) >= 2
    for pid in seen:
        status = Path(f"/proc/{pid}/status").read_text()
        assert re.search(r"^Uid:\t(.*)$", status, re.M)[1].split() == [wanted] * 4
        assert re.search(r"^NoNewPrivs:\t1$", status, re.M)


@pytest.mark.parametrize("name", ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"])
def test_capability_set_is_empty(guest: LiveGuest, name: str) -> None:
    text = guest.check(f"print([l for l in open('/proc/self/status') if l.startswith('{name}')])")
    assert "0000000000000000" in text


def test_no_new_privs_and_seccomp(guest: LiveGuest) -> None:
    text = guest.check("print(open('/proc/self/status').read())")
    assert "NoNewPrivs:\t1" in text
    assert "Seccomp:\t2" in text


def test_rlimits(guest: LiveGuest) -> None:
    text = guest.check(
        """
        import json, resource as r
        print(json.dumps([r.getrlimit(n) for n in (
            r.RLIMIT_NPROC, r.RLIMIT_NOFILE, r.RLIMIT_CORE, r.RLIMIT_MSGQUEUE, r.RLIMIT_RTPRIO)]))
        """
    )
    tasks, files = PROFILE.tasks, PROFILE.open_files
    assert json.loads(text) == [[tasks] * 2, [files] * 2, [0, 0], [0, 0], [0, 0]]


def test_a_small_profile_has_no_more_memory_than_it_says(start: Starter) -> None:
    """libkrun gives a machine a little more than it was asked for."""
    sizes = dict.fromkeys(("workspace_bytes", "artifacts_bytes", "temp_bytes"), 16 * MIB)
    live = start(profile=small(ram_bytes=320 * MIB, **sizes))
    assert live.check("print(6 * 7)") == "42"
    limit = live.guest.limits["memory_bytes" if live.seen else "guest_memory_bytes"]
    assert isinstance(limit, int)
    assert 0.85 * 320 * MIB <= limit <= 320 * MIB


def test_limits_cannot_be_raised(guest: LiveGuest) -> None:
    result = guest.run("import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (2048, 2048))")
    assert result.ename in ("ValueError", "PermissionError")


def test_working_directory_and_state_are_private(guest: LiveGuest) -> None:
    text = guest.check(
        """
        import os
        print(os.getcwd())
        for name in ('HOME', 'TMPDIR', 'XDG_CONFIG_HOME', 'XDG_CACHE_HOME', 'XDG_DATA_HOME',
                     'XDG_STATE_HOME', 'XDG_RUNTIME_DIR', 'IPYTHONDIR', 'MPLCONFIGDIR'):
            path = os.environ[name]
            print(oct(os.stat(path).st_mode & 0o7777), path.startswith('/tmp/private/'))
            open(path + '/probe', 'w').close()
        """
    )
    lines = text.splitlines()
    assert lines[0] == "/workspace"
    assert lines[1:] == ["0o700 True"] * 9


def test_files_persist_between_cells(guest: LiveGuest) -> None:
    guest.check("open('kept.txt', 'w').write('kept')")
    assert guest.check("print(open('/workspace/kept.txt').read())") == "kept"


def test_bytecode_and_user_site_are_off(guest: LiveGuest) -> None:
    text = guest.check("import sys, site; print(sys.dont_write_bytecode, site.ENABLE_USER_SITE)")
    assert text == "True False"
    text = guest.check(
        """
        import subprocess, sys
        code = 'import sys, site; print(sys.dont_write_bytecode, site.ENABLE_USER_SITE)'
        print(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout)
        """
    )
    assert text == "True False"


def test_main_module_is_the_users_alone(guest: LiveGuest) -> None:
    text = guest.check(
        """
        import sys
        print(sorted(n for n in ('attest', 'kernel', 'limits', 'wire', 'init') if n in sys.modules))
        print(hasattr(sys.modules['__main__'], 'close_strays'), sys.argv, '' in sys.path)
        print('/opt/backintel/guest' in sys.path, '/opt/backintel/guest/site' in sys.path)
        """
    )
    assert text.splitlines() == ["[]", "False ['/opt/backintel/guest/init.py'] True", "False True"]


def test_subprocess_inherits_no_descriptor(guest: LiveGuest) -> None:
    text = guest.check(
        """
        import subprocess
        print(subprocess.run(['ls', '-l', '/proc/self/fd'], capture_output=True, text=True).stdout)
        """
    )
    kinds = [line.split(" -> ")[1] for line in text.splitlines() if " -> " in line]
    assert [kind for kind in kinds if "socket" in kind] == []
    # 0, 1, 2 and the listing itself.
    assert len(kinds) == 4


def test_descriptors_of_the_kernel_lead_nowhere(guest: LiveGuest) -> None:
    text = guest.check(
        """
        import os
        for name in os.listdir('/proc/self/fd'):
            try:
                print(os.readlink('/proc/self/fd/' + name))
            except OSError:
                pass
        """
    )
    allowed = re.compile(
        r"socket:\[\d+\]|pipe:\[\d+\]|anon_inode:\[?(eventpoll|eventfd)\]?|/dev/null"
        r"|/dev/urandom|/proc/\d+/fd|/tmp/private/.*"
    )
    assert [line for line in text.splitlines() if not allowed.fullmatch(line)] == []


def test_namespaces_are_its_own(guest: LiveGuest) -> None:
    text = guest.check(
        """
        import os, json
        names = ('user', 'mnt', 'pid', 'net', 'ipc', 'uts', 'cgroup')
        print(json.dumps({n: os.readlink('/proc/self/ns/' + n) for n in names}))
        """
    )
    for name, identity in json.loads(text).items():
        # A microVM's kernel is its own, with one namespace of users; the first of each kind have
        # the same numbers in every kernel.
        if guest.seen or name != "user":
            assert identity != os.readlink(f"/proc/self/ns/{name}")


def test_only_its_own_processes_are_seen(guest: LiveGuest) -> None:
    text = guest.check("import os; print(sorted(p for p in os.listdir('/proc') if p.isdigit()))")
    assert text == "['1', '2']"


def test_host_name_and_cgroups_tell_nothing(guest: LiveGuest) -> None:
    text = guest.check("import socket; print(socket.gethostname())")
    assert text == "backintel"
    text = guest.check("print({l.strip().split(':')[2] for l in open('/proc/self/cgroup')})")
    assert text == "{'/'}"
    assert guest.check("import os; print(os.path.exists('/sys/fs/cgroup'))") == "False"


def test_environment_is_only_ours(start: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary-in-the-host")
    monkeypatch.setenv("PYTHONSTARTUP", "/etc/hostname")
    monkeypatch.setenv("LD_PRELOAD", "")
    live = start(environment={"STORE_PASSWORD": "canary-for-the-guest"})
    assert "STORE_PASSWORD" not in live.facts["environment"]
    text = live.check("import os; print(sorted(os.environ.items()))")
    assert "canary-in-the-host" not in text
    assert "PYTHONSTARTUP" not in text
    assert "('STORE_PASSWORD', 'canary-for-the-guest')" in text
    for pid in live.processes():
        for name in ("cmdline", "environ"):
            assert b"canary" not in Path(f"/proc/{pid}/{name}").read_bytes()
            assert live.key.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()


def test_host_files_are_absent(guest: LiveGuest) -> None:
    checkout = str(Path(__file__).resolve().parents[2])
    text = guest.check(
        f"""
        import os
        paths = ['/etc/shadow', '/root', '/home', '/oldroot', '/var/run/docker.sock', {checkout!r},
                 {str(guest.directory)!r}, '/run/backintel', '/proc/1/root/oldroot']
        print([p for p in paths if os.path.exists(p)], sorted(os.listdir('/run')))
        print(open('/etc/passwd').read())
        """
    )
    assert text.splitlines()[0] == "[] []"
    assert text.splitlines()[1:] == ["kernel:x:10001:10001::/tmp/private/home:/bin/bash"]


def test_limits_are_recorded_as_read_back(guest: LiveGuest) -> None:
    limits = guest.guest.limits
    if not guest.seen:
        # The guest's kernel keeps some of the machine's memory for itself.
        assert 0.85 * PROFILE.ram_bytes <= limits["guest_memory_bytes"] <= PROFILE.ram_bytes
        assert limits["guest_cpus"] == PROFILE.cpus
        assert limits["open_files"] >= 16384
        assert limits["monitor_uid"] != 0
        return
    assert limits["memory_bytes"] == PROFILE.ram_bytes
    assert limits["cpus"] == PROFILE.cpus
    assert limits["tasks"] == PROFILE.tasks + 2
    assert bool(limits["deviations"]) is bool(not as_root() and os.getgroups())


def test_plan_named_the_cgroups_before(guest: LiveGuest) -> None:
    assert set(guest.plan.cgroups) == set(guest.guest.leftovers.cgroups)
    assert len(guest.guest.leftovers.processes) >= 2
