"""Compares what the guest's init read back with what was asked (spec D3); pure.

The guest is believed here only because no user code has run yet. Any deviation stops the start,
but the supplementary groups of an ordinary user: they cannot be dropped, so they are recorded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kernel_provisioner.engines.base import CHANNELS, GUEST_GID, GUEST_UID
from kernel_provisioner.engines.bwrap.command import (
    ETC,
    HOSTNAME,
    environment,
    rlimits,
    tmpfs_mounts,
)
from kernel_provisioner.profiles import Profile

_OVERFLOW_GID = 65534
_IFF_LOOPBACK = 0x8
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_WRITABLE_KERNEL_MOUNTS = frozenset({"/proc", "/dev/pts", *(f"/dev/{name}" for name in _DEVICES)})
"""Writable for what they are; none of them stores anything."""
_ADDED_BY_PYTHON = frozenset({"LC_CTYPE"})
_ADDED_BY_BWRAP = frozenset({"PWD"})


def deviations(
    facts: Mapping[str, Any],
    session: str,
    profile: Profile,
    read_only: frozenset[str],
    own_namespaces: Mapping[str, str],
    *,
    groups_dropped: bool,
) -> list[str]:
    """Return every fact that is not as asked, one sentence each; empty is what a start needs.

    ``read_only`` are the targets of the binds, ``own_namespaces`` the supervisor's, by name.
    ``groups_dropped`` says whether the launcher could drop supplementary groups (as root).
    A fact that is missing or of another shape counts as a deviation.
    """
    checks: tuple[Callable[[], Iterator[str]], ...] = (
        lambda: _identity(facts, groups_dropped=groups_dropped),
        lambda: _limits(facts, profile),
        lambda: _mounts(facts, profile, read_only),
        lambda: _isolation(facts, own_namespaces),
        lambda: _inherited(facts, session, profile),
    )
    found: list[str] = []
    for check in checks:
        try:
            found += check()
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            found.append(f"the attestation is incomplete ({type(error).__name__}: {error})")
    return found


def recorded(facts: Mapping[str, Any]) -> list[str]:
    """Return tolerated deviations, for the receipt and for ``check``."""
    if facts.get("groups"):
        count = len(facts["groups"])
        return [
            f"{count} supplementary group(s) of the user remain, shown as the overflow group: "
            "only root can drop them"
        ]
    return []


def _differs(what: str, found: object, wanted: object) -> Iterator[str]:
    if found != wanted:
        yield f"{what} is {_short(found)}, not {_short(wanted)}"


def _short(value: object) -> str:
    return json.dumps(value, default=str)[:200]


def _identity(facts: Mapping[str, Any], *, groups_dropped: bool) -> Iterator[str]:
    yield from _differs("uid", facts["uid"], [GUEST_UID] * 4)
    yield from _differs("gid", facts["gid"], [GUEST_GID] * 4)
    allowed = set() if groups_dropped else {_OVERFLOW_GID, GUEST_GID}
    if set(facts["groups"]) - allowed:
        yield f"the supplementary groups are {_short(facts['groups'])}"
    yield from _differs("no_new_privs", facts["no_new_privs"], 1)
    yield from _differs("the seccomp mode", facts["seccomp_mode"], 2)
    names = ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")
    yield from _differs("capabilities", facts["capabilities"], dict.fromkeys(names, 0))


def _limits(facts: Mapping[str, Any], profile: Profile) -> Iterator[str]:
    for name, wanted in rlimits(profile).items():
        soft, hard = facts["rlimits"][name]
        # The host may have imposed less; never more, and never unlimited (-1).
        if not 0 <= soft <= wanted or not 0 <= hard <= wanted:
            yield f"the limit {name} is {soft}/{hard}, not {wanted}"


def _mounts(facts: Mapping[str, Any], profile: Profile, read_only: frozenset[str]) -> Iterator[str]:
    wanted = tmpfs_mounts(profile)
    # A later mount on the same place covers an earlier one.
    mounts = {target: (kind, options.split(",")) for target, kind, options in facts["mounts"]}
    for target in {"/", "/dev", *read_only, *(f"/etc/{name}" for name in ETC)} - mounts.keys():
        yield f"nothing is mounted on {target}"
    for target, (kind, options) in mounts.items():
        if target in wanted:
            yield from _differs(f"the file system of {target}", kind, "tmpfs")
            if "rw" not in options:
                yield f"{target} is not writable"
        elif target not in _WRITABLE_KERNEL_MOUNTS and "ro" not in options:
            yield f"{target} is writable"
        if "nosuid" not in options:
            yield f"{target} honours set-user-id"
    page = 65536  # the largest page size of a supported architecture; tmpfs rounds up to pages
    for target, (size, mode) in wanted.items():
        if target not in mounts:
            yield f"nothing is mounted on {target}"
        space = facts["tmpfs"][target]
        if not size <= space["bytes"] < size + page:
            yield f"{target} has {space['bytes']} bytes, not {size}"
        yield from _differs(f"the mode of {target}", space["mode"], mode)
        yield from _differs(f"the owner of {target}", space["uid"], GUEST_UID)


def _isolation(facts: Mapping[str, Any], own: Mapping[str, str]) -> Iterator[str]:
    yield from _differs("the network interfaces", list(facts["interfaces"]), ["lo"])
    if not facts["interfaces"]["lo"] & _IFF_LOOPBACK:
        yield "lo is not a loopback interface"
    yield from _differs("the host name", facts["hostname"], HOSTNAME)
    for name, identity in own.items():
        if facts["namespaces"][name] == identity:
            yield f"the {name} namespace is the host's"
    yield from _differs("the terminal", facts["terminal"], False)
    yield from _differs("the parent process", facts["ppid"], 1)
    yield from _differs("the process group", facts["group"], facts["pid"])
    yield from _differs("the working directory", facts["cwd"], "/workspace")


def _inherited(facts: Mapping[str, Any], session: str, profile: Profile) -> Iterator[str]:
    kinds = [kind for name, kind in facts["fds"].items() if int(name) > 2]
    others = [kind for kind in kinds if kind != "socket"]
    yield from _differs("the inherited sockets", len(kinds) - len(others), len(CHANNELS) + 1)
    # The pipe that names the requests which interrupts are for.
    yield from _differs("the other inherited descriptors", others, ["pipe"])
    yield from _differs("standard input", facts["fds"]["0"], "/dev/null")
    yield from _differs("standard output", facts["fds"]["1"], "pipe")
    yield from _differs("standard error", facts["fds"]["2"], "pipe")
    known = environment(session, profile).keys() | _ADDED_BY_PYTHON | _ADDED_BY_BWRAP
    yield from _differs("unexpected variables", sorted(set(facts["environment"]) - known), [])
