"""An authorizer of a server under test: it denies what the request itself names."""

from __future__ import annotations

from typing import Any

from jupyter_server.auth.authorizer import Authorizer


class Denying(Authorizer):
    """Denies the ``action:resource`` of the header ``X-Deny`` and allows all else."""

    def is_authorized(self, handler: Any, user: Any, action: str, resource: str) -> bool:
        return f"{action}:{resource}" != handler.request.headers.get("X-Deny")
