"""Faults of the host and crowds of sandboxes (spec I): each has a clear end and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

import home
import observe
import pytest
from sandboxes import Sandbox, gone_within, sandbox
from schedule import Victim
from trial import Lab, Trial

from kernel_provisioner.errors import HostRefused, StartFailed
from kernel_provisioner.paths import StateDirs
from kernel_provisioner.processes import identify, is_running
from kernel_provisioner.provisioner import SandboxKernelManager
from kernel_provisioner.records import Swept, live_sessions, sweep

pytestmark = [pytest.mark.sandbox, pytest.mark.filterwarnings("default")]

MANY = 20
AT_A_TIME = 3


@pytest.fixture(autouse=True)
def nothing_left(dirs: StateDirs) -> Iterator[None]:
    """After each test no record, no staged file and no process of this home is left."""
    yield
    late = observe.gone_by(time.monotonic() + 2.0, lambda: observe.marked(os.environ["HOME"]))
    assert not late
    assert not observe.residue(dirs, (), (), dirs.state / "exports")


@contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Take away that anything can be written into a directory."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.geteuid() == 0:
        home.bind(directory, directory)
    else:
        directory.chmod(0o500)
    try:
        yield
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", directory], check=True)
        else:
            directory.chmod(0o700)


async def refused() -> HostRefused:
    """Start a sandbox that must be refused; return the error."""
    manager = SandboxKernelManager(
        command_line={"engine": "bwrap", "profile": "tiny"}, default_profile="interactive"
    )
    with pytest.raises(HostRefused) as caught:
        await manager.start_kernel()
    return caught.value


def test_no_start_where_no_receipt_can_be_written(dirs: StateDirs) -> None:
    with read_only(dirs.receipts):
        error = asyncio.run(refused())
    assert str(dirs.receipts) in error.message
    assert error.phase == "record" and "writable" in error.remedy


def test_a_receipt_that_cannot_be_stored_is_told_to_the_client(dirs: StateDirs) -> None:
    async def body() -> None:
        async with AsyncExitStack() as stack:
            box = await stack.enter_async_context(sandbox(profile="tiny"))
            provisioner = box.provisioner
            await box.run("1")
            stack.enter_context(read_only(dirs.receipts))
            await box.manager.shutdown_kernel(now=True)
        assert provisioner.receipt is not None
        assert provisioner.receipt["ended"]["reason"] == "Shutdown"
        assert provisioner.receipt["cells"]["run"] == 1
        assert not (dirs.receipts / f"{provisioner.session_id}.json").exists()

    asyncio.run(body())


def test_a_sweep_that_cannot_write_a_receipt_keeps_the_record_and_goes_on(lab: Lab) -> None:
    trial = Trial(lab, lab.part("sleep", "tiny"))
    trial.strike("busy", Victim.SUPERVISOR, Victim.CLIENT)
    trial.wait_for_processes()
    with read_only(lab.dirs.receipts):
        (line,) = sweep(lab.dirs).left
        assert "Read-only" in line or "denied" in line
        assert len(observe.entries(lab.dirs.sessions)) == 1
    (line,) = sweep(lab.dirs).done
    assert line.endswith("removed what its supervisor left")
    trial.close()


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StateDirs]:
    """A home on a file system of its own with 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=755", "none", disk], check=True)
    environment = home.make(disk)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield home.dirs_of(environment)
    home.unmake(disk)
    subprocess.run(["umount", "--lazy", disk], check=True)


def fill(directory: Path) -> Path:
    """Write until the disk is full."""
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
def test_a_full_disk_refuses_a_start_and_ends_a_session_with_its_receipt_told(
    small_disk: StateDirs,
) -> None:
    async def body() -> None:
        async with sandbox(profile="tiny") as box:
            provisioner = box.provisioner
            ballast = fill(small_disk.state)
            error = await refused()
            assert "No space left" in error.message and "full" in error.remedy
            assert (await box.run("print(6 * 7)")).text == "42\n", "running ones go on"
        assert provisioner.receipt is not None
        assert provisioner.receipt["ended"]["reason"] == "Shutdown"
        ballast.unlink()
        assert sweep(small_disk) == Swept()
        assert not observe.entries(small_disk.sessions)
        async with sandbox(profile="tiny") as box:
            assert (await box.run("print(1)")).text == "1\n"

    asyncio.run(body())


def test_a_stopped_supervisor_does_not_hold_up_a_shutdown() -> None:
    async def body() -> None:
        async with sandbox(profile="tiny") as box:
            await box.run("1")
            os.kill(box.supervisor_pid, signal.SIGSTOP)
            begun = time.monotonic()
            await box.manager.shutdown_kernel(now=True)
            assert time.monotonic() - begun < 10
            assert box.provisioner.ended is not None
            assert box.provisioner.receipt is not None

    asyncio.run(body())


def test_a_deadline_that_passed_while_the_supervisor_was_stopped_fires_when_it_goes_on() -> None:
    async def body() -> None:
        async with sandbox(profile="tiny", cell_deadline=2, on_deadline="cancel") as box:
            busy = asyncio.Event()
            cell = asyncio.create_task(
                box.run("while True: pass", on_message=lambda _: busy.set(), timeout=30)
            )
            await asyncio.wait_for(busy.wait(), 30)
            os.kill(box.supervisor_pid, signal.SIGSTOP)
            with pytest.raises(TimeoutError):
                # Nobody is there who could end it.
                await asyncio.wait_for(asyncio.shield(cell), 3)
            os.kill(box.supervisor_pid, signal.SIGCONT)
            begun = time.monotonic()
            assert (await cell).error.startswith("CellDeadlineExceeded")
            assert time.monotonic() - begun < 5

    asyncio.run(body())


def test_a_supervisor_that_stops_while_it_starts_fails_the_start() -> None:
    """nbval#133: each phase has a budget of its own, and the error names the phase."""

    def stop(name: str, _: float) -> None:
        if name == "verified":
            process = manager.provisioner._process
            assert process is not None
            os.kill(process.pid, signal.SIGSTOP)
            manager.provisioner.phase_timeout_s = 0.5

    manager = SandboxKernelManager(
        command_line={"engine": "bwrap", "profile": "tiny"},
        default_profile="interactive",
        on_phase=stop,
    )
    begun = time.monotonic()
    with pytest.raises(StartFailed, match="last phase: verified"):
        asyncio.run(manager.start_kernel())
    assert time.monotonic() - begun < 10


def test_two_servers_share_a_home(lab: Lab) -> None:
    """Sessions of two processes come and go; the sudden death of some disturbs no other."""
    for victims in ((Victim.SUPERVISOR,), (Victim.CLIENT, Victim.SUPERVISOR)):
        other, doomed = (Trial(lab, lab.part(does, "tiny")) for does in ("restart", "stay"))
        doomed.strike("again attested", *victims)
        other.wait_for_end()
        assert other.told["reason"] == "Shutdown"
        doomed.wait_for_processes()
        sweep(lab.dirs)
        other.close()
        doomed.close()


def test_two_sweeps_at_once(lab: Lab, dirs: StateDirs) -> None:
    left = [Trial(lab, lab.part("sleep", "tiny")) for _ in range(4)]
    # First all, for each session sweeps when it is ready.
    for trial in left:
        trial.wait_for("busy")
    for trial in left:
        trial.strike("busy", Victim.SUPERVISOR, Victim.CLIENT)
    for trial in left:
        trial.wait_for_processes()
    sessions = {session for trial in left for session in trial.sessions}
    sockets = {path for trial in left for path in trial.socket_dirs}
    groups = {path for session in sessions for path in observe.control_groups(session)}
    assert len(observe.entries(dirs.sessions)) == len(sessions) == len(sockets) == 4
    assert all(path.is_dir() for path in sockets) and len(groups) >= 4
    command = [sys.executable, "-m", "kernel_provisioner.cli.main", "sandbox", "gc", "--json"]
    sweeps = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    lines: list[str] = []
    for process in sweeps:
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        printed = json.loads(output)
        assert printed["left"] == []
        lines += printed["done"]
    assert all(line.endswith("removed what its supervisor left") for line in lines)
    assert {line.split()[1].rstrip(":") for line in lines} == sessions
    assert not [path for path in sockets | groups if path.exists()]
    for trial in left:
        trial.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_20_sandboxes_at_once(dirs: StateDirs) -> None:
    """dockerspawner#196: all alive, each with its own variables; the death of one is its own."""

    async def body() -> None:
        gate = asyncio.Semaphore(AT_A_TIME)

        async def one(stack: AsyncExitStack, number: int) -> Sandbox:
            async with gate:
                box = await stack.enter_async_context(sandbox(profile="tiny"))
                await box.run(f"mine = {number}")
                return box

        async with AsyncExitStack() as stack:
            boxes = await asyncio.gather(*(one(stack, number) for number in range(MANY)))
            assert len(live_sessions(dirs)) == MANY
            answers = await asyncio.gather(*(box.run("print(mine * 2)") for box in boxes))
            assert [answer.text for answer in answers] == [f"{2 * n}\n" for n in range(MANY)]
            first = identify(boxes[0].supervisor_pid)
            assert first is not None
            os.kill(first.pid, signal.SIGKILL)
            session = str(boxes[0].provisioner.session_id)
            await gone_within(2.0, lambda: is_running(first) or observe.members(session))
            answers = await asyncio.gather(*(box.run("print(mine)") for box in boxes[1:]))
            assert [answer.text for answer in answers] == [f"{n}\n" for n in range(1, MANY)]

    asyncio.run(body())
