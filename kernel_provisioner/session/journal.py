"""The write-ahead record of one running session, and the copies of sources that it names.

Everything that the session makes on the host is in its record before it exists, so that a sweep can
remove it if this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kernel_provisioner.engines.base import Leftovers, SourceMount
from kernel_provisioner.engines.leftovers import remove_directory, remove_leftovers
from kernel_provisioner.errors import HostRefused
from kernel_provisioner.processes import boot_id, identify
from kernel_provisioner.records import Record, open_record, remove_record, write_record
from kernel_provisioner.session.request import Start


class Journal:
    """The record of a session whose supervisor is this process."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._record: Record | None = None
        self._staging: Path | None = None

    def open(self) -> None:
        """Write the record before anything of the session exists. Raises HostRefused."""
        start = self._start
        me = identify(os.getpid())
        assert me is not None  # this process runs
        record = Record(
            session=start.session,
            kernel_id=start.kernel_id,
            engine=start.engine,
            profile=start.profile.name,
            boot=boot_id(),
            supervisor=me,
            socket_dir=start.socket_dir,
            created=time.time(),
            run_dir=start.run_dir,
        )
        try:
            start.dirs.receipts.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Better no session than one that ends without a receipt.
            if not os.access(start.dirs.receipts, os.W_OK | os.X_OK):
                raise PermissionError(0, f"{start.dirs.receipts} is not writable")
            open_record(start.dirs, record)
        except OSError as error:
            raise self._unrecorded(error) from None
        self._record = record

    def _unrecorded(self, error: OSError) -> HostRefused:
        return HostRefused(
            f"the session cannot be recorded in {self._start.dirs.state} ({error.strerror}).",
            remedy="make that directory writable, and see that its disk is not full.",
            phase="record",
        )

    def note(self, leftovers: Leftovers) -> None:
        """Record what the guest makes or has made. Raises HostRefused."""
        if self._staging is not None and self._staging not in leftovers.directories:
            leftovers = Leftovers(
                leftovers.processes, leftovers.cgroups, (*leftovers.directories, self._staging)
            )
        try:
            self._write(leftovers=leftovers)
        except OSError as error:
            raise self._unrecorded(error) from None

    def note_export(self, directory: Path) -> None:
        """Record where artifacts are about to be published. Raises OSError."""
        self._write(export_dir=directory)

    def _write(self, **changes: object) -> None:
        assert self._record is not None  # open() was called
        self._record = replace(self._record, **changes)  # type: ignore[arg-type]
        write_record(self._start.dirs, self._record)

    @property
    def mounts(self) -> tuple[SourceMount, ...] | None:
        """What is to be mounted; None if a source has to be copied before."""
        sources = self._start.sources
        if any(source["kind"] == "sqlite" for source in sources):
            return None
        return tuple(SourceMount(source["name"], Path(source["path"])) for source in sources)

    async def stage_sources(self, budget: Callable[[], float]) -> tuple[SourceMount, ...]:
        """Copy databases, each within ``budget()`` seconds; return what is to be mounted.

        Raises SourceRefused, HostRefused, OSError.
        """
        start = self._start
        mounts = []
        for source in start.sources:
            path = Path(source["path"])
            if source["kind"] == "sqlite":
                from kernel_provisioner.sqlite_copy import stage_sqlite

                if self._staging is None:
                    self._staging = start.dirs.state / "staging" / start.session
                    self.note(Leftovers(directories=(self._staging,)))
                    # Private: a database below the owner's home must not become readable here.
                    self._staging.mkdir(mode=0o700, parents=True)
                # By its unique name: two sources may have files of one name.
                target = self._staging / source["name"]
                # Imported here: a session without databases is launched before there is a loop.
                from asyncio import to_thread

                await to_thread(stage_sqlite, path, target, deadline=time.monotonic() + budget())
                path = target
            mounts.append(SourceMount(source["name"], path))
        return tuple(mounts)

    def remove_staging(self) -> list[str]:
        """Remove the copies; return what could not be."""
        return remove_directory(self._staging, self._start.session) if self._staging else []

    def remove_unclaimed(self) -> list[str]:
        """End and remove what a launch made that came to no guest; return what could not be.

        An engine undoes its own launch; what it could not undo must not lose its record.
        """
        if self._record is None:
            return []
        return remove_leftovers(self._record.leftovers, self._start.session)

    def close(self) -> None:
        """Forget the session: nothing that its record names is left."""
        with contextlib.suppress(OSError):
            remove_record(self._start.dirs, self._start.session)
