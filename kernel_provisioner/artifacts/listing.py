"""What lies in /artifacts of a running guest, judged by the rules of an export (spec J1). No I/O.

Entries are hostile: a name is shown as it is only if it may leave, else escaped, with the reason.
Nothing here lets anything leave; an export reads and judges again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernel_provisioner.artifacts.tarstream import (
    ExportLimits,
    TreeRules,
    check_file_type,
    shown,
    split_name,
)
from kernel_provisioner.engines.base import Listed
from kernel_provisioner.errors import ExportRefused

MAX_SHOWN = 512
"""More than an export may hold, so that what is too much is seen."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Files by name, as JSON objects with name, size (bytes), mtime (seconds) and refused."""

    artifacts: list[dict[str, object]]
    truncated: bool
    bytes: int

    def as_dict(self) -> dict[str, object]:
        """Return the JSON form."""
        return {"artifacts": self.artifacts, "truncated": self.truncated, "bytes": self.bytes}


def judge(entries: Sequence[Listed], limits: ExportLimits) -> Listing:
    """Apply the rules to each entry in order; one that breaks them does not count for the next."""
    rules = TreeRules(limits)
    artifacts: list[dict[str, object]] = []
    total = 0
    for entry in entries:
        directory = entry.kind == b"5"
        reason = _reason(rules, entry, limits, directory)
        if directory and reason is None:
            continue
        if len(artifacts) == MAX_SHOWN:
            return Listing(artifacts, True, total)
        artifacts.append(
            {
                "name": shown(entry.name) if reason else entry.name.decode(),
                "size": entry.size,
                "mtime": entry.mtime,
                "refused": reason,
            }
        )
        total += entry.size
    return Listing(artifacts, False, total)


def _reason(rules: TreeRules, entry: Listed, limits: ExportLimits, directory: bool) -> str | None:
    """Return why the entry may not leave."""
    try:
        if not directory:
            check_file_type(entry.kind, entry.name)
        path = split_name(entry.name, depth=limits.depth)
        if directory:
            rules.add_directory(path)
        else:
            rules.add_file(path, entry.size)
    except ExportRefused as error:
        return error.message.removesuffix("; nothing was published.") + "."
    return None
