"""Any fact that is not as asked stops the start; the facts are those of a real guest's shape."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kernel_provisioner.engines.bwrap import attestation
from kernel_provisioner.engines.bwrap.command import ETC, environment, rlimits, tmpfs_mounts
from kernel_provisioner.profiles import BUILTIN

PROFILE = BUILTIN["analysis"]
READ_ONLY = frozenset({"/usr", "/etc/fonts", "/opt/backintel/guest", "/sources/data"})
OWN = {"user": "user:[1]", "net": "net:[2]"}


def facts() -> dict[str, Any]:
    """What a right guest says."""
    read_only = ["/", "/dev", *READ_ONLY, *(f"/etc/{name}" for name in ETC), "/proc/sys"]
    writable = ["/proc", "/dev/pts", "/dev/null"]
    return {
        "uid": [10001] * 4,
        "gid": [10001] * 4,
        "groups": [],
        "no_new_privs": 1,
        "seccomp_mode": 2,
        "seccomp_filters": 1,
        "capabilities": dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), 0),
        "rlimits": {name: [value, value] for name, value in rlimits(PROFILE).items()},
        "interfaces": {"lo": 0x49},
        "mounts": [[path, "ext4", "ro,nosuid,nodev"] for path in read_only]
        + [[path, "x", "rw,nosuid"] for path in writable]
        + [[path, "tmpfs", "rw,nosuid,nodev"] for path in tmpfs_mounts(PROFILE)],
        "tmpfs": {
            path: {"bytes": size, "free_bytes": size, "mode": mode, "uid": 10001}
            for path, (size, mode) in tmpfs_mounts(PROFILE).items()
        },
        "hostname": "backintel",
        "pid": 2,
        "ppid": 1,
        "session": 1,
        "group": 2,
        "cwd": "/workspace",
        "umask": 0o22,
        "terminal": False,
        "namespaces": {"user": "user:[9]", "net": "net:[8]"},
        "fds": {"0": "/dev/null", "1": "pipe", "2": "pipe", "9": "pipe"}
        | {str(fd): "socket" for fd in range(3, 9)},
        "environment": [*environment("s1", PROFILE), "PWD"],
        "python": "3.11.2",
        "machine": "x86_64",
    }


def judge(found: dict[str, Any], *, groups_dropped: bool = True) -> list[str]:
    return attestation.deviations(
        found, "s1", PROFILE, READ_ONLY, OWN, groups_dropped=groups_dropped
    )


def test_right_facts_pass() -> None:
    assert judge(facts()) == []


def mount(path: str, options: str) -> list[str]:
    return [path, "tmpfs", options]


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("uid",), [0] * 4, "uid"),
        (("uid", 1), 0, "uid"),
        (("gid", 3), 0, "gid"),
        (("groups",), [4], "groups"),
        (("no_new_privs",), 0, "no_new_privs"),
        (("seccomp_mode",), 0, "seccomp"),
        (("capabilities", "CapBnd"), 0x1FF, "capabilities"),
        (("capabilities", "CapEff"), 1, "capabilities"),
        (("rlimits", "nproc"), [4096, 4096], "nproc"),
        (("rlimits", "nofile"), [1024, 1 << 20], "nofile"),
        (("rlimits", "core"), [-1, -1], "core"),
        (("interfaces",), {"lo": 0x49, "eth0": 0x1}, "network"),
        (("interfaces",), {}, "network"),
        (("interfaces", "lo"), 0x1, "loopback"),
        (("hostname",), "the-host", "host name"),
        (("ppid",), 0, "parent"),
        (("group",), 1, "group"),
        (("cwd",), "/", "directory"),
        (("terminal",), True, "terminal"),
        (("namespaces", "net"), "net:[2]", "net namespace"),
        (("fds", "10"), "/etc/passwd", "descriptors"),
        (("fds", "10"), "pipe", "descriptors"),
        (("fds", "10"), "socket", "sockets"),
        (("fds", "0"), "/dev/pts/0", "standard input"),
        (("fds", "2"), "/dev/pts/0", "standard error"),
        (("tmpfs", "/workspace", "bytes"), 1 << 40, "/workspace"),
        (("tmpfs", "/dev/shm", "bytes"), 1 << 20, "/dev/shm"),
        (("tmpfs", "/tmp", "mode"), 0o777, "/tmp"),
        (("tmpfs", "/artifacts", "uid"), 0, "/artifacts"),
    ],
)
def test_wrong_fact_is_named(path: tuple[Any, ...], value: Any, named: str) -> None:
    found = facts()
    place = found
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    problems = judge(found)
    assert problems
    assert any(named in problem for problem in problems)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (mount("/usr", "rw,nosuid"), "/usr is writable"),
        (mount("/", "rw,nosuid"), "/ is writable"),
        (mount("/dev", "rw,nosuid"), "/dev is writable"),
        (mount("/sources/data", "rw,nosuid"), "/sources/data is writable"),
        (mount("/usr/lib/inner", "rw,nosuid"), "/usr/lib/inner is writable"),
        (mount("/anything", "ro,relatime"), "honours set-user-id"),
        (["/workspace", "ext4", "rw,nosuid"], "file system of /workspace"),
        (mount("/workspace", "ro,nosuid"), "/workspace is not writable"),
    ],
)
def test_wrong_mount_is_named(extra: list[str], named: str) -> None:
    found = facts()
    found["mounts"].append(extra)
    assert any(named in problem for problem in judge(found))


@pytest.mark.parametrize("path", [*sorted(READ_ONLY), "/", "/dev", "/etc/passwd", "/workspace"])
def test_missing_mount_is_named(path: str) -> None:
    found = facts()
    found["mounts"] = [entry for entry in found["mounts"] if entry[0] != path]
    assert f"nothing is mounted on {path}" in judge(found)


@pytest.mark.parametrize("name", sorted(facts()))
def test_missing_fact_is_a_deviation(name: str) -> None:
    found = facts()
    del found[name]
    unused = {"seccomp_filters", "session", "umask", "python", "machine"}
    assert bool(judge(found)) is (name not in unused)


@pytest.mark.parametrize("name", sorted(facts()))
@pytest.mark.parametrize("junk", [None, "x", 7, [], {}, [[]], {"a": {}}], ids=str)
def test_junk_never_raises(name: str, junk: Any) -> None:
    found = copy.deepcopy(facts())
    found[name] = junk
    assert isinstance(judge(found), list)


def test_variable_of_the_host_is_named() -> None:
    found = facts()
    found["environment"].append("AWS_SECRET_ACCESS_KEY")
    assert any("AWS_SECRET_ACCESS_KEY" in problem for problem in judge(found))


def test_lower_limits_of_the_host_are_accepted() -> None:
    found = facts()
    found["rlimits"]["memlock"] = [65536, 65536]
    assert judge(found) == []


def test_overflow_groups_of_a_user_are_recorded_not_fatal() -> None:
    found = facts()
    found["groups"] = [65534, 65534, 10001]
    assert judge(found, groups_dropped=False) == []
    assert "3 supplementary" in attestation.recorded(found)[0]
    assert judge(found, groups_dropped=True)
    found["groups"] = [27]
    assert judge(found, groups_dropped=False)


def test_nothing_to_record_without_groups() -> None:
    assert attestation.recorded(facts()) == []
