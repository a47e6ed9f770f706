"""``backintel export``: the artifacts of a running sandbox into a directory (spec J2)."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

from kernel_provisioner.cli.output import emit
from kernel_provisioner.errors import EXIT_DONE, NotRunning
from kernel_provisioner.paths import state_dirs
from kernel_provisioner.records import live_sessions
from kernel_provisioner.session.ask import EXPORT_TIMEOUT_S, ask_json

SCHEMA = "backintel.export/1"


def export(options: argparse.Namespace) -> int:
    """Publish all artifacts, or nothing. Raises BackIntelError."""
    record = next(
        (live for live in live_sessions(state_dirs()) if live.session == options.session), None
    )
    if record is None:
        raise NotRunning(
            f"no sandbox {options.session[:64]!r} is running.",
            remedy="see `backintel sessions` for those that are.",
        )
    # The supervisor works in another directory. Not normalized: `..` after a link means its target.
    target = Path(os.getcwd(), options.out)
    made = asyncio.run(
        ask_json(record.socket_dir, "export", timeout=EXPORT_TIMEOUT_S, destination=str(target))
    )
    if options.json:
        emit({"schema": SCHEMA, "out": str(target), **made})
        return EXIT_DONE
    for artifact in made["artifacts"]:
        print(f"{artifact['sha256']}  {artifact['size']:>12}  {artifact['name']}")
    print(f"{len(made['artifacts'])} artifacts in {target}; frozen for {made['frozen_s']:.3f} s")
    return EXIT_DONE


COMMANDS = {"export": export}
