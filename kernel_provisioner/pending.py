"""A kernel whose first start raised must not keep its server from stopping.

jupyter_client (8.10) leaves such a kernel among its manager's pending ones. jupyter_server (2.21)
then asks for it when it stops, gets a 404, and ends neither its other kernels nor itself; met with
a plain kernel as well. With ours a start that is refused is an ordinary answer.
"""

from __future__ import annotations

from typing import Any


def forget_failed_start(kernels: Any, kernel_id: str) -> None:
    """Once this start is over, take it out of what ``kernels``, a multi-kernel manager, awaits."""
    pending = getattr(kernels, "_pending_kernels", {})
    start = pending.get(kernel_id)
    if start is None:
        return

    def forget(_: object) -> None:
        if pending.get(kernel_id) is start:
            del pending[kernel_id]

    start.add_done_callback(forget)
