"""Which kernelspecs a sandbox can stand for: those that start ipykernel from Python.

With ``JUPYTER_DEFAULT_PROVISIONER_NAME`` every plain kernelspec of a server comes here. The guest
runs the image's ipykernel and nothing else, so a kernelspec that means another program is refused
by name: a person who chose R must not get Python under its name. Kernelspecs are the owner's and
trusted; messages name a program, never its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from kernel_provisioner.errors import ConfigError

_PYTHON = re.compile(r"python(\d+(\.\d+)?)?(\.exe)?", re.IGNORECASE)
_MODULES = ("ipykernel_launcher", "ipykernel")
# Options of the host's interpreter that say nothing about what a cell does.
_INTERPRETER = re.compile(r"-X\w+(=\w*)?|-[BEIsu]+")
_CONNECTION = ("-f", "{connection_file}", "--f={connection_file}", "-f={connection_file}")


def check_argv(display_name: str, argv: Sequence[str]) -> None:
    """Refuse a kernelspec whose ``argv`` means anything but ipykernel with default settings.

    Accepted is what ipykernel itself installs: a Python of any path, ``-m ipykernel_launcher`` (or
    ``-m ipykernel``) and the connection file. Raises ConfigError.
    """
    python, *rest = argv or [""]
    program = PurePath(python).name[:100]
    while rest and _INTERPRETER.fullmatch(rest[0]):
        rest.pop(0)
    module = rest[1] if len(rest) > 1 and rest[0] == "-m" else ""
    if not _PYTHON.fullmatch(program) or module not in _MODULES:
        what = f"{program} -m {module[:100]}" if module else program
        raise ConfigError(
            f"the kernel {display_name[:100]!r} starts {what!r}; a sandbox has only its image's "
            "ipykernel.",
            remedy="choose a Python kernel, or run this one by a server that does not send every "
            "kernel to the sandbox (JUPYTER_DEFAULT_PROVISIONER_NAME).",
        )
    options = [option for option in rest[2:] if option not in _CONNECTION]
    if options:
        raise ConfigError(
            f"the kernel {display_name[:100]!r} gives ipykernel {len(options)} more argument(s), "
            "which a sandbox does not pass on.",
            remedy="take them out of its kernel.json, or put the settings into the notebook.",
        )


def check_encryption(policy: object) -> None:
    """Refuse ``transport_encryption='required'``: there is no CurveZMQ on our sockets.

    They are Unix sockets in a directory of mode 0700, so ``disabled`` and ``auto`` are right.
    Raises ConfigError.
    """
    if str(policy).lower() == "required":
        raise ConfigError(
            "transport_encryption: 'required' asks for CurveZMQ; a sandbox is reached through "
            "private Unix sockets that carry none.",
            remedy="set it to 'auto' or 'disabled'.",
        )
