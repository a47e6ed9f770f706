"""Turns what smol-vmm says when a start fails into phase, reason and remedy. Pure.

Nothing said here is trusted beyond being shown: the program's output may quote the guest's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kernel_provisioner.engines.registry import CHOOSE_WEAKER
from kernel_provisioner.engines.smolvm.monitor import Remains
from kernel_provisioner.errors import BackIntelError, EngineUnavailable, HostRefused, StartFailed
from kernel_provisioner.plaintext import quoted

_QUOTED = 600

_QUOTE = "guest console:"
_ENDED = "before the agent was ready"
_REASON = "monitor agent: Error:"
"""What follows is why the monitor did not even try, as that a path is too long for a socket."""
_GIVE_NESTED = (
    f"on a nested host give the outer machine nested virtualization; otherwise {CHOOSE_WEAKER}"
)
_KNOWN: tuple[tuple[tuple[str, ...], type[BackIntelError], str, str, str], ...] = (
    (
        ("kvm permission denied",),
        EngineUnavailable,
        "launch",
        "the monitor may not use /dev/kvm.",
        "give this user's group access to /dev/kvm, log in again, and see "
        f"`backintel sandbox check`; or {CHOOSE_WEAKER}",
    ),
    (
        ("kvm not available", "KVM_UNAVAILABLE", "Error creating the Kvm object"),
        EngineUnavailable,
        "launch",
        "this host offers no usable KVM.",
        f"enable virtualization in the firmware or in the hypervisor, or {CHOOSE_WEAKER}",
    ),
    (
        ("no boot progress", "agent did not become ready", "timed out waiting for agent"),
        HostRefused,
        "boot",
        "the guest's kernel made no progress: this host's KVM cannot boot it, or is far too slow.",
        _GIVE_NESTED,
    ),
    (
        ("Too many open files", "EMFILE"),
        HostRefused,
        "boot",
        "the monitor ran out of open files.",
        "raise the hard limit `nofile` of this login or service.",
    ),
    (
        ("No space left on device",),
        HostRefused,
        "boot",
        "there is no space for the machine's disks.",
        "free some space where the product keeps its engines.",
    ),
    (
        ("Landlock", "landlock"),
        HostRefused,
        "launch",
        "this host's kernel cannot confine the monitor with Landlock.",
        "use Linux 5.13 or newer with Landlock enabled (the monitor is never run unconfined), or "
        f"{CHOOSE_WEAKER}",
    ),
)


def explain(printed: str, left: Remains, how: str, phase: str) -> BackIntelError:
    """Return the error of a start that failed.

    ``printed`` is the program's own output, ``left`` what its monitor left, ``how`` what was seen
    from outside.
    """
    said = quoted(message_of(printed), _QUOTED)
    record = _describe(left.record)
    shown = " ".join(part for part in (said, record) if part)
    told = f" It said: {shown}" if shown else ""
    # What it quotes of the guest's console is no word of its own.
    own, quote, _ = printed.partition(_QUOTE)
    for signs, kind, known_phase, cause, remedy in _KNOWN:
        if any(sign in own for sign in signs):
            return kind(f"{cause}{told}", remedy=remedy, phase=known_phase)
    silent = not quote and not left.console.strip() and _REASON not in printed
    if _ENDED in printed and silent:
        # Where KVM cannot run the guest, its monitor gives up in one way or the other.
        return HostRefused(
            f"the guest's kernel ended without a word: this host's KVM cannot boot it.{told}",
            remedy=_GIVE_NESTED,
            phase="boot",
        )
    # The program quotes only the console's beginning; why a guest ended stands at its end.
    last = quoted(left.console, _QUOTED)
    last = f" The guest's console ended with: {last}" if last else ""
    return StartFailed(
        f"the microVM did not come up: {how}.{told}{last}",
        remedy=f"try again. If no microVM boots here, {CHOOSE_WEAKER}",
        phase=phase,
    )


def lost(printed: str, left: Remains) -> str:
    """Return what is known of why a machine that ran is gone; empty if nothing is."""
    console = quoted(left.console.strip()[-_QUOTED:], _QUOTED)
    parts = (
        quoted(message_of(printed), _QUOTED),
        _describe(left.record),
        f"the guest's console ended with: {console}" if console else "",
    )
    return " ".join(part for part in parts if part)


def message_of(printed: str) -> str:
    """Return the message of the program's JSON error, else its last line."""
    for line in reversed(printed.splitlines()):
        text = line.strip()
        if text.startswith('{"error"'):
            try:
                error = json.loads(text)["error"]
                return f"{error['code']}: {error['message']}"
            except (ValueError, KeyError, TypeError):
                continue
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _describe(record: Mapping[str, Any] | None) -> str:
    if not record:
        return ""
    cause = quoted(str(record.get("cause", "unknown")), 80)
    code = record.get("exit_code")
    ended = f", code {code}" if isinstance(code, int) else ""
    return f"(the monitor's end: {cause}{ended})"
