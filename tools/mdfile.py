"""Reads what the repository's own checks need from its Markdown: links, anchors, command blocks.

It knows the Markdown that this repository writes (ATX headings, inline links, backtick fences),
not all of CommonMark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHELLS = ("sh", "bash", "console", "shell")

_FENCE = re.compile(r"^(\s*)(`{3,})\s*([\w-]*)")
_LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$")
_MARK = re.compile(r"^\s*<!--\s*((?:not )?run\b.*?)\s*-->\s*$")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: the line number of its fence, its language, its text and its mark.

    ``mark`` is what the comment line directly above the fence says: ``run``, ``run by .ci/run``,
    ``not run: <reason>``, or empty.
    """

    line: int
    language: str
    text: str
    mark: str


def documents() -> list[Path]:
    """Return the repository's Markdown files: at its root and below docs, guest and notebooks."""
    below = ("docs", "guest", "notebooks")
    return sorted([*ROOT.glob("*.md"), *(p for name in below for p in (ROOT / name).rglob("*.md"))])


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks in order. Raises ValueError for a fence that is never closed."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        opened = _FENCE.match(lines[number])
        if not opened:
            number += 1
            continue
        end = number + 1
        while end < len(lines) and lines[end].strip() != opened[2]:
            end += 1
        if end == len(lines):
            raise ValueError(f"line {number + 1}: this fence is never closed")
        mark = _MARK.match(lines[number - 1]) if number else None
        body = "\n".join(lines[number + 1 : end]) + "\n"
        yield Block(number + 1, opened[3], body, mark[1] if mark else "")
        number = end + 1


def prose(text: str) -> str:
    """Return ``text`` with fenced blocks and code spans blanked, line numbers kept."""
    kept: list[str] = []
    fence = ""
    for line in text.splitlines():
        opened = _FENCE.match(line)
        if fence or opened:
            kept.append("")
            if fence:
                fence = "" if line.strip() == fence else fence
            elif opened:
                fence = opened[2]
        else:
            kept.append(re.sub(r"`[^`]*`", "``", line))
    return "\n".join(kept)


def links(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, target) of every inline link."""
    for number, line in enumerate(prose(text).splitlines(), 1):
        for match in _LINK.finditer(line):
            yield number, match[1]


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings."""
    found: set[str] = set()
    in_fence = ""
    for line in text.splitlines():
        fence = _FENCE.match(line)
        if in_fence:
            in_fence = "" if line.strip() == in_fence else in_fence
        elif fence:
            in_fence = fence[2]
        elif heading := _HEADING.match(line):
            words = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found
