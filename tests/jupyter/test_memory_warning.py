"""Near its memory limit a guest's person is warned, once, and only of what is really held."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sandboxes import Sandbox, sandbox

pytestmark = [pytest.mark.sandbox, pytest.mark.filterwarnings("default")]

LIMIT = 768 << 20  # of the profile ``benchmark``
WARNING = "BackIntel sandbox: memory is at "
SLOWLY = """
import time
held = []
def grow():
    held.append(b'x' * (130 << 20))  # up to some 620 MiB with what is there
    while True:  # 20 MiB/s, so that four seconds lie between the warning and the limit
        held.append(b'x' * (2 << 20))
        time.sleep(0.1)
"""
FILL = """
for path, size in (('/workspace', 120), ('/artifacts', 60), ('/tmp', 100), ('/dev/shm', 120)):
    with open(f'{path}/file', 'wb') as file:
        file.write(bytes(size << 20))
"""
HOLD = "held.append(b'x' * (400 << 20))\n"


async def warned(box: Sandbox) -> dict[str, int]:
    """Wait until the provisioner has the warning."""
    async with asyncio.timeout(50):
        while box.provisioner.memory_warning is None:
            assert await box.provisioner.poll() is None
            await asyncio.sleep(0.02)
    return box.provisioner.memory_warning


@pytest.mark.parametrize("start", [HOLD, FILL], ids=["memory", "files"])
def test_a_person_is_warned_once_before_the_limit(start: str) -> None:
    """The guest's own files count too: they are in memory and cannot be taken back."""

    async def body() -> None:
        async with sandbox(profile="small", cell_deadline=100) as box:
            await box.run(SLOWLY)
            growing = asyncio.create_task(box.run(f"{start}\ngrow()"))
            facts = await warned(box)
            await box.manager.interrupt_kernel()
            result = await growing
            assert result.error.startswith("KeyboardInterrupt"), "warned before it was killed"
            assert result.text.count(WARNING) == 1
            assert "of 768 MiB; at the limit the kernel is killed" in result.text
            assert facts["limit_bytes"] == LIMIT
            assert 0.9 * LIMIT <= facts["held_bytes"] <= LIMIT
            size = (await box.run("print(sum(map(len, held)) >> 20)")).text
            assert (int(size) > 450) is (start is HOLD)
            again = "del held[:]\ntime.sleep(1.5)\n" + (HOLD if start is HOLD else "")
            result = await box.run(f"{again}\ngrow()", timeout=90)
            assert result.error.startswith("OutOfMemory"), "through 90 % a second time"
            assert WARNING not in result.text
            provisioner = box.provisioner
        assert provisioner.receipt is not None
        recorded = provisioner.receipt["memory_warning"]
        assert {name: recorded[name] for name in ("held_bytes", "limit_bytes")} == {
            name: facts[name] for name in ("held_bytes", "limit_bytes")
        }

    asyncio.run(body())


def test_memory_that_a_thread_takes_is_told_in_the_last_cell() -> None:
    async def body() -> None:
        async with sandbox(profile="small") as box:
            thread = "import threading\nthreading.Thread(target=grow, daemon=True).start()"
            cell = await box.run(f"{SLOWLY}\n{HOLD}\n{thread}")
            await warned(box)
            async with asyncio.timeout(10):
                while True:
                    message = await box.client.get_iopub_msg()
                    if message["msg_type"] == "stream":
                        break
            assert WARNING in message["content"]["text"]
            parent = cell.reply["parent_header"]["msg_id"]
            assert message["parent_header"]["msg_id"] == parent

    asyncio.run(body())


def test_pages_of_files_on_disk_are_no_reason_to_warn(tmp_path: Path) -> None:
    source = tmp_path / "large"
    with source.open("wb") as file:
        file.truncate(2 * LIMIT)  # reading holes fills the page cache as reading data does
    source.chmod(0o644)

    async def body() -> None:
        async with sandbox(profile="small", sources={"large": str(source)}) as box:
            # Slowly enough that it is sampled on the way.
            code = (
                "import time\n"
                "with open('/sources/large', 'rb') as file:\n"
                "    while file.read(64 << 20): time.sleep(0.1)\n"
            )
            assert (await box.run(code)).reply["content"]["status"] == "ok"
            await box.provisioner.poll()
            assert box.provisioner.memory_warning is None
            provisioner = box.provisioner
        assert provisioner.receipt is not None
        assert provisioner.receipt["peak_memory_bytes"] > 0.9 * LIMIT
        assert provisioner.receipt["memory_warning"] is None

    asyncio.run(body())


def test_memory_given_back_and_taken_again_is_warned_of() -> None:
    """Allocators do that (MADV_FREE); the kernel lists such pages with those of files."""
    code = (
        "import mmap, time\n"
        "size, step = 660 << 20, 66 << 20\n"
        "held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "def touch(start, end):\n"
        "    for place in range(start, end, mmap.PAGESIZE): held[place] = 1\n"
        "for start in range(0, size, step):\n"
        "    touch(start, start + step)\n"
        "    held.madvise(mmap.MADV_FREE, start, step)\n"
        "touch(0, size)\n"
    )

    async def body() -> None:
        async with sandbox(profile="small") as box:
            assert (await box.run(code)).reply["content"]["status"] == "ok"
            facts = await warned(box)
            assert 0.9 * LIMIT <= facts["held_bytes"] <= LIMIT

    asyncio.run(body())


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile as small as ``benchmark`` that runs more than one cell."""
    file = tmp_path / "config/backintel/backintel.toml"
    file.parent.mkdir(parents=True)
    file.write_text(
        "[profiles.small]\nram_mib = 768\ncpus = 1\nworkspace_mib = 128\nartifacts_mib = 64\n"
        "temp_mib = 128\ncell_deadline = 120\nrun_deadline = 600\n"
    )
    file.chmod(0o600)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
