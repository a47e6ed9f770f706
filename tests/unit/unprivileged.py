"""Run a piece of a test as an ordinary user, in a forked child that drops root for good."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from typing import TypeVar

UID = 64017
"""A uid that owns nothing on any machine."""

T = TypeVar("T")


def as_user(call: Callable[[], T]) -> T:
    """Return what ``call`` returns, or raise what it raises, without root's privileges.

    A test that is not run by root is already unprivileged; its child just stays so.
    """

    def dropped() -> T:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(UID)
            os.setuid(UID)
        return call()

    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            try:
                answer = (True, dropped())
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = (False, error)
            with os.fdopen(writing, "wb") as pipe:
                pickle.dump(answer, pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"the unprivileged child ended with status {status}"
    ok, value = pickle.loads(data)  # noqa: S301 - from our own child
    if not ok:
        raise value
    return value
