"""Memory that the host's kernel keeps for a guest; a microVM has a kernel of its own for that."""

from __future__ import annotations

import pytest
from live_guest import MIB, Starter, small

pytestmark = pytest.mark.sandbox


@pytest.fixture(scope="module")
def engine() -> str:
    """The only one whose guests share the host's kernel."""
    return "bwrap"


@pytest.mark.parametrize(
    "code",
    [
        "while True: os.close(os.open(f'/dev/shm/{n}', os.O_CREAT)); n += 1",
        "while True:\n"
        "    p = libc.shmat(libc.shmget(0, 1 << 20, 0o1600), None, 0)\n"
        "    ctypes.memset(p, 1, 1 << 20); libc.shmdt(ctypes.c_void_p(p))",
    ],
    ids=["inodes", "System V shared memory"],
)
def test_kernel_memory_counts_as_the_guests(start: Starter, code: str) -> None:
    live = start(profile=small(ram_bytes=320 * MIB))
    live.send(
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None); libc.shmat.restype = ctypes.c_void_p; n = 0\n" + code
    )
    assert live.wait(90).status == -9
    sample = live.sample()
    assert sample.oom_kills > 0
    assert sample.peak_memory_bytes <= 320 * MIB
