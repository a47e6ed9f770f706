"""Checks that every link between the repository's documents leads to a file and a heading in it.

Links to other sites are only checked for https: what they answer is not this repository's.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mdfile import ROOT, anchors, documents, links


def problem(document: Path, target: str) -> str:
    """Return what is wrong with ``target`` as written in ``document``, or an empty string."""
    if "://" in target:
        return "" if target.startswith("https://") else "is not https"
    if target.startswith("mailto:"):
        return ""
    name, _, anchor = target.partition("#")
    file = (document.parent / name).resolve() if name else document
    if not file.is_relative_to(ROOT):
        return "leaves the repository"
    if not file.exists():
        return "leads to no file"
    if anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
        return "leads to no heading"
    return ""


def main() -> int:
    """Print each broken link as ``file:line: target what``."""
    checked = broken = 0
    for document in documents():
        for number, target in links(document.read_text()):
            checked += 1
            if what := problem(document, target):
                print(f"{document.relative_to(ROOT)}:{number}: {target} {what}")
                broken += 1
    print(f"links: {checked} checked, {broken} broken")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
