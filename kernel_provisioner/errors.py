"""Typed errors and the one table of ends (spec G4): reason -> class -> exit status -> fate -> text.

Every error names the thing, the reason and the remedy. Nothing here holds credentials or argument
lists; callers put only names and figures into messages. Standard library only: the supervisor
imports this module on the start-up path.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

EXIT_DONE = 0
EXIT_NOTEBOOK_FAILED = 1
EXIT_USAGE = 2
EXIT_INFRASTRUCTURE = 3
EXIT_DEADLINE = 4
EXIT_LIMIT = 5
EXIT_EXPORT_REFUSED = 6
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class BackIntelError(Exception):
    """Base of all errors that a person is shown.

    ``permanent`` errors are not retried by an autorestart: trying again cannot help.
    """

    code: ClassVar[str] = "error"
    exit_status: ClassVar[int] = EXIT_INFRASTRUCTURE
    permanent: ClassVar[bool] = True

    def __init__(self, message: str, *, remedy: str = "", phase: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.phase = phase

    def __str__(self) -> str:
        text = f"{self.phase}: {self.message}" if self.phase else self.message
        return f"{text} Remedy: {self.remedy}" if self.remedy else text

    def as_dict(self) -> dict[str, object]:
        """Return the JSON form that crosses the supervisor's control socket and ``--json``."""
        return {
            "code": self.code,
            "message": self.message,
            "remedy": self.remedy,
            "phase": self.phase,
            "exit_status": self.exit_status,
            "permanent": self.permanent,
        }


class UsageError(BackIntelError):
    """The call or the notebook is wrong."""

    code = "usage"
    exit_status = EXIT_USAGE


class ConfigError(UsageError):
    """A configuration key or value is refused; the message has file, key and reason."""

    code = "config"


class ProfileRefused(UsageError):
    """The profile asks for more than the host has, or is malformed."""

    code = "profile_refused"


class SourceRefused(UsageError):
    """A source may not be given to a guest (spec E4)."""

    code = "source_refused"


class OutputRefused(UsageError):
    """The output directory cannot be used."""

    code = "output_refused"


class ExportRefused(BackIntelError):
    """The artifacts broke a rule of spec J1; nothing was published."""

    code = "export_refused"
    exit_status = EXIT_EXPORT_REFUSED


class FreezeRefused(ExportRefused):
    """The running guest cannot be made to stand still, so no artifacts leave it while it runs.

    None leave when Jupyter shuts the kernel down, either: that exports nothing. `backintel run` is
    not affected: it exports after the guest's processes have ended.
    """

    code = "freeze_refused"


class NotFound(UsageError):
    """No artifact or session has this name."""

    code = "not_found"


class NotRunning(UsageError):
    """There is no sandbox that could answer."""

    code = "not_running"


class NoAnswer(BackIntelError):
    """The supervisor, or the guest's agent, did not answer in time."""

    code = "no_answer"
    permanent = False


class EngineUnavailable(BackIntelError):
    """The engine is not installed, not of this version, or cannot work on this host."""

    code = "engine_unavailable"


class HostRefused(BackIntelError):
    """The host cannot apply a limit that the contract demands."""

    code = "host_refused"


class ImageMissing(BackIntelError):
    """No analysis image was prepared."""

    code = "image_missing"


class ImageInvalid(BackIntelError):
    """The image is not what was prepared."""

    code = "image_invalid"


class PrepareFailed(BackIntelError):
    """Building or importing the image or unpacking an engine failed."""

    code = "prepare_failed"
    permanent = False


class LockTimeout(BackIntelError):
    """Another preparation held the lock for too long."""

    code = "lock_timeout"
    permanent = False


class StartFailed(BackIntelError):
    """The guest did not come up; ``phase`` says where."""

    code = "start_failed"
    permanent = False


class DeadlineReached(BackIntelError):
    """The run deadline was reached before the guest was ready."""

    code = "run_deadline"
    exit_status = EXIT_DEADLINE


class AttestationFailed(BackIntelError):
    """The guest's facts as read back differ from what was asked; it was not started."""

    code = "attestation_failed"


class WireError(BackIntelError):
    """A peer broke the framing of the wire format."""

    code = "wire"
    permanent = False


ERRORS: dict[str, type[BackIntelError]] = {
    error.code: error
    for error in (
        UsageError,
        ConfigError,
        ProfileRefused,
        SourceRefused,
        OutputRefused,
        ExportRefused,
        FreezeRefused,
        NotFound,
        NotRunning,
        NoAnswer,
        EngineUnavailable,
        HostRefused,
        ImageMissing,
        ImageInvalid,
        PrepareFailed,
        LockTimeout,
        StartFailed,
        DeadlineReached,
        AttestationFailed,
        WireError,
    )
}


def error_from_dict(data: dict[str, object]) -> BackIntelError:
    """Rebuild an error that came over the control socket; unknown codes become ``StartFailed``."""
    kind = ERRORS.get(str(data.get("code", "")), StartFailed)
    return kind(
        str(data.get("message", "")),
        remedy=str(data.get("remedy", "")),
        phase=str(data.get("phase", "")),
    )


class Reason(StrEnum):
    """Why a session, or a cell in it, ended."""

    SHUTDOWN = "Shutdown"
    CLIENT_GONE = "ClientGone"
    CELL_DEADLINE = "CellDeadlineExceeded"
    RUN_DEADLINE = "RunDeadlineExceeded"
    OUT_OF_MEMORY = "OutOfMemory"
    OUTPUT_LIMIT = "OutputLimitExceeded"
    CELL_LIMIT = "CellLimitExceeded"
    KERNEL_CRASHED = "KernelCrashed"
    GUEST_LOST = "GuestLost"
    ENGINE_FAILED = "EngineFailed"
    IMAGE_INVALID = "ImageInvalid"
    ENDPOINT_LOST = "EndpointLost"


@dataclass(frozen=True, slots=True)
class End:
    """One row of the table of ends; ``text`` is a format string for what the person sees."""

    kind: Literal["done", "user", "limit", "infrastructure"]
    exit_status: int
    guest: Literal["destroyed", "lives"]
    text: str
    again: bool = True
    """Whether a fresh guest, on the same run clock, can help: else no automatic restart follows."""


ENDS: dict[Reason, End] = {
    Reason.SHUTDOWN: End("done", EXIT_DONE, "destroyed", "The sandbox was shut down."),
    Reason.CLIENT_GONE: End(
        "infrastructure",
        EXIT_INFRASTRUCTURE,
        "destroyed",
        "The Jupyter server that owned this sandbox is gone; the sandbox was ended.",
        again=False,
    ),
    Reason.CELL_DEADLINE: End(
        "limit",
        EXIT_DEADLINE,
        "destroyed",
        "The cell ran longer than its deadline of {seconds:g} s; the sandbox was ended and its "
        "variables are gone.",
    ),
    Reason.RUN_DEADLINE: End(
        "limit",
        EXIT_DEADLINE,
        "destroyed",
        "The session reached its run deadline of {seconds:g} s; the sandbox was ended and its "
        "variables are gone.",
        again=False,
    ),
    Reason.OUT_OF_MEMORY: End(
        "limit",
        EXIT_LIMIT,
        "destroyed",
        "The kernel was killed for memory: limit {limit_mib:.0f} MiB, peak {peak_mib:.0f} MiB. "
        "Its variables are gone.",
    ),
    Reason.OUTPUT_LIMIT: End(
        "limit",
        EXIT_LIMIT,
        "destroyed",
        "The cell wrote more output than is allowed ({how}); the sandbox was ended and its "
        "variables are gone.",
    ),
    Reason.CELL_LIMIT: End(
        "limit",
        EXIT_LIMIT,
        "lives",
        "This sandbox runs at most {cells} cells; the cell was not run.",
    ),
    Reason.KERNEL_CRASHED: End(
        "user",
        EXIT_NOTEBOOK_FAILED,
        "destroyed",
        "The kernel process ended: {how}. Its variables are gone.",
    ),
    Reason.GUEST_LOST: End(
        "infrastructure",
        EXIT_INFRASTRUCTURE,
        "destroyed",
        "The sandbox was lost: {how}. Its variables are gone.",
    ),
    Reason.ENGINE_FAILED: End(
        "infrastructure",
        EXIT_INFRASTRUCTURE,
        "destroyed",
        "The sandbox engine failed: {how}. Its variables are gone.",
    ),
    Reason.IMAGE_INVALID: End(
        "infrastructure",
        EXIT_INFRASTRUCTURE,
        "destroyed",
        "The analysis image is invalid: {how}.",
        again=False,
    ),
    Reason.ENDPOINT_LOST: End(
        "infrastructure", EXIT_INFRASTRUCTURE, "lives", "A database endpoint was lost: {how}."
    ),
}
