"""Guest code that knows the session's key and lies: bounded by the clocks, told as what it is."""

from __future__ import annotations

import asyncio
import textwrap
import time

import pytest
from sandboxes import Result, sandbox

from kernel_provisioner.errors import Reason

pytestmark = pytest.mark.sandbox

_FORGE = textwrap.dedent(
    """
    import json, os, signal, threading, time, uuid
    from ipykernel.kernelapp import IPKernelApp
    app = IPKernelApp.instance()
    kernel = app.kernel
    parent = kernel.get_parent("shell")["header"]
    identity = kernel._shell_parent_ident.get()[0]

    def forge(sock, kind, content, *idents):
        header = {"msg_id": uuid.uuid4().hex, "session": kernel.session.session, "username": "x",
                  "date": "2024-01-01T00:00:00Z", "msg_type": kind, "version": "5.3"}
        parts = [json.dumps(part, default=str).encode() for part in (header, parent, {}, content)]
        sock.send_multipart([*idents, b"<IDS|MSG>", kernel.session.sign(parts), *parts])

    OK = {"status": "ok", "execution_count": 1, "payload": [], "user_expressions": {}}
    """
)


def _lie(code: str, **settings: object) -> tuple[Result, str, float]:
    """Run hostile code that never ends; return what its cell got, the reason, the seconds."""

    async def body() -> tuple[Result, str, float]:
        async with sandbox(**settings) as box:
            began = time.monotonic()
            result = await box.run(_FORGE + textwrap.dedent(code), timeout=60)
            async with asyncio.timeout(60):
                await box.provisioner.wait()
            assert box.provisioner.ended is not None
            return result, str(box.provisioner.ended["reason"]), time.monotonic() - began

    return asyncio.run(body())


def test_a_reply_before_its_time_leaves_the_run_deadline() -> None:
    result, reason, seconds = _lie(
        """
        forge(app.shell_socket, 'execute_reply', OK, identity)
        forge(app.iopub_thread, 'status', {'execution_state': 'idle'}, b'status')
        while True: pass
        """,
        cell_deadline=2,
        run_deadline=12,
    )
    assert result.reply["content"]["status"] == "ok"  # the guest's word; it cost the guest its life
    assert reason == Reason.RUN_DEADLINE
    assert seconds < 12 + 5


@pytest.mark.parametrize("status", [137, 143, 134])
def test_an_exit_status_like_a_signals_is_not_out_of_memory(status: int) -> None:
    """colabtools#3070: out of memory is not claimed for a status that only looks like it."""
    result, reason, _ = _lie(f"os._exit({status})")
    assert reason == Reason.KERNEL_CRASHED
    assert result.error.startswith("KernelCrashed")


_TRICKS = {
    "stopped itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "forged idle": "forge(app.iopub_thread, 'status', {'execution_state': 'idle'}, b'status')",
    "forged input requests": "for _ in range(2000): forge(app.stdin_socket, 'input_request', "
    "{'prompt': '', 'password': False}, identity)",
    "deaf to interrupts": "signal.signal(signal.SIGINT, signal.SIG_IGN)",
}


@pytest.mark.parametrize("trick", sorted(_TRICKS))
def test_no_trick_moves_the_cells_deadline(trick: str) -> None:
    code = f"{_TRICKS[trick]}\nwhile True: pass"
    _, reason, seconds = _lie(code, cell_deadline=3, run_deadline=40, on_deadline="cancel")
    assert reason == Reason.CELL_DEADLINE
    assert seconds < 30
