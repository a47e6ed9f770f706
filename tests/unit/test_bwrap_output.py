"""What a guest prints is kept bounded, and a failed start is explained with a remedy."""

from __future__ import annotations

import asyncio
import contextlib
import os

import pytest

from kernel_provisioner.engines.bwrap.output import KEPT, OutputTail, explain, refused_by
from kernel_provisioner.errors import HostRefused, StartFailed


def test_only_the_last_64_kib_are_kept() -> None:
    async def flood() -> str:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        tail = OutputTail(reader)
        try:
            for number in range(40):
                os.write(writer, b"%05d" % number * 1000)
                tail.drain()
            return tail.text()
        finally:
            tail.close()
            tail.close()
            os.close(writer)

    text = asyncio.run(flood())
    assert len(text) == KEPT
    assert text.endswith("00039")


def test_flood_is_read_at_a_bounded_rate() -> None:
    async def flood() -> int:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        tail = OutputTail(reader)
        loop = asyncio.get_running_loop()
        written = 0
        end = loop.time() + 0.5
        try:
            while loop.time() < end:
                with contextlib.suppress(BlockingIOError):
                    written += os.write(writer, b"x" * 65536)
                await asyncio.sleep(0)
        finally:
            tail.close()
            os.close(writer)
        return written

    # 10 pauses in half a second, at most 64 KiB each, and what the pipe itself holds.
    assert asyncio.run(flood()) < 14 * 65536


@pytest.mark.parametrize(
    ("printed", "named", "remedy"),
    [
        ("bwrap: setting up uid map: Permission denied", "AppArmor", "AppArmor profile"),
        ("bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted", "AppArmor", "profile"),
        ("bwrap: No permissions to create new namespace", "namespaces", "administrator"),
        ("bwrap: Can't mount proc on /newroot/proc: Operation not permitted", "/proc", "unmasked"),
    ],
)
def test_known_causes_have_a_remedy(printed: str, named: str, remedy: str) -> None:
    error = explain(printed, "bwrap ended", "launch")
    assert named in error.message
    assert remedy in error.remedy
    assert "sysctl -w" not in error.remedy
    assert printed in error.message


def test_unknown_cause_quotes_the_end_of_what_was_printed() -> None:
    error = explain("noise\n" * 10000 + "the last line", "it ended", "attest")
    assert error.message.endswith("the last line")
    assert len(error.message) < 2000
    assert error.phase == "attest"


def test_launcher_failures() -> None:
    assert isinstance(refused_by("unshare: Operation not permitted", "stage"), HostRefused)
    assert isinstance(refused_by("Exec format error", "exec"), StartFailed)
