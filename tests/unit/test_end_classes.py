"""Every reason and every error class is classified: can a fresh guest help (cases 22)?"""

from __future__ import annotations

import pytest

from kernel_provisioner.autorestart import FAILED_STARTS, may_follow, may_retry
from kernel_provisioner.errors import ENDS, ERRORS, BackIntelError, Reason, StartFailed

AGAIN = {
    Reason.SHUTDOWN: True,  # a kernel that quits itself is restarted, as a local one is
    Reason.CLIENT_GONE: False,
    Reason.CELL_DEADLINE: True,
    Reason.RUN_DEADLINE: False,
    Reason.OUT_OF_MEMORY: True,
    Reason.OUTPUT_LIMIT: True,
    Reason.CELL_LIMIT: True,
    Reason.KERNEL_CRASHED: True,
    Reason.GUEST_LOST: True,
    Reason.ENGINE_FAILED: True,
    Reason.IMAGE_INVALID: False,
    Reason.ENDPOINT_LOST: True,
}
PERMANENT = {
    "usage": True,
    "config": True,
    "profile_refused": True,
    "source_refused": True,
    "output_refused": True,
    "export_refused": True,
    "engine_unavailable": True,
    "host_refused": True,
    "image_missing": True,
    "image_invalid": True,
    "prepare_failed": False,  # a network or a disk that may come back
    "lock_timeout": False,  # the other preparation ends
    "start_failed": False,  # a loaded host
    "run_deadline": True,
    "attestation_failed": True,
    "wire": False,
    # Answers to questions about a session, never met by a start
    "freeze_refused": True,
    "not_found": True,
    "not_running": True,
    "no_answer": False,
}


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_is_classified(reason: Reason) -> None:
    assert ENDS[reason].again is AGAIN[reason]
    assert may_follow(reason, "restart") is AGAIN[reason]
    assert may_follow(reason, "stay") is False


def _classes(base: type[BackIntelError]) -> set[type[BackIntelError]]:
    return {base}.union(*(_classes(child) for child in base.__subclasses__()))


def test_every_error_is_classified_and_crosses_the_control_socket() -> None:
    ours = {
        kind
        for kind in _classes(BackIntelError)
        if kind.__module__.startswith("kernel_provisioner") and kind is not BackIntelError
    }
    assert {kind.code: kind.permanent for kind in ours} == PERMANENT
    assert set(ERRORS.values()) == ours


@pytest.mark.parametrize("code", PERMANENT)
def test_only_what_may_pass_is_tried_again_and_not_for_ever(code: str) -> None:
    error = ERRORS[code]("x")
    assert may_retry(error, 1) is not PERMANENT[code]
    assert may_retry(error, FAILED_STARTS - 1) is not PERMANENT[code]
    assert may_retry(error, FAILED_STARTS) is False


def test_a_defect_is_not_tried_again() -> None:
    assert may_retry(ZeroDivisionError(), 1) is False
    assert may_retry(StartFailed("x"), 1) is True


@pytest.mark.parametrize("reason", Reason)
def test_whoever_loses_a_running_guest_reads_that_its_variables_are_gone(reason: Reason) -> None:
    asked_for_or_unread = {Reason.SHUTDOWN, Reason.CLIENT_GONE}
    before_user_code = {Reason.IMAGE_INVALID}
    if ENDS[reason].guest == "destroyed" and reason not in asked_for_or_unread | before_user_code:
        assert ENDS[reason].text.endswith("ariables are gone.")
    else:
        assert "variables" not in ENDS[reason].text
