"""A start is taken out of the pending ones only where that keeps a server from stopping."""

from __future__ import annotations

import pytest
from jupyter_client.multikernelmanager import AsyncMultiKernelManager
from jupyter_server.services.kernels.kernelmanager import AsyncMappingKernelManager

from kernel_provisioner.pending import unlist_start

LISTED = {"starting": None, "other": None}


@pytest.mark.parametrize(
    ("manager", "options", "left"),
    [
        (AsyncMappingKernelManager, {}, {"other"}),
        # These end a kernel that is starting, and find it by this.
        (AsyncMappingKernelManager, {"use_pending_kernels": True}, {"starting", "other"}),
        (AsyncMultiKernelManager, {}, {"starting", "other"}),
    ],
)
def test_a_start_is_unlisted_where_a_server_could_not_stop(
    manager: type[AsyncMultiKernelManager], options: dict[str, bool], left: set[str]
) -> None:
    kernels = manager(**options)
    kernels._pending_kernels = dict(LISTED)
    unlist_start(kernels, "starting")
    unlist_start(kernels, "starting")  # as with a restart, which is none of the pending ones
    assert set(kernels._pending_kernels) == left
