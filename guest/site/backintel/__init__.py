"""What a notebook in the sandbox imports: save artifacts, find sources, ask for the limits.

``import backintel`` costs a few milliseconds: standard library only, and the data libraries are
used only if the notebook imported them. This is convenience inside the guest, not a boundary: the
host validates every artifact again and believes nothing that is decided here.
"""

from __future__ import annotations

from backintel._artifacts import SUFFIXES, ArtifactError, save
from backintel._facts import Limits, limits, sources

__all__ = ["SUFFIXES", "ArtifactError", "Limits", "limits", "save", "sources"]
