"""The microVM's agent and enclosure, for real but without a VM: in a chroot of the image.

The agent needs a kernel and to be root, but no hypervisor: all that it promises about the kernel's
process is proven on every host. What needs the VM itself is in tests/live_smolvm.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import secrets
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jupyter_client import AsyncKernelClient

from kernel_provisioner import wire
from kernel_provisioner.engines.base import CHANNELS, GuestSpec, SourceMount
from kernel_provisioner.engines.bwrap import seccomp
from kernel_provisioner.engines.bwrap.layout import layout
from kernel_provisioner.engines.smolvm import attestation, command, connection
from kernel_provisioner.images.receipt import load_image
from kernel_provisioner.paths import guest_code_dir, state_dirs
from kernel_provisioner.profiles import BUILTIN

pytestmark = [pytest.mark.sandbox, pytest.mark.root]

_MACHINE = """
mount -t cgroup2 group "$1"
mkdir "$1/$5"
echo 0 > "$1/$5/cgroup.procs"
echo "$6" > "$1/$5/cgroup.max.descendants"
umount "$1"
mount -t tmpfs -o mode=0755 stage "$1"
mkdir "$1"/upper "$1"/work "$1"/root
mount -t overlay -o "lowerdir=$2,upperdir=$1/upper,workdir=$1/work" stage "$1"/root
cd "$1"/root
mkdir -p mnt/g mnt/s0
mount --bind "$3" mnt/g
mount --bind "$4" mnt/s0
mount -t tmpfs run run
mount -t tmpfs tmp tmp
mount -t proc proc proc
mount --rbind /dev dev
exec unshare --cgroup chroot . /usr/bin/python3 -I -B /mnt/g/agent.py
"""


class Machine:
    """An agent's process, a control connection to it, and the frames that came."""

    def __init__(self, process: subprocess.Popen[bytes], spec: GuestSpec, directory: Path) -> None:
        self.process = process
        self.spec = spec
        self.directory = directory
        self.frames: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.samples: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.control: connection.Control
        self.root = Path()

    async def connect(self) -> socket.socket:
        """Return a greeted control connection as soon as the agent listens."""
        deadline = time.monotonic() + 20
        listing = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while not (children := listing.read_text().split()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        self.root = Path(f"/proc/{children[0]}/root/run/backintel")
        ended = lambda: self.process.poll() is not None  # noqa: E731
        return await connection.connect(self.root / "agent", deadline, ended)

    async def boot(self) -> Mapping[str, Any]:
        """Connect, send the plan, return the attestation's frame."""
        sock = await self.connect()
        self.control = connection.Control(sock, self._sort, lambda why: None)
        plan = layout(self.spec)
        self.control.send(command.guest_plan(self.spec, plan, frozenset(), seccomp.program()))
        return await self.frame()

    def _sort(self, message: dict[str, Any]) -> None:
        queue = self.samples if "sample" in message else self.frames
        queue.put_nowait(message)

    async def frame(self, timeout: float = 30) -> dict[str, Any]:
        return await asyncio.wait_for(self.frames.get(), timeout)

    async def release(self) -> AsyncKernelClient:
        """Send the go and return a client that is ready."""
        key = secrets.token_hex(8)
        go = {"key": key, "signature_scheme": "hmac-sha256"}
        self.control.send({"op": "go", "connection": go, "environment": {"GIVEN": "yes"}})
        assert await self.frame() == {"ready": True}
        client = AsyncKernelClient()
        for port in range(1, len(CHANNELS) + 1):
            (self.directory / f"k-{port}").symlink_to(self.root / str(port))
        ports = {f"{name}_port": port for port, name in enumerate(CHANNELS, start=1)}
        client.load_connection_info(
            {"transport": "ipc", "ip": str(self.directory / "k"), **go, **ports}
        )
        client.start_channels()
        await client.wait_for_ready(timeout=30)
        return client


@asynccontextmanager
async def machine(directory: Path) -> AsyncIterator[Machine]:
    """An agent in namespaces of its own; whatever happens, nothing of it is left."""
    code = directory / "guest"
    shutil.copytree(guest_code_dir(), code, ignore=shutil.ignore_patterns("__pycache__"))
    # A container's root may not exempt itself from the out-of-memory killer, a machine's may.
    text = (code / "agent.py").read_text()
    assert '"-1000"' in text
    (code / "agent.py").write_text(text.replace('"-1000"', '"0"'))
    source = directory / "source"
    source.mkdir()
    (source / "a.txt").write_text("of the host")
    stage = directory / "stage"
    stage.mkdir()
    for path in (directory, code, source):
        path.chmod(0o755)
    image = load_image(state_dirs()).root.resolve()
    spec = GuestSpec(
        session="0123456789abcdef",
        profile=BUILTIN["benchmark"],
        image_root=image,
        guest_code=code,
        socket_dir=directory,
        sources=(SourceMount("data", source),),
    )
    places = [str(path) for path in (stage, image, code, source)]
    namespaces = ("--mount", "--net", "--pid", "--fork", "--kill-child", "--propagation=private")
    process = subprocess.Popen(
        ["unshare", *namespaces, "bash", "-euc", _MACHINE, "machine", *places],
        stdin=subprocess.DEVNULL,
    )
    made = Machine(process, spec, directory)
    try:
        yield made
    finally:
        if hasattr(made, "control"):
            made.control.close()
        process.kill()
        process.wait()


async def run(client: AsyncKernelClient, code: str) -> str:
    texts: list[str] = []

    def collect(message: Mapping[str, Any]) -> None:
        content = message["content"]
        texts.append(content.get("text") or content.get("evalue") or "")

    await client.execute_interactive(code, timeout=30, output_hook=collect, allow_stdin=False)
    return "".join(texts).strip()


_DENIED = """
import os, socket
def attempt(what):
    try:
        return what()
    except OSError as error:
        return error.strerror
print(attempt(lambda: socket.socket(40, socket.SOCK_STREAM)))
print(attempt(lambda: open('/made', 'w')))
print(attempt(lambda: open('/sources/data/made', 'w')))
print(attempt(lambda: os.listdir('/run/backintel')))
print(attempt(lambda: os.listdir('/mnt')))
print(repr(open('/proc/cmdline').read()))
print(sorted(n for n in os.listdir('/proc') if n.isdigit()) == sorted({'1', str(os.getpid())}))
print(open('/sources/data/a.txt').read(), os.environ['GIVEN'])
"""


def test_enclosure_attests_to_everything_and_denies_the_rest(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with machine(tmp_path) as made:
            message = await made.boot()
            plan = layout(made.spec)
            found = attestation.deviations(
                message, made.spec, frozenset(item.target for item in plan.items)
            )
            # This host is larger than the machine that was asked for; all else is as asked.
            assert [line for line in found if not line.startswith("the machine has")] == []
            client = await made.release()
            try:
                assert (await run(client, _DENIED)).splitlines() == [
                    "Address family not supported by protocol",
                    "Read-only file system",
                    "Read-only file system",
                    "No such file or directory",
                    "No such file or directory",
                    "''",
                    "True",
                    "of the host yes",
                ]
            finally:
                client.stop_channels()

    asyncio.run(scenario())


def test_signal_kill_artifacts_and_the_end_of_the_host(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with machine(tmp_path) as made:
            await made.boot()
            client = await made.release()
            try:
                await run(client, "open('/artifacts/a.csv', 'w').write('a,b\\n')")
                await run(client, "import os; os.symlink('/etc/shadow', '/artifacts/link.txt')")
                sample = (await asyncio.wait_for(made.samples.get(), 10))["sample"]
                assert sample["memory_bytes"] > 0 and sample["tasks"] > 0
                busy = client.execute("print('busy')\nwhile True: pass")
                while (message := await client.get_iopub_msg(timeout=20))["msg_type"] != "stream":
                    assert message
                made.control.send({"op": "signal", "signum": 2, "msg_id": busy})
                reply = await client.get_shell_msg(timeout=20)
                assert reply["content"]["ename"] == "KeyboardInterrupt"
                made.control.send({"op": "kill"})
                assert (await made.frame())["exited"] == -9
            finally:
                client.stop_channels()
            with connection.open_artifacts(made.root / "agent") as stream:
                data = await asyncio.to_thread(stream.read)
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                kinds = {member.name: member.type for member in tar}
            assert kinds == {"a.csv": tarfile.REGTYPE, "link.txt": tarfile.SYMTYPE}
            # A host that is gone ends the whole machine: its first process ends by itself.
            made.control.close()
            assert await asyncio.to_thread(made.process.wait, 10) == 0

    asyncio.run(scenario())


def test_kernel_that_ends_itself_is_reported_with_its_status(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with machine(tmp_path) as made:
            await made.boot()
            client = await made.release()
            client.execute("import os; os._exit(7)")
            try:
                assert (await made.frame())["exited"] == 7
            finally:
                client.stop_channels()

    asyncio.run(scenario())


def test_second_control_connection_is_not_served(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with machine(tmp_path) as made:
            await made.boot()
            with contextlib.suppress(TimeoutError, ConnectionError):
                sock = await connection.connect(
                    made.root / "agent", time.monotonic() + 0.3, lambda: False
                )
                sock.close()
                raise AssertionError("the agent took a second host")

    asyncio.run(scenario())


def test_a_control_connection_that_was_given_up_ends_nothing(tmp_path: Path) -> None:
    """The host asks again when the answer is late, while its first question is still on its way."""

    async def scenario() -> None:
        async with machine(tmp_path) as made:
            for _ in range(3):
                early = await made.connect()
                early.close()
            assert "attest" in await made.boot()

    asyncio.run(scenario())


def test_an_attempt_that_nobody_answers_is_soon_followed_by_another(tmp_path: Path) -> None:
    """As a monitor does that takes a connection before the guest's driver is there: for ever."""
    place = tmp_path / "agent"

    async def scenario() -> None:
        taken: list[asyncio.StreamWriter] = []

        async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            taken.append(writer)
            if len(taken) == 4:
                await reader.readexactly(4)
                writer.write(wire.encode({"v": wire.VERSION}))

        async with await asyncio.start_unix_server(take, place):
            began = time.monotonic()
            sock = await connection.connect(place, began + 20, lambda: False)
            assert time.monotonic() - began < 5
            assert len(taken) == 4
            sock.close()
            for writer in taken:
                writer.close()

    asyncio.run(scenario())


def test_enclosure_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with machine(tmp_path) as made:
            made.spec = replace(made.spec, sources=(*made.spec.sources, *made.spec.sources))
            message = await made.boot()
            assert "/sources/data" in message["failed"]
            assert (await made.frame())["exited"] == -9

    asyncio.run(scenario())
