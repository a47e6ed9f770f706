"""bubblewrap's arguments: the mount-point rule (CVE-2026-87766), limits and environment."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_provisioner.engines.base import CHANNELS, GuestSpec, SourceMount
from kernel_provisioner.engines.bwrap import command
from kernel_provisioner.engines.bwrap.command import Bind, Descriptors, Link
from kernel_provisioner.engines.bwrap.layout import layout
from kernel_provisioner.errors import StartFailed
from kernel_provisioner.profiles import BUILTIN, Profile

PROFILE = BUILTIN["analysis"]
FDS = Descriptors(
    seccomp=10,
    info=11,
    control=12,
    targets=13,
    listeners={name: 20 + number for number, name in enumerate(CHANNELS)},
    etc={name: 30 + number for number, name in enumerate(command.ETC)},
)


def image(root: Path) -> Path:
    """Make the skeleton of an image, as large as the rules need."""
    for name in ("usr/bin", "usr/lib", "var/lib", "docs", "etc/fonts", "etc/ssl", "proc", "tmp"):
        (root / name).mkdir(parents=True)
    for name in ("guest", "runtime", "cache"):
        (root / "opt/backintel" / name).mkdir(parents=True)
    for name in ("passwd", "group", "resolv.conf", "debian_version"):
        (root / "etc" / name).write_text("image's own\n")
    (root / "bin").symlink_to("usr/bin")
    (root / "etc/localtime").symlink_to("../usr/share/zoneinfo/UTC")
    return root


def options_for(tmp_path: Path) -> list[str]:
    spec = GuestSpec(
        session="s1",
        profile=PROFILE,
        image_root=image(tmp_path / "image"),
        guest_code=tmp_path / "guest",
        socket_dir=tmp_path,
        sources=(SourceMount("data", tmp_path / "d"), SourceMount("a b", tmp_path / "e")),
    )
    plan = layout(spec)
    binds = [Bind(item.target, path=f"/stage/{item.base}/{item.inside}") for item in plan.items]
    return command.arguments(spec.session, spec.profile, binds, plan.links, FDS)


def test_no_mount_point_lies_beneath_a_bind(tmp_path: Path) -> None:
    """The rule that closes CVE-2026-87766, asserted apart from the code that enforces it."""
    options = options_for(tmp_path)
    made = list(command.mount_points(options))
    leading = ("--ro-bind", "--ro-bind-fd", "--ro-bind-data", "--symlink")
    bound = [path for option, path in made if option in leading]
    assert len(bound) > 10
    for _, path in made:
        for other in bound:
            assert not path.startswith(f"{other}/")
    assert len(bound) == len(set(bound))


def test_every_bind_is_read_only(tmp_path: Path) -> None:
    options = options_for(tmp_path)
    assert not {"--bind", "--bind-try", "--dev-bind", "--bind-fd", "--bind-data"} & set(options)
    assert not {option for option in options if "overlay" in option}


def test_layout_of_the_image(tmp_path: Path) -> None:
    made = dict.fromkeys(path for _, path in command.mount_points(options_for(tmp_path)))
    for path in ("/usr", "/var", "/docs", "/etc/fonts", "/etc/debian_version"):
        assert path in made
    for path in ("/opt/backintel/cache", "/opt/backintel/guest", "/sources/data", "/sources/a b"):
        assert path in made
    assert "/opt/backintel/runtime" not in made
    assert "/bin" in made
    assert "/etc/localtime" in made
    assert "/etc" not in made


def test_our_own_etc_replaces_the_images(tmp_path: Path) -> None:
    options = options_for(tmp_path)
    for name, fd in FDS.etc.items():
        position = options.index(f"/etc/{name}")
        assert options[position - 4 : position] == ["--perms", "0644", "--ro-bind-data", str(fd)]
        assert options.count(f"/etc/{name}") == 1


def test_root_is_made_read_only_after_everything_else(tmp_path: Path) -> None:
    options = options_for(tmp_path)
    last = max(options.index(path) for _, path in command.mount_points(options))
    places = [i for i, option in enumerate(options) if option == "--remount-ro"]
    assert [options[i + 1] for i in places] == ["/dev", "/"]
    assert places[0] > last


@pytest.mark.parametrize(
    "option",
    [
        "--unshare-user",
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup",
        "--disable-userns",
        "--assert-userns-disabled",
        "--new-session",
        "--die-with-parent",
        "--clearenv",
    ],
)
def test_isolation_options(tmp_path: Path, option: str) -> None:
    assert option in options_for(tmp_path)


def test_sizes_of_the_writable_mounts(tmp_path: Path) -> None:
    options = options_for(tmp_path)
    found = {}
    for position, option in enumerate(options):
        if option == "--tmpfs":
            assert options[position - 4] == "--perms"
            assert options[position - 2] == "--size"
            found[options[position + 1]] = int(options[position - 1])
    assert found == {
        "/workspace": PROFILE.workspace_bytes,
        "/artifacts": PROFILE.artifacts_bytes,
        "/tmp": PROFILE.temp_bytes,
        "/dev/shm": PROFILE.temp_bytes,
    }


def test_environment_states_the_limits() -> None:
    values = command.environment("s1", PROFILE)
    assert values["OMP_NUM_THREADS"] == values["POLARS_MAX_THREADS"] == str(PROFILE.cpus)
    assert values["BACKINTEL_MEMORY_BYTES"] == str(PROFILE.ram_bytes)
    assert values["PATH"].startswith("/opt/backintel/guest/bin:")
    assert values["PYTHONNOUSERSITE"] == values["PYTHONDONTWRITEBYTECODE"] == "1"


def test_the_command_line_holds_no_environment_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", "canary-value")
    text = "\0".join(options_for(tmp_path) + command.guest_command(PROFILE, FDS))
    assert "canary" not in text.lower()


def test_guest_plan_is_json_with_the_descriptors() -> None:
    words = command.guest_command(PROFILE, FDS)
    assert words[:3] == ["/usr/bin/python3", "-X", "frozen_modules=off"]
    assert {"-I", "-B"} <= set(words)
    plan = json.loads(words[-1])
    assert plan["control"] == FDS.control
    assert plan["listeners"] == dict(FDS.listeners)
    assert plan["targets"] == FDS.targets
    assert plan["rlimits"]["nproc"] == PROFILE.tasks


@pytest.mark.parametrize(
    ("binds", "links"),
    [
        ([Bind("/usr", "/a"), Bind("/usr/lib", "/b")], []),
        ([Bind("/usr/lib", "/a"), Bind("/usr", "/b")], []),
        ([Bind("/etc", "/a")], []),
        ([Bind("/opt", "/a"), Bind("/opt/backintel/guest", "/b")], []),
        ([Bind("/workspace", "/a")], []),
        ([Bind("/", "/a")], []),
        ([Bind("/sources/x", "/a"), Bind("/sources/x", "/b")], []),
        ([], [Link("/etc", "/usr/etc")]),
        ([], [Link("/tmp", "/usr")]),
        ([Bind("/sources/../usr", "/a")], []),
        ([Bind("relative", "/a")], []),
        ([Bind("/sources//x", "/a")], []),
    ],
)
def test_broken_rule_stops_the_start(binds: list[Bind], links: list[Link]) -> None:
    with pytest.raises(StartFailed):
        command.arguments("s1", PROFILE, binds, links, FDS)


_NAMES = st.sampled_from(["a", "b", "c", "ab"])
_PATHS = st.lists(_NAMES, min_size=1, max_size=4).map(lambda parts: "/" + "/".join(parts))


@given(st.lists(st.tuples(st.sampled_from(["--ro-bind", "--tmpfs", "--symlink"]), _PATHS)))
def test_rule_is_exact(made: list[tuple[str, str]]) -> None:
    options: list[str] = []
    for option, path in made:
        options += [option, *([] if option == "--tmpfs" else ["/host"]), path]
    assert list(command.mount_points(options)) == made
    broken = False
    for index, (option, path) in enumerate(made):
        for earlier_option, earlier in made[:index]:
            beneath = path == earlier or path.startswith(earlier + "/")
            above = earlier == path or earlier.startswith(path + "/")
            broken |= beneath and earlier_option != "--tmpfs"
            broken |= above and option != "--tmpfs"
    if broken:
        with pytest.raises(StartFailed):
            command.check_mount_points(options)
    else:
        command.check_mount_points(options)


@pytest.mark.parametrize("profile", BUILTIN.values(), ids=str)
def test_no_file_limit_is_below_a_mount(profile: Profile) -> None:
    limit = command.rlimits(profile)["fsize"]
    assert all(size <= limit for size, _ in command.tmpfs_mounts(profile).values())


def test_options_come_in_pairs_that_bubblewrap_knows(tmp_path: Path) -> None:
    """Each fd is passed once: bubblewrap closes what it has read."""
    options = options_for(tmp_path)
    fds = [b for a, b in pairwise(options) if a in ("--add-seccomp-fd", "--info-fd")]
    assert fds == ["10", "11"]
