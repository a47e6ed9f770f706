"""First program in the sandbox: sets limits, attests what holds, then becomes the kernel.

Started by bubblewrap as ``python3 -I -B init.py``, with the plan in one argument (no secrets:
those come in the ``go`` frame, which it waits for after attesting). It trusts the host; whatever
runs after ``kernel.run`` is not trusted.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys

# Imports make many objects that live on; collecting among them is a tenth of their time.
gc.disable()

GUEST_DIR = "/opt/backintel/guest"
sys.path.insert(0, GUEST_DIR)

import attest  # noqa: E402 - found by the line above; -I keeps the script's directory out
import limits  # noqa: E402
import wire  # noqa: E402


def close_strays(keep: set[int]) -> None:
    """Close every descriptor from 3 on but these, and keep these from programs started later."""
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd >= 3 and fd not in keep:
            try:
                os.close(fd)
            except OSError:  # the descriptor of the listing itself
                continue
    for fd in keep:
        os.set_inheritable(fd, False)


def main() -> None:
    """Run the steps of the module's docstring; the process ends with the kernel."""
    # ipykernel takes interrupts only while a cell runs; until then one would end the start.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    plan = json.loads(sys.argv[1])
    listeners: dict[str, int] = plan["listeners"]
    control = socket.socket(fileno=plan["control"])
    targets: int = plan["targets"]
    close_strays({*listeners.values(), control.fileno(), targets})
    if os.getpgrp() != os.getpid():
        # The kernel leads its own group, so that an interrupt reaches its children but not the
        # sandbox's process 1.
        os.setpgid(0, 0)
    os.umask(0o022)
    limits.apply(plan["rlimits"])
    wire.send(control, {"v": wire.VERSION, "attest": attest.facts(plan["tmpfs"])})

    # What takes longest is done while the host compares the facts and checks the image.
    import kernel

    kernel_class = kernel.preload()
    go = wire.receive(control)
    del sys.argv[1:]
    # User code must not find our modules under their short names.
    sys.path.remove(GUEST_DIR)
    for name in ("attest", "interrupts", "kernel", "lazy", "limits", "wire"):
        del sys.modules[name]
    kernel.run(go, kernel_class, listeners, control, targets)


main()
