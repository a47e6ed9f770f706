"""Profiles: spec D's table, what is malformed, and admission (spec D1)."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_provisioner import profiles
from kernel_provisioner.errors import EXIT_USAGE, ProfileRefused
from kernel_provisioner.profiles import BUILTIN, MIB, HostCapacity, admit, with_deadlines

TABLE = {
    "analysis": (2048, 2, 512, 128, 256, 120, 900, 40, "cancel"),
    "large": (4096, 3, 1024, 128, 512, 300, 1800, 40, "cancel"),
    "benchmark": (768, 1, 128, 64, 128, 120, 120, 1, "cancel"),
    "interactive": (2048, 2, 512, 128, 256, 120, 28800, None, "interrupt"),
}


def test_builtin_profiles_are_the_table_of_the_contract() -> None:
    table = {
        name: (
            p.ram_bytes // MIB,
            p.cpus,
            p.workspace_bytes // MIB,
            p.artifacts_bytes // MIB,
            p.temp_bytes // MIB,
            p.cell_deadline_s,
            p.run_deadline_s,
            p.cells,
            p.on_cell_deadline,
        )
        for name, p in BUILTIN.items()
    }
    assert table == TABLE
    assert {(p.tasks, p.open_files, p.grace_s) for p in BUILTIN.values()} == {(128, 1024, 5.0)}


@pytest.mark.parametrize("profile", BUILTIN.values(), ids=str)
def test_builtin_profiles_are_sound(profile: profiles.Profile) -> None:
    assert profiles.problem(profile) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cpus", 0),
        ("cpus", 1.5),
        ("cpus", True),
        ("ram_bytes", 512 * MIB),
        ("ram_bytes", -1),
        ("workspace_bytes", 0),
        ("temp_bytes", -1),
        ("cells", 0),
        ("tasks", 0),
        ("cell_deadline_s", 0),
        ("cell_deadline_s", math.nan),
        ("cell_deadline_s", 901.0),
        ("run_deadline_s", math.inf),
        ("run_deadline_s", 10**400),
        ("run_deadline_s", "900"),
        ("grace_s", -0.1),
        ("on_cell_deadline", "ignore"),
    ],
)
def test_malformed_field_is_named(field: str, value: object) -> None:
    broken = replace(BUILTIN["analysis"], **{field: value})
    with pytest.raises(ProfileRefused, match=f"'analysis': {field} is"):
        profiles.check(broken)


def test_grace_may_be_zero() -> None:
    profiles.check(replace(BUILTIN["analysis"], grace_s=0.0))


def test_full_mounts_must_leave_room_for_the_kernel() -> None:
    base = BUILTIN["analysis"]
    least = base.mounts_bytes + profiles.KERNEL_RESERVE_BYTES
    profiles.check(replace(base, ram_bytes=least))
    with pytest.raises(ProfileRefused, match="full mounts take 1152 MiB"):
        profiles.check(replace(base, ram_bytes=least - 1))


def test_admission_is_85_percent_to_the_byte() -> None:
    profile = BUILTIN["benchmark"]
    enough = math.ceil(profile.ram_bytes / 0.85)
    admit(profile, HostCapacity(1, enough))
    with pytest.raises(ProfileRefused):
        admit(profile, HostCapacity(1, enough - 2))


def test_refused_admission_gives_figures_and_what_fits() -> None:
    with pytest.raises(ProfileRefused) as refused:
        admit(BUILTIN["large"], HostCapacity(2, 4096 * MIB))
    text = str(refused.value)
    for figure in ("3 CPUs", "may use 2", "4096 MiB of RAM", "3482 MiB", "85% of 4096 MiB"):
        assert figure in text
    assert "analysis, benchmark, interactive" in refused.value.remedy
    assert refused.value.exit_status == EXIT_USAGE


def test_refused_admission_where_nothing_fits() -> None:
    with pytest.raises(ProfileRefused, match="no built-in profile fits"):
        admit(BUILTIN["benchmark"], HostCapacity(1, 256 * MIB))


@given(cpus=st.integers(1, 8), ram=st.integers(0, 8192 * MIB))
def test_admission_never_exceeds_the_host(cpus: int, ram: int) -> None:
    host = HostCapacity(cpus, ram)
    for profile in BUILTIN.values():
        try:
            admit(profile, host)
        except ProfileRefused:
            continue
        assert profile.cpus <= cpus
        assert profile.ram_bytes <= 0.85 * ram


def test_deadlines() -> None:
    base = BUILTIN["analysis"]
    both = with_deadlines(base, cell_s=10, run_s=20)
    assert (both.cell_deadline_s, both.run_deadline_s) == (10, 20)
    shorter = with_deadlines(base, run_s=60)
    assert (shorter.cell_deadline_s, shorter.run_deadline_s) == (60, 60)
    assert with_deadlines(base) == base
    with pytest.raises(ProfileRefused, match="1000 s is over the run deadline of 900 s"):
        with_deadlines(base, cell_s=1000)


@pytest.mark.parametrize("given_", [{"cell_s": 30.0}, {"run_s": 30.0}, {"cell_s": 30, "run_s": 30}])
def test_benchmark_has_one_value_for_both(given_: dict[str, float]) -> None:
    profile = with_deadlines(BUILTIN["benchmark"], **given_)
    assert (profile.cell_deadline_s, profile.run_deadline_s) == (30, 30)


def test_benchmark_refuses_two_values() -> None:
    with pytest.raises(ProfileRefused, match="30 s and 60 s were given"):
        with_deadlines(BUILTIN["benchmark"], cell_s=30, run_s=60)


V1 = "5:pids:/\n4:memory:/a/b\n0::/\n"
V1_MOUNTS = (
    "30 20 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "31 20 0:27 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n"
)
V2 = "0::/user.slice/x\n"
V2_MOUNTS = "30 20 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("membership", "mounts", "files", "limit"),
    [
        (V1, V1_MOUNTS, {"memory/a/b/memory.limit_in_bytes": "300\n"}, 300),
        (V1, V1_MOUNTS, {"memory/a/memory.limit_in_bytes": "200"}, 200),
        (
            V1,
            V1_MOUNTS,
            {"memory/memory.limit_in_bytes": "900", "memory/a/b/memory.limit_in_bytes": "800"},
            800,
        ),
        (V2, V2_MOUNTS, {"user.slice/x/memory.max": "max", "user.slice/memory.max": "70"}, 70),
        (V2, V2_MOUNTS, {"user.slice/x/memory.max": "max"}, None),
        # A container without a cgroup namespace: the mount shows only its own group as root.
        (
            "0::/docker/abc/in\n",
            V2_MOUNTS.replace(" / ", " /docker/abc "),
            {"in/memory.max": "5"},
            5,
        ),
        # Moved out of the namespace: only the mount's root can be read.
        ("0::/../other\n", V2_MOUNTS, {"memory.max": "9"}, 9),
        ("", "", {}, None),
        ("garbage\n", "1 2 3 - x\n", {}, None),
    ],
)
def test_own_cgroup_limit(
    membership: str, mounts: str, files: dict[str, str], limit: int | None
) -> None:
    """snekbox#83: a guest is admitted within the limit of the group that we run in ourselves."""

    def read(path: Path) -> str:
        return files.get(str(path.relative_to("/sys/fs/cgroup")), "")

    assert profiles.cgroup_memory_limit(membership, mounts, read) == limit


def test_host_capacity_is_this_process_s() -> None:
    mask = os.sched_getaffinity(0)
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    try:
        os.sched_setaffinity(0, {min(mask)})
        host = profiles.host_capacity()
    finally:
        os.sched_setaffinity(0, mask)
    assert host.cpus == 1
    assert 0 < host.ram_bytes <= total
