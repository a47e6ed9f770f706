"""The monitor as a process: what it was told, who it is, and that it dies with its parent.

A host whose KVM cannot boot the guest keeps the monitor alive for some 20 s, which is enough.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from live_guest import PACE

from kernel_provisioner.engines.base import GuestSpec, Leftovers, ProcessIdentity, SourceMount
from kernel_provisioner.engines.leftovers import remove_leftovers
from kernel_provisioner.engines.smolvm import SmolvmEngine, command, monitor
from kernel_provisioner.engines.smolvm.guest import SmolvmGuest
from kernel_provisioner.images.receipt import load_image
from kernel_provisioner.paths import StateDirs, guest_code_dir, state_dirs
from kernel_provisioner.processes import is_running
from kernel_provisioner.profiles import BUILTIN


def make_spec(directory: Path, source: Path) -> GuestSpec:
    return GuestSpec(
        session=secrets.token_hex(8),
        profile=BUILTIN["benchmark"],
        image_root=load_image(state_dirs()).root,
        guest_code=guest_code_dir(),
        socket_dir=directory,
        sources=(SourceMount("data", source),),
        backstop_s=60.0 * PACE,
    )


@pytest.fixture
def spec(tmp_path: Path, dirs: StateDirs) -> Iterator[GuestSpec]:
    source = tmp_path / "source"
    source.mkdir()
    directory = Path(tempfile.mkdtemp(prefix="backintel-process-"))
    yield make_spec(directory, source)
    directory.rmdir()


def found_machine(launcher: ProcessIdentity, timeout: float = 20 * PACE) -> ProcessIdentity:
    deadline = time.monotonic() + timeout
    while (machine := monitor.find(launcher)) is None:
        assert time.monotonic() < deadline and is_running(launcher)
        time.sleep(0.005)
    return machine


def gone(processes: tuple[ProcessIdentity, ...], timeout: float = 2.0 * PACE) -> bool:
    deadline = time.monotonic() + timeout
    while any(is_running(process) for process in processes):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


_RECORDER = """#!/bin/bash
# Stands in for the monitor: keeps what it would boot, which the real one deletes once read.
cp "$2" "$HOME/told.new" && mkfifo "$HOME/forever" && mv "$HOME/told.new" "$HOME/told"
read -r < "$HOME/forever"
"""


@pytest.fixture
def recorded(spec: GuestSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GuestSpec:
    """The same machine, with the recorder in the monitor's place."""
    code = tmp_path / "guest"
    shutil.copytree(spec.guest_code, code, ignore=shutil.ignore_patterns("__pycache__"))
    (code / "recorder").write_text(_RECORDER)
    for path in (code, code / "recorder"):
        path.chmod(0o755)
    real = command.environ

    def environ(view: command.View, start_s: float) -> dict[str, str]:
        recorder = f"{view.guest_code}/recorder"
        return {**real(view, start_s), "SMOLVM_BOOT_BINARY": recorder}

    monkeypatch.setattr(command, "environ", environ)
    return replace(spec, guest_code=code)


def test_what_the_monitor_boots_is_what_was_asked(recorded: GuestSpec) -> None:
    async def scenario() -> None:
        guest: SmolvmGuest = await SmolvmEngine().launch(recorded).claim()
        try:
            launcher = guest.leftovers.processes[0]
            machine = found_machine(launcher)
            path = guest.leftovers.directories[0] / "state" / "told"
            deadline = time.monotonic() + 20 * PACE
            while not path.exists():
                assert time.monotonic() < deadline and is_running(machine)
                time.sleep(0.005)
            told = json.loads(path.read_text())
            # Whatever the program does to the modes of its own.
            for directory in guest.leftovers.directories:
                assert stat.S_IMODE(directory.stat().st_mode) == 0o700
            assert told["resources"]["network"] is False
            assert (told["resources"]["cpus"], told["resources"]["memory_mib"]) == (1, 768 - 16)
            assert (told["storage_size_gb"], told["overlay_size_gb"]) == (3, 1)
            assert told["ports"] == [] and told["extra_disks"] == []
            assert all(mount["read_only"] for mount in told["mounts"])
            assert [mount["target"] for mount in told["mounts"]] == ["/mnt/g", "/mnt/s0"]
            sockets = told["published_sockets"]
            assert len(sockets) == 6
            assert {socket["direction"] for socket in sockets} == {"expose"}
            names = Path(f"/proc/{machine.pid}/environ").read_bytes().split(b"\0")
            assert b"SMOLVM_SECCOMP=enforce" in names
            assert b"SMOLVM_LANDLOCK=enforce" in names
            if os.geteuid() == 0:
                status = Path(f"/proc/{machine.pid}/status").read_text()
                assert f"\nUid:\t{guest.limits['monitor_uid']}\t" in status
                own = os.readlink("/proc/self/ns/net")
                assert os.readlink(f"/proc/{machine.pid}/ns/net") != own
        finally:
            assert await guest.destroy(5 * PACE) == []

    asyncio.run(scenario())


def test_kill_during_boot_ends_both_processes(spec: GuestSpec) -> None:
    async def scenario() -> None:
        guest = await SmolvmEngine().launch(spec).claim()
        try:
            launcher = guest.leftovers.processes[0]
            processes = (launcher, found_machine(launcher))
            guest.kill()
            assert (await guest.wait()).status == -signal.SIGKILL
        finally:
            assert await guest.destroy(5 * PACE) == []
        assert gone(processes)
        assert [path for path in guest.leftovers.directories if path.exists()] == []

    asyncio.run(scenario())


_SUPERVISOR = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = {here!r}
from test_process import SmolvmEngine, found_machine, make_spec
async def scenario():
    spec = make_spec(Path({directory!r}), Path({source!r}))
    guest = await SmolvmEngine().launch(spec).claim()
    launcher = guest.leftovers.processes[0]
    machine = found_machine(launcher)
    print(spec.session, *(f"{{p.pid}}:{{p.start_time}}" for p in (launcher, machine)), flush=True)
    sys.stdin.read()
asyncio.run(scenario())
"""


def test_sigkill_of_the_supervisor_ends_both_processes(
    tmp_path: Path, dirs: StateDirs, spec: GuestSpec
) -> None:
    here = Path(__file__).parent
    code = _SUPERVISOR.format(
        here=[str(here), str(here.parent), str(here.parent.parent / "contract")],
        directory=str(spec.socket_dir),
        source=str(spec.sources[0].path),
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        session, *pairs = parent.stdout.readline().split()
        processes = tuple(ProcessIdentity(*map(int, pair.split(":"))) for pair in pairs)
        assert len(processes) == 2
        parent.kill()
        parent.wait()
        assert gone(processes)
    left = SmolvmEngine(dirs).plan(
        GuestSpec(
            session=session,
            profile=spec.profile,
            image_root=spec.image_root,
            guest_code=spec.guest_code,
            socket_dir=spec.socket_dir,
        )
    )
    assert remove_leftovers(Leftovers(processes, (), left.directories), session) == []
    assert [path for path in left.directories if path.exists()] == []
