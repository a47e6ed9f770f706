"""A kernel that is not there yet, or never came, must not keep its server from stopping.

From the first moment of a start until its success, and after a failure for ever, jupyter_client
(8.10) has a kernel among its manager's pending ones. A jupyter_server (2.21) that stops asks for
the end of each of them, and is answered 404 where the kernel is not there: its other kernels end,
but the server does not, and what was being started comes up in it. Met with a plain kernel as well;
but with ours a start may take a whole boot, and one that is refused is an ordinary answer.
"""

from __future__ import annotations

import sys
from typing import Any


def unlist_start(kernels: Any, kernel_id: str) -> None:
    """Take a start that begins out of what ``kernels``, a multi-kernel manager, has pending.

    The server's process then ends, and with it, as with its owner, what was started until then.
    Only where being pending serves nothing else: other managers than jupyter_server's end a
    starting kernel by it, and so does jupyter_server's with ``use_pending_kernels``.
    """
    server = sys.modules.get("jupyter_server.services.kernels.kernelmanager")
    if server is None or not isinstance(kernels, server.MappingKernelManager):
        return
    if not getattr(kernels, "use_pending_kernels", False):
        kernels._pending_kernels.pop(kernel_id, None)
