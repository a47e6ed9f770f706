"""Starts, restarts, remains, files and messages that users of other kernels reported.

Each docstring cites where the symptom was reported; the table is in docs/promises.md.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from runs import Bench
from sandboxes import guest_processes, sandbox
from test_ends import processes_of

from kernel_provisioner.paths import state_dirs
from kernel_provisioner.provisioner import SandboxKernelManager
from kernel_provisioner.records import sweep

pytestmark = [pytest.mark.sandbox, pytest.mark.filterwarnings("default")]

PLACES = ("/workspace", "/artifacts", "/tmp", "/dev/shm")


def internet_sockets(pid: int) -> set[str]:
    """Return the sockets of a process that its network namespace lists as TCP or UDP."""
    listed = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        listed |= {f"socket:[{line.split()[9]}]" for line in lines}
    held = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile, as files are that are read once
            held.add(os.readlink(entry))
    return held & listed


def own_network(pid: int) -> bool:
    """Whether a process is in another network namespace than this one."""
    return os.readlink(f"/proc/{pid}/ns/net") != os.readlink("/proc/self/ns/net")


def test_a_session_listens_on_no_port() -> None:
    """jupyter_client#276, jupyter_client#487: without ports there is no race for them."""

    async def body() -> None:
        async with sandbox() as one, sandbox() as two:
            places = set()
            for box in (one, two):
                await box.run("1")
                info = box.manager.get_connection_info()
                assert info["transport"] == "ipc"
                places.add(info["ip"])
                inside = [pid for pid in guest_processes() if own_network(pid)]
                assert len(inside) >= 2
                outside = [pid for pid in guest_processes() if pid not in inside]
                assert box.supervisor_pid in outside
                assert [pid for pid in outside if internet_sockets(pid)] == []
            assert len(places) == 2

    asyncio.run(body())


def test_cleaning_up_is_idempotent_and_spares_what_lives() -> None:
    """voila#1291: a sweep beside a live session, and clean-ups many times over and at once."""

    async def body() -> None:
        async with sandbox() as box:
            await box.run("x = 6")
            provisioner = box.provisioner
            swept = sweep(state_dirs())
            session = str(provisioner.session_id)
            assert not [line for line in (*swept.done, *swept.left) if session in line]
            assert (await box.run("print(x * 7)")).text == "42\n"
            await box.manager.shutdown_kernel(now=True)
            receipt = provisioner.receipt
            await asyncio.gather(*(provisioner.cleanup() for _ in range(3)))
            await provisioner.kill()
            await provisioner.terminate()
            await provisioner.send_signal(2)
            assert await provisioner.poll() == 0
            assert provisioner.receipt == receipt

    asyncio.run(body())


def test_a_start_is_told_phase_by_phase() -> None:
    """jupyterlab#6007: whoever waits for a slow start is told what it is at."""

    async def body() -> None:
        phases: list[tuple[str, float]] = []
        manager = SandboxKernelManager(
            command_line={"engine": "bwrap"},
            default_profile="interactive",
            on_phase=lambda name, seconds: phases.append((name, seconds)),
        )
        await manager.start_kernel()
        try:
            names = [name for name, _ in phases]
            assert names == ["supervisor", "verified", "attested", "kernel", "image", "ready"]
            assert [seconds for _, seconds in phases] == sorted(seconds for _, seconds in phases)
        finally:
            await manager.shutdown_kernel(now=True)

    asyncio.run(body())


def test_no_file_of_an_earlier_guest_is_in_the_next_one() -> None:
    """smolvm#187: what a session wrote anywhere is not there after a restart, nor beside it."""

    async def body() -> None:
        # By a name that the search itself does not hold.
        write = f"""
import os
import signal
made = 0
for place in {PLACES} + (os.path.expanduser('~'), os.environ['XDG_CACHE_HOME']):
    with open(place + '/can' + 'ary-7c1', 'w') as file:
        file.write('left behind')
    made += 1
print(made)
"""
        look = """
import os
import signal
print([p for d, _, names in os.walk('/') for p in names if p == 'can' + 'ary-7c1'])
"""
        async with sandbox() as box:
            assert (await box.run(write)).text == "6\n"
            assert (await box.run(look)).text.count("canary-7c1") >= 6
            async with sandbox() as beside:
                assert (await beside.run(look)).text == "[]\n"
            await box.manager.restart_kernel(now=True)
            await box.client.wait_for_ready(timeout=60)
            assert (await box.run(look)).text == "[]\n"

    asyncio.run(body())


def test_sources_are_there_at_the_start_with_what_they_hold(tmp_path: Path) -> None:
    """smolvm#1004: a source that is reported is there, in full, before the first cell."""
    tmp_path.chmod(0o755)
    data = tmp_path / "data"
    (data / "deep").mkdir(parents=True)
    names = {f"deep/{number}.bin": os.urandom(4096) for number in range(50)}
    for name, content in names.items():
        (data / name).write_bytes(content)
    expected = hashlib.sha256(b"".join(names[name] for name in sorted(names))).hexdigest()

    async def body() -> None:
        async with sandbox(sources={"data": str(data)}) as box:
            code = "import hashlib, pathlib\nplace = pathlib.Path('/sources/data')\n"
            code += "found = sorted((str(p.relative_to(place)), p) for p in place.rglob('*.bin'))\n"
            code += "read = b''.join(p.read_bytes() for _, p in found)\n"
            code += "print(hashlib.sha256(read).hexdigest())"
            assert (await box.run(code)).text == expected + "\n"

    asyncio.run(body())


def test_a_database_in_use_is_read_as_a_copy(tmp_path: Path) -> None:
    """SQLite WAL on virtiofs: a database that is being written is whole and writable inside."""
    tmp_path.chmod(0o755)
    path = tmp_path / "live.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode = WAL")
        writer.execute("CREATE TABLE t (n INTEGER)")
        writer.executemany("INSERT INTO t VALUES (?)", [(n,) for n in range(1000)])
        writer.execute("BEGIN")
        writer.execute("INSERT INTO t VALUES (-1)")
        assert path.with_name("live.sqlite-wal").stat().st_size > 0

        async def body() -> None:
            async with sandbox(sources={"db": str(path)}) as box:
                code = "import shutil, sqlite3\nshutil.copy('/sources/db', '/workspace/own')\n"
                code += "db = sqlite3.connect('/workspace/own')\n"
                code += "print(db.execute('PRAGMA integrity_check').fetchone()[0],"
                code += " *db.execute('SELECT count(*), min(n) FROM t').fetchone())"
                assert (await box.run(code)).text == "ok 1000 0\n"

        asyncio.run(body())
        writer.execute("COMMIT")
        assert writer.execute("SELECT count(*) FROM t").fetchone() == (1001,)


def test_100_mb_come_out_whole(tmp_path: Path) -> None:
    """smolvm#238: an export is a stream; its size ends no guest."""
    bench = Bench(tmp_path)
    bench.write(
        "import hashlib, os\ndata = os.urandom(100 << 20)\n"
        "with open('/artifacts/big.parquet', 'wb') as file: _ = file.write(data)\n"
        "print(hashlib.sha256(data).hexdigest())"
    )
    run = bench.run()
    assert run.status == 0
    with (run.out / "artifacts" / "big.parquet").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == run.cells[0].outputs[0].text[:-1]


def test_binary_on_standard_output_harms_no_one() -> None:
    """jupyterlab#12845: bytes that are no text arrive as text or not at all; the kernel goes on."""

    async def body() -> None:
        async with sandbox() as box:
            code = "import os\ndata = bytes(range(256)) * 4096\n"
            code += "print(data.decode('latin-1'))\nos.write(1, data)\nos.write(2, data)"
            result = await box.run(code)
            assert result.reply["content"]["status"] == "ok"
            result.text.encode()
            # ipykernel passes on what bypassed sys.stdout when it can, maybe after the cell.
            assert "42\n" in (await box.run("print(6 * 7)")).text

    asyncio.run(body())


def test_input_without_a_person_is_a_clear_error(tmp_path: Path) -> None:
    """nbconvert#288: headless, input() fails at once and says why."""
    bench = Bench(tmp_path)
    bench.write("name = input('name? ')", "print('no')")
    run = bench.run("--cell-deadline", "60")
    # Had it waited, the deadline would have ended it, and with another error.
    assert run.status == 1
    assert run.errors == ["StdinNotImplementedError"]
    assert "input" in run.cells[0].outputs[-1].evalue


def test_a_comm_works_again_after_a_restart() -> None:
    """jupyterlab#15361: what widgets need - a comm and its answers - is there in the new guest."""
    register = """
def opened(comm, message):
    comm.on_msg(lambda received: comm.send({'echo': received['content']['data']['value'] + 1}))
get_ipython().kernel.comm_manager.register_target('echo', opened)
"""

    async def body() -> None:
        async with sandbox() as box:
            for value in (1, 41):
                await box.run(register)
                comm = {"comm_id": f"c{value}", "target_name": "echo", "data": {}}
                session = box.client.session
                box.client.shell_channel.send(session.msg("comm_open", comm))
                data = {"comm_id": f"c{value}", "data": {"value": value}}
                box.client.shell_channel.send(session.msg("comm_msg", data))
                while True:
                    message = await box.client.get_iopub_msg(timeout=30)
                    if message["msg_type"] == "comm_msg":
                        break
                assert message["content"] == {"comm_id": f"c{value}", "data": {"echo": value + 1}}
                await box.manager.restart_kernel(now=True)
                await box.client.wait_for_ready(timeout=60)

    asyncio.run(body())


def test_a_guest_that_prints_without_end_takes_no_memory_of_the_host() -> None:
    """snekbox#81: nobody reads, the guest prints for up to 30 s, the supervisor stays small."""

    async def body() -> None:
        settings = {"cell_deadline": 30, "on_deadline": "interrupt", "grace": 2}
        async with sandbox(**settings) as box:
            await box.run("1")
            code = "import os\nwhile True:\n    print('x' * 100000)\n    os.write(2, b'y' * 65536)"
            cell = box.client.execute(code)
            reply = await box.client.get_shell_msg(timeout=60)
            assert reply["parent_header"]["msg_id"] == cell
            assert reply["content"]["status"] == "error"
            status = Path(f"/proc/{box.supervisor_pid}/status").read_text()
            (peak,) = (line.split()[1] for line in status.splitlines() if "VmHWM" in line)
            assert int(peak) < 300 << 10, "KiB"

    asyncio.run(body())


def test_the_guests_clocks_are_right_after_it_stood_still() -> None:
    """smolvm#521: a guest's clock drifts over a sleep; here it is the host's, to below a second."""

    async def body() -> None:
        async with sandbox() as box:
            guest = [pid for pid in processes_of(box) if pid != box.supervisor_pid]
            for number in (signal.SIGSTOP, signal.SIGCONT):
                for pid in guest:
                    os.kill(pid, number)
                if number == signal.SIGSTOP:
                    time.sleep(3)  # how long it stands still, not a wait for anything
            asked, steady = time.time(), time.monotonic()
            result = await box.run("import time; print(time.time(), time.monotonic())")
            told, counted = map(float, result.text.split())
            assert asked <= told <= time.time() < asked + 30
            assert steady <= counted <= time.monotonic()

    asyncio.run(body())
