"""``backintel sessions``: which sandboxes run now."""

from __future__ import annotations

import argparse
import time

from kernel_provisioner.cli.output import emit
from kernel_provisioner.errors import EXIT_DONE
from kernel_provisioner.paths import state_dirs
from kernel_provisioner.records import live_sessions

SCHEMA = "backintel.sessions/1"


def sessions(options: argparse.Namespace) -> int:
    """List the sessions whose supervisor runs."""
    live = live_sessions(state_dirs())
    if options.json:
        listing = [
            {
                "session": record.session,
                "kernel_id": record.kernel_id,
                "engine": record.engine,
                "profile": record.profile,
                "created": record.created,
                "supervisor_pid": record.supervisor.pid,
            }
            for record in live
        ]
        emit({"schema": SCHEMA, "sessions": listing})
        return EXIT_DONE
    for record in live:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        print(
            f"{record.session}  {record.engine}  {record.profile}  since {since}  "
            f"pid {record.supervisor.pid}"
        )
    if not live:
        print("no sandbox is running.")
    return EXIT_DONE


COMMANDS = {"sessions": sessions}
