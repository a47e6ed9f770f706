"""The microVM's agent in a chroot of the image, in namespaces and a cgroup of its own: no VM."""

from __future__ import annotations

import asyncio
import io
import secrets
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from jupyter_client import AsyncKernelClient

from kernel_provisioner.engines.base import CHANNELS, GuestSpec, Hold, SourceMount
from kernel_provisioner.engines.bwrap import seccomp
from kernel_provisioner.engines.bwrap.layout import layout
from kernel_provisioner.engines.smolvm import command, connection, live
from kernel_provisioner.images.receipt import load_image
from kernel_provisioner.paths import guest_code_dir, state_dirs
from kernel_provisioner.profiles import BUILTIN

_MACHINE = """
mount -t cgroup2 group "$1"
mkdir "$1/$5"
cd "$1/$5"
echo 0 > cgroup.procs
eval "$6"
cd /
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

_GROUP_GONE = """
mount -t cgroup2 group "$1"
while grep -q "populated 1" "$1/$2/cgroup.events"; do sleep 0.01; done
find "$1/$2" -depth -type d -exec rmdir {} ";"
"""


class Machine:
    """An agent's process, a control connection to it, and the frames that came."""

    def __init__(self, process: subprocess.Popen[bytes], spec: GuestSpec, directory: Path) -> None:
        self.process = process
        self.spec = spec
        self.directory = directory
        self.frames: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.samples: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.holds: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.control: connection.Control
        self.root = Path()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.still = live.Standstill(lambda frame: self.control.send(frame), self.gone)

    async def connect(self) -> socket.socket:
        """Return a greeted control connection as soon as the agent listens."""
        deadline = time.monotonic() + 60
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
        self.control = connection.Control(sock, self._sort, lambda why: self.gone.set_result(None))
        plan = layout(self.spec)
        self.control.send(command.guest_plan(self.spec, plan, frozenset(), seccomp.program()))
        return await self.frame()

    def _sort(self, message: dict[str, Any]) -> None:
        if "frozen" in message or "thawed" in message:
            self.holds.put_nowait(message)
            self.still.take(message)
        else:
            (self.samples if "sample" in message else self.frames).put_nowait(message)

    async def frame(self, timeout: float = 60) -> dict[str, Any]:
        return await asyncio.wait_for(self.frames.get(), timeout)

    def frozen(self) -> AbstractAsyncContextManager[Hold]:
        return self.still.frozen()

    def artifacts(self) -> BinaryIO:
        return connection.open_artifacts(self.root / "agent")

    async def contents(self) -> dict[str, bytes]:
        """Export and return the files by name."""
        with self.artifacts() as stream:
            data = await asyncio.to_thread(stream.read)
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            files = [(member.name, tar.extractfile(member)) for member in tar if member.isreg()]
            return {name: file.read() for name, file in files if file is not None}

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
        await client.wait_for_ready(timeout=60)
        return client


@asynccontextmanager
async def machine(directory: Path, group_is: str = "true") -> AsyncIterator[Machine]:
    """An agent in namespaces of its own; whatever happens, nothing of it is left.

    ``group_is`` is a command in the directory of its cgroup: not every kernel has one to give.
    """
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
        # Without a user namespace of its own its user's processes elsewhere count as well: the
        # sandboxes of the browser's tests, which run beside these.
        profile=replace(BUILTIN["benchmark"], tasks=1024),
        image_root=image,
        guest_code=code,
        socket_dir=directory,
        sources=(SourceMount("data", source),),
    )
    group = f"backintel-test-{secrets.token_hex(8)}"
    places = [*map(str, (stage, image, code, source)), group, group_is]
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
        subprocess.run(
            ["unshare", "--mount", "bash", "-euc", _GROUP_GONE, "gone", str(stage), group],
            check=True,
            timeout=60,
        )


async def run(client: AsyncKernelClient, code: str) -> str:
    texts: list[str] = []

    def collect(message: Mapping[str, Any]) -> None:
        content = message["content"]
        texts.append(content.get("text") or content.get("evalue") or "")

    await client.execute_interactive(code, timeout=60, output_hook=collect, allow_stdin=False)
    return "".join(texts).strip()
