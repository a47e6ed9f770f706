"""How an artifact is served so that no browser runs it: types, dispositions, policies. Pure.

The bytes are the guest's and hostile; only their name was validated. A download is an attachment; a
preview is of a few types, under a policy by which nothing runs and nothing is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote

PREVIEW_BYTES = 8 * 1024 * 1024
_TEXT = "text/plain; charset=utf-8"
_PREVIEWS = {
    "png": "image/png",
    "jpg": "image/jpeg",
    "svg": "image/svg+xml",
    "html": "text/html; charset=utf-8",
    **dict.fromkeys(("csv", "tsv", "txt", "md", "json"), _TEXT),
}
_NOTHING = "sandbox; default-src 'none'"
_LOOKS = "img-src data:; style-src 'unsafe-inline'"


@dataclass(frozen=True, slots=True)
class Inert:
    """Values of the headers."""

    content_type: str
    disposition: str
    policy: str


def inert(name: str, *, preview: bool) -> Inert | None:
    """Return how to serve a file of this name; None if such files have no preview."""
    base = name.rpartition("/")[2]
    filename = f"filename*=UTF-8''{quote(base, safe='')}"
    if not preview:
        policy = f"{_NOTHING}; frame-ancestors 'none'"
        return Inert("application/octet-stream", f"attachment; {filename}", policy)
    kind = _PREVIEWS.get(base.rpartition(".")[2].lower())
    if kind is None:
        return None
    policy = f"{_NOTHING}; {_LOOKS}; frame-ancestors 'self'"
    return Inert(kind, f"inline; {filename}", policy)
