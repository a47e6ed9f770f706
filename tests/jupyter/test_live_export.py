"""`backintel export` of a sandbox that runs: through the same gate, while its cell goes on."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from sandboxes import Sandbox, sandbox

from kernel_provisioner.errors import ExportRefused, NotRunning
from kernel_provisioner.session.ask import ask, ask_json

pytestmark = pytest.mark.sandbox


async def export(session: str | None, out: Path, *options: str) -> tuple[int, str, str]:
    """Run the command; return its status, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kernel_provisioner.cli.main", "export", str(session)),
        *("--out", str(out), *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return process.returncode, stdout.decode(), stderr.decode()


def test_a_busy_sandbox_is_exported_and_goes_on(tmp_path: Path) -> None:
    async def body() -> None:
        async with sandbox() as box:
            session = box.provisioner.session_id
            asked = asyncio.Event()
            cell = asyncio.create_task(
                box.run(
                    "import os, time\n"
                    "open('/artifacts/a.csv', 'w').write('1,2\\n')\n"
                    "try:\n"
                    " print('written', flush=True)\n"
                    " while True: time.sleep(0.01)\n"
                    "except KeyboardInterrupt: pass\n"
                    "print('went on')",
                    on_message=lambda message: (
                        asked.set() if message["msg_type"] == "stream" else None
                    ),
                )
            )
            await asked.wait()
            status, stdout, _ = await export(session, tmp_path / "out", "--json")
            assert status == 0
            made = json.loads(stdout)
            assert made["schema"] == "backintel.export/1"
            assert [item["name"] for item in made["artifacts"]] == ["a.csv"]
            assert made["frozen_s"] <= 2.0
            assert (tmp_path / "out" / "a.csv").read_text() == "1,2\n"
            await box.provisioner.send_signal(2)
            assert (await cell).text.endswith("went on\n")

            again, _, said = await export(session, tmp_path / "out")
            assert again == 2
            assert "not empty" in said
            await _refused(box, tmp_path)
        assert box.provisioner.receipt is not None
        assert [made["files"] for made in box.provisioner.receipt["exports"]] == [1]
        ended, _, said = await export(session, tmp_path / "late")
        assert ended == 2
        assert "backintel sessions" in said

    asyncio.run(body())


async def _refused(box: Sandbox, tmp_path: Path) -> None:
    await box.run("os.symlink('/etc/passwd', '/artifacts/b.csv')")
    status, _, said = await export(box.provisioner.session_id, tmp_path / "none")
    assert status == 6
    assert "'b.csv' is a symbolic link" in said
    assert not (tmp_path / "none").exists()


def test_exports_at_one_time_come_one_after_the_other(tmp_path: Path) -> None:
    async def body() -> None:
        async with sandbox() as box:
            await box.run("open('/artifacts/a.bin.csv', 'wb').write(bytes(20 << 20))")
            desk = box.provisioner.desk
            assert desk is not None
            made = await asyncio.gather(
                *(
                    ask_json(desk, "export", timeout=60, destination=str(tmp_path / f"out-{n}"))
                    for n in range(4)
                )
            )
            assert {item["frozen_s"] <= 2.0 for item in made} == {True}
            assert len({json.dumps(item["artifacts"]) for item in made}) == 1
            assert (await box.run("print(7)")).text == "7\n"

    asyncio.run(body())


def test_a_cell_that_rewrites_its_file_without_end_is_read_at_one_moment(tmp_path: Path) -> None:
    async def body() -> None:
        async with sandbox() as box:
            # Each state of the two files is written first into one, then into the other; a copy
            # of two moments would find them further apart than one step.
            await box.run(
                "import threading\n"
                "a = open('/artifacts/a.csv', 'wb', buffering=0)\n"
                "b = open('/artifacts/b.csv', 'wb', buffering=0)\n"
                "pad = bytes(8 << 20)\n"
                "open('/artifacts/ab.csv', 'wb').write(pad)\n"
                "def count():\n"
                " n = 0\n"
                " while True:\n"
                "  n += 1\n"
                "  text = b'%012d' % n\n"
                "  a.seek(0); a.write(text); b.seek(0); b.write(text)\n"
                "  begun.set()\n"
                "begun = threading.Event()\n"
                "threading.Thread(target=count, daemon=True).start()\n"
                "begun.wait()"
            )
            desk = box.provisioner.desk
            assert desk is not None
            seen = []
            for number in range(3):
                out = tmp_path / str(number)
                await ask_json(desk, "export", timeout=60, destination=str(out))
                first, second = (int((out / f"{name}.csv").read_text()) for name in "ab")
                assert first - second in (0, 1)
                seen.append(first)
            assert seen[0] < seen[1] < seen[2]

    asyncio.run(body())


def test_who_does_not_ask_properly_is_not_answered(tmp_path: Path) -> None:
    async def body() -> None:
        async with sandbox() as box:
            desk = box.provisioner.desk
            assert desk is not None
            for words in (b"\xff\xff\xff\xff", b"\0\0\0\2[]", b"\0\0\0\1{"):
                reader, writer = await asyncio.open_unix_connection(str(desk / "desk"))
                writer.write(words)
                assert await reader.read() == b""
                writer.close()
                await writer.wait_closed()
            with pytest.raises(Exception, match="does not know this request"):
                await ask(desk, "nonsense", timeout=5)
            for name in ("../a.csv", "/etc/passwd", ""):
                with pytest.raises(Exception, match="there is no artifact"):
                    await ask(desk, "artifact", timeout=5, name=name)
            for bad in ("relative/none/x", "/proc/x"):
                with pytest.raises(Exception, match="director"):
                    await ask_json(desk, "export", timeout=60, destination=bad)
            assert (await ask_json(desk, "status", timeout=5))["state"] == "idle"
        with pytest.raises(NotRunning):
            await ask(desk, "status", timeout=5)

    asyncio.run(body())


def test_a_refusal_of_the_desk_keeps_its_type() -> None:
    async def body() -> None:
        async with sandbox() as box:
            await box.run("open('/artifacts/a.exe', 'w')")
            desk = box.provisioner.desk
            assert desk is not None
            with pytest.raises(ExportRefused, match="suffix") as refused:
                await ask(desk, "artifact", timeout=60, name="a.exe")
            assert refused.value.remedy

    asyncio.run(body())
