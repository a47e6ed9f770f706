"""Stands in for pip in the sandbox: answers in well under a second, installs nothing (spec D4).

The real pip would retry a network that is not there for minutes. This one says what the policy is
and what the image holds, succeeds for requirements that are already met, and lists packages.
"""

from __future__ import annotations

__version__ = "0+backintel.offline"
