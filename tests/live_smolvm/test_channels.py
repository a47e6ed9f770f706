"""The real SmolVM: its channels share one device, and no client holds up another's."""

from __future__ import annotations

import asyncio

import pytest
import zmq
from live_guest import PACE
from product import Session, swept

_MUCH = "for _ in range(100): print('x' * 50_000)\nprint('begun')\nwhile True: pass"


@pytest.mark.full
def test_a_client_that_does_not_read_holds_up_no_other() -> None:
    """Output that a second client leaves lying costs the first nothing, nor an interrupt."""

    async def body() -> None:
        session = await Session().start()
        info = session.manager.get_connection_info()
        try:
            with zmq.Context() as context, context.socket(zmq.SUB) as deaf:
                deaf.linger = 0
                deaf.rcvhwm = 1
                deaf.subscribe(b"")
                deaf.connect(f"ipc://{info['ip']}-{info['iopub_port']}")
                async with asyncio.timeout(60 * PACE):
                    while not await asyncio.to_thread(deaf.poll, 500):  # until it is subscribed
                        await session.client.execute_interactive("1", silent=True)
                async with asyncio.timeout(30 * PACE):
                    await session.begin(_MUCH)
                await session.manager.interrupt_kernel()
                reply = await session.client.get_shell_msg(timeout=30 * PACE)
                assert reply["content"]["ename"] == "KeyboardInterrupt"
        finally:
            await session.close()

    asyncio.run(body())
    assert swept() == []
