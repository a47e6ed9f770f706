"""The seccomp program: pinned, well formed, and right for every syscall when interpreted."""

from __future__ import annotations

import errno
import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_provisioner.engines.bwrap import seccomp
from kernel_provisioner.errors import HostRefused

DIGESTS = {
    "x86_64": "d6fcbd5c923f196b8f32ee400f89bfbb4adb90020d1d7725bc13185903edb3d0",
    "aarch64": "31169e5d78ca11a1bda0ef5ac0d91f130ce917daba0feab82e023eeee1418625",
}
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW = 0x7FFF0000
KILL = 0x80000000
MACHINES = sorted(ARCH)


def refuse(number: int) -> int:
    return 0x00050000 | number


def run(machine: str, number: int, *args: int, arch: int | None = None) -> int:
    """Interpret the program as the kernel does; return its action."""
    data = struct.pack(
        "<IIQ6Q", number, ARCH[machine] if arch is None else arch, 0, *args, *[0] * (6 - len(args))
    )
    code = [struct.unpack("<HBBI", chunk) for chunk in _chunks(seccomp.program(machine))]
    position = accumulator = 0
    while True:
        operation, if_true, if_false, operand = code[position]
        position += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif operation == 0x06:
            return operand
        else:
            holds = {
                0x15: accumulator == operand,
                0x35: accumulator >= operand,
                0x45: bool(accumulator & operand),
            }[operation]
            position += if_true if holds else if_false


def _chunks(program: bytes) -> list[bytes]:
    return [program[start : start + 8] for start in range(0, len(program), 8)]


@pytest.mark.parametrize("machine", MACHINES)
def test_digest_is_pinned(machine: str) -> None:
    """A change of the program is a change of the boundary: review it, then pin the new digest."""
    assert hashlib.sha256(seccomp.program(machine)).hexdigest() == DIGESTS[machine]


@pytest.mark.parametrize("machine", MACHINES)
def test_jumps_stay_inside_and_the_end_answers(machine: str) -> None:
    code = list(seccomp.instructions(machine))
    assert len(code) < 4096
    for position, (operation, if_true, if_false, _) in enumerate(code):
        if operation not in (0x20, 0x06):
            assert position + 1 + max(if_true, if_false) < len(code)
    assert code[-1] == (0x06, 0, 0, ALLOW)


@pytest.mark.parametrize("machine", MACHINES)
@given(number=st.integers(0, 2**32 - 1), arch=st.integers(0, 2**32 - 1))
def test_foreign_architectures_are_killed(machine: str, number: int, arch: int) -> None:
    if arch != ARCH[machine]:
        assert run(machine, number, arch=arch) == KILL


def test_x32_is_killed() -> None:
    assert run("x86_64", 0x40000000 | 1) == KILL


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("number", [467, 500, 0x3FFFFFFF])
def test_unreviewed_syscalls_do_not_exist(machine: str, number: int) -> None:
    assert run(machine, number) == refuse(errno.ENOSYS)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_reviewed_syscall_is_answered_as_listed(machine: str) -> None:
    denied = seccomp.denied_syscalls(machine)
    filtered = {"x86_64": {16, 41, 53, 56, 135}, "aarch64": {29, 198, 199, 220, 92}}[machine]
    for number in range(467):
        if number in denied:
            assert run(machine, number) == refuse(denied[number])
        elif number not in filtered:
            assert run(machine, number) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
@given(flags=st.integers(0, 2**64 - 1))
def test_clone_never_makes_a_namespace(machine: str, flags: int) -> None:
    number = {"x86_64": 56, "aarch64": 220}[machine]
    spaces = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000
    spaces |= 0x10000000 | 0x20000000 | 0x40000000
    wanted = refuse(errno.EPERM) if flags & spaces else ALLOW
    assert run(machine, number, flags) == wanted


@pytest.mark.parametrize("machine", MACHINES)
@given(request=st.sampled_from([0x5412, 0x541C, 0x5413, 0x5401]), high=st.integers(0, 2**32 - 1))
def test_terminal_injection_by_low_bits(machine: str, request: int, high: int) -> None:
    number = {"x86_64": 16, "aarch64": 29}[machine]
    wanted = refuse(errno.EPERM) if request in (0x5412, 0x541C) else ALLOW
    assert run(machine, number, 3, request | high << 32) == wanted


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("call", ["socket", "socketpair"])
def test_address_families(machine: str, call: str) -> None:
    numbers = {"socket": (41, 198), "socketpair": (53, 199)}
    number = numbers[call][machine == "aarch64"]
    for family in range(64):
        action = run(machine, number, family | 7 << 32)
        if family in (1, 2, 10):
            assert action == ALLOW
        elif family == 16 and call == "socket":
            assert action == refuse(errno.EOPNOTSUPP)
        else:
            assert action == refuse(errno.EAFNOSUPPORT)


@pytest.mark.parametrize("machine", MACHINES)
def test_personality(machine: str) -> None:
    number = {"x86_64": 135, "aarch64": 92}[machine]
    assert run(machine, number, 0) == ALLOW
    assert run(machine, number, 0xFFFFFFFF) == ALLOW
    assert run(machine, number, 0x0040000) == refuse(errno.EPERM)


def test_other_architectures_are_refused() -> None:
    with pytest.raises(HostRefused, match="riscv64"):
        seccomp.program("riscv64")
