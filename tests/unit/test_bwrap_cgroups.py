"""Which cgroup is chosen, and that a value the kernel did not take stops the start."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from unprivileged import as_user

from kernel_provisioner.engines.bwrap import cgroups, scope
from kernel_provisioner.engines.bwrap.cgroups import Caps, HostView, V1Group, V2Group
from kernel_provisioner.engines.leftovers import remove_cgroup
from kernel_provisioner.errors import HostRefused
from kernel_provisioner.profiles import BUILTIN

CAPS = Caps(memory_bytes=1 << 30, cpus=2, tasks=130)
NAME = "backintel-s1"


def no_scope(view: HostView, name: str) -> str:
    return "no systemd manager runs for this user"


def v2(root: Path, own: str, *, swaps: str = "Filename\n") -> HostView:
    """A host with cgroup v2 at ``root``, this process in ``own``."""
    return HostView(
        own=f"0::{own}\n",
        mountinfo=f"30 25 0:26 / {root} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n",
        swaps=swaps,
    )


def fake_v2(directory: Path, handed_out: str, *, real_root: bool = False) -> Path:
    """Make the files of one cgroup v2 directory that choosing looks at."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "cgroup.subtree_control").write_text(handed_out + "\n")
    (directory / "cgroup.controllers").write_text("cpu memory pids\n")
    (directory / "cgroup.procs").write_text("")
    if not real_root:
        (directory / "cgroup.type").write_text("domain\n")
    return directory


def test_delegated_v2_beside_our_leaf(tmp_path: Path) -> None:
    fake_v2(tmp_path, "cpu memory pids", real_root=True)
    base = fake_v2(tmp_path / "user.slice/ours", "cpu memory pids")
    fake_v2(base / "leaf", "")
    found = cgroups.choose("s1", v2(tmp_path, "/user.slice/ours/leaf"), no_scope)
    assert found == V2Group(base / NAME)


def test_our_own_populated_group_is_never_the_base(tmp_path: Path) -> None:
    fake_v2(tmp_path, "", real_root=True)
    fake_v2(tmp_path / "ours", "cpu memory pids")
    reason = cgroups.choose_v2(v2(tmp_path, "/ours"), NAME)
    assert isinstance(reason, str)


@pytest.mark.parametrize("handed_out", ["", "memory pids", "cpu memory", "cpu pids"])
def test_missing_controller_is_not_accepted(tmp_path: Path, handed_out: str) -> None:
    fake_v2(tmp_path, handed_out, real_root=True)
    fake_v2(tmp_path / "leaf", "")
    assert isinstance(cgroups.choose_v2(v2(tmp_path, "/leaf"), NAME), str)


def test_unwritable_parent_is_not_accepted() -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        base = fake_v2(root / "base", "cpu memory pids")
        fake_v2(base / "leaf", "")
        view = v2(root, "/base/leaf")
        for path in (root, base):
            path.chmod(0o777)
        (base / "cgroup.procs").chmod(0o666)
        assert isinstance(as_user(lambda: cgroups.choose_v2(view, NAME)), V2Group)
        base.chmod(0o755 if os.geteuid() == 0 else 0o555)
        assert isinstance(as_user(lambda: cgroups.choose_v2(view, NAME)), str)
        base.chmod(0o777)


def v1(root: Path, own: str = "/me", *, leave_out: str = "") -> HostView:
    """A host with cgroup v1 controllers below ``root``; cpu and cpuacct share a mount."""
    lines, mounts = [], []
    for number, names in enumerate(("memory", "cpu,cpuacct", "pids"), start=2):
        if leave_out and leave_out in names.split(","):
            continue
        (root / names / own.strip("/")).mkdir(parents=True, exist_ok=True)
        lines.append(f"{number}:{names}:{own}")
        mounts.append(f"3{number} 25 0:3{number} / {root / names} rw - cgroup cgroup rw,{names}")
    return HostView("\n".join(lines) + "\n", "\n".join(mounts) + "\n", "Filename\n")


def test_v1_directories_beneath_our_own(tmp_path: Path) -> None:
    found = cgroups.choose("s1", v1(tmp_path), no_scope)
    assert isinstance(found, V1Group)
    assert found.by_controller["memory"] == tmp_path / "memory/me" / NAME
    assert found.by_controller["cpu"] == found.by_controller["cpuacct"]
    assert len(found.paths) == 3


def test_v1_mount_of_a_subtree(tmp_path: Path) -> None:
    """In a container the mount's root is not the hierarchy's."""
    view = v1(tmp_path)
    inner = HostView(
        view.own.replace(":/me", ":/docker/x/me"),
        view.mountinfo.replace(" / /", " /docker/x /"),
        view.swaps,
    )
    assert inner.own_path("memory") == tmp_path / "memory/me"


@pytest.mark.parametrize("controller", ["memory", "cpu", "pids"])
def test_refused_without_a_controller(tmp_path: Path, controller: str) -> None:
    with pytest.raises(HostRefused) as caught:
        cgroups.choose("s1", v1(tmp_path, leave_out=controller), no_scope)
    assert controller in caught.value.message
    assert "no systemd manager" in caught.value.message
    assert caught.value.remedy


def test_nothing_at_all_is_refused() -> None:
    with pytest.raises(HostRefused, match="no memory, CPU and task limit"):
        cgroups.choose("s1", HostView("", "", ""), no_scope)


def test_scope_is_preferred_to_v1(tmp_path: Path) -> None:
    offered = V2Group(tmp_path / "scope")
    assert cgroups.choose("s1", v1(tmp_path), lambda view, name: offered) == offered


def test_swap_that_cannot_be_bounded_is_refused(tmp_path: Path) -> None:
    """On a plain directory every file can be made, but memory.memsw cannot be expected."""
    view = v1(tmp_path)
    swapping = HostView(view.own, view.mountinfo, "Filename\n/dev/sda2 partition 1 0 -2\n")
    group = cgroups.choose("s1", swapping, no_scope)
    with pytest.raises(HostRefused, match="has swap"):
        group.create(CAPS)


def test_v1_values_are_written_and_read_back(tmp_path: Path) -> None:
    group = cgroups.choose("s1", v1(tmp_path), no_scope)
    group.create(CAPS)
    limits = group.limits()
    assert limits["memory_bytes"] == CAPS.memory_bytes
    assert limits["cpus"] == 2.0
    assert limits["tasks"] == 130


def test_value_that_reads_back_differently_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "memory.max"
    file.write_text("max\n")
    with pytest.raises(HostRefused, match=r"holds max, not the 5 asked for"):
        cgroups.confirm(file, 5)


def test_existing_directory_of_that_name_is_refused(tmp_path: Path) -> None:
    group = V2Group(tmp_path / NAME)
    (tmp_path / NAME).mkdir()
    with pytest.raises(HostRefused, match="cannot be made"):
        group.create(CAPS)


def test_remove_touches_only_our_names(tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    assert remove_cgroup(stranger, 0.0) is False
    assert stranger.is_dir()
    ours = tmp_path / NAME
    ours.mkdir()
    assert remove_cgroup(ours, 0.0) is True
    assert remove_cgroup(ours, 0.0) is True
    assert not ours.exists()


def test_remove_that_fails_is_reported(tmp_path: Path) -> None:
    ours = tmp_path / NAME
    (ours / "busy").mkdir(parents=True)
    assert remove_cgroup(ours, 0.0) is False
    (ours / "busy").rmdir()
    assert remove_cgroup(ours, 0.0) is True


def test_caps_of_a_profile_leave_room_for_bubblewrap() -> None:
    profile = BUILTIN["analysis"]
    assert Caps.of(profile) == Caps(profile.ram_bytes, profile.cpus, profile.tasks + 2)


def test_scope_needs_the_controllers(tmp_path: Path) -> None:
    fake_v2(tmp_path, "", real_root=True)
    (tmp_path / "cgroup.controllers").write_text("hugetlb\n")
    found = scope.choose_scope(v2(tmp_path, "/"), NAME)
    assert isinstance(found, str)


def test_scope_call_states_every_limit() -> None:
    words = scope.bus_call("/usr/bin/busctl", 1000, f"{NAME}.scope", 77, CAPS, oom=True)
    assert words[1] == "--user"
    start = words.index("ssa(sv)a(sa(sv))") + 1
    assert words[start : start + 3] == [f"{NAME}.scope", "fail", "7"]
    rest = words[start + 3 :]
    assert rest[:4] == ["PIDs", "au", "1", "77"]
    triples = [tuple(rest[i : i + 3]) for i in range(4, len(rest) - 1, 3)]
    assert ("MemoryMax", "t", str(1 << 30)) in triples
    assert ("MemorySwapMax", "t", "0") in triples
    assert ("TasksMax", "t", "130") in triples
    assert ("CPUQuotaPerSecUSec", "t", "2000000") in triples
    assert rest[-1] == "0"
    assert len(triples) + 1 == int(words[start + 2])


@pytest.mark.parametrize(
    ("stat", "dropped"),
    [
        ("file 900\nshmem 300\nactive_file 100\ninactive_file 500\n", 600),
        # Memory given back lazily and taken again is on the list, and no file's.
        ("file 300\nshmem 300\nactive_file 0\ninactive_file 500\n", 0),
        # Locked pages are files', and not on the list.
        ("file 900\nshmem 0\nactive_file 100\ninactive_file 0\n", 100),
        # The counters are not of one moment.
        ("file 299\nshmem 300\nactive_file 1\ninactive_file 0\n", 0),
    ],
)
def test_only_pages_that_can_be_dropped_count_as_files(
    tmp_path: Path, stat: str, dropped: int
) -> None:
    for name, text in {"memory.current": "1000", "memory.stat": stat, "pids.current": "1"}.items():
        (tmp_path / name).write_text(text)
    for name in ("cpu.stat", "memory.events"):
        (tmp_path / name).touch()
    assert V2Group(tmp_path).usage().file_bytes == dropped
