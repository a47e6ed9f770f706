"""Refuses secrets, and hosts of package registries, in the files of this repository.

It looks at what git tracks or would track (`git ls-files`), so a private file that is ignored is
not read. A line that must stay, such as a canary in a test, ends with `secret-scan: allow` and
says why.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ALLOW = "secret-scan: allow"
LARGEST = 2 << 20

RULES = {
    "private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "AWS access key": re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "GitHub token": re.compile(r"\bgh[pousr]_[A-Za-z0-9]{36,}\b|\bgithub_pat_\w{40,}\b"),
    "package index token": re.compile(r"\bpypi-[A-Za-z0-9_-]{40,}|\bnpm_[A-Za-z0-9]{36}\b"),
    "Slack token": re.compile(r"\bxox[abpr]-[A-Za-z0-9-]{10,}"),
    "model provider key": re.compile(r"\bsk-[A-Za-z0-9_-]{20,}"),
    "JSON web token": re.compile(r"\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+"),
    "password in a URL": re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s/:@{}<>$]+:[^\s/:@{}<>$]+@"),
    "assigned secret": re.compile(
        r"(?i)\b\w*(?:password|passwd|secret|api_?key|auth_?token)\w*['\"]?\s*[:=]\s*"
        r"['\"](?=[^'\"]*\d)[A-Za-z0-9+/_=-]{16,}['\"]"
    ),
    "host of a package registry": re.compile(
        r"pypi\.org|pythonhosted\.org|(?:deb|security|snapshot)\.debian\.org"
        r"|archive\.ubuntu\.com|npmjs\.(?:org|com)|yarnpkg\.com"
    ),
}


def findings(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, rule) for each suspicious line of ``text``."""
    for number, line in enumerate(text.splitlines(), 1):
        if ALLOW in line:
            continue
        for rule, pattern in RULES.items():
            if pattern.search(line):
                yield number, rule


def repository_files(root: Path) -> list[Path]:
    """Return the files that git tracks or would add."""
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others"]
    command.append("--exclude-standard")
    listed = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    return sorted({root / name.decode() for name in listed.split(b"\0") if name})


def main() -> int:
    """Print each finding as ``file:line: rule``; the matching text is not printed."""
    root = Path(__file__).resolve().parent.parent
    found = scanned = 0
    for path in repository_files(root):
        if not path.is_file() or path.is_symlink() or path.stat().st_size > LARGEST:
            continue
        data = path.read_bytes()
        if b"\0" in data:
            continue
        scanned += 1
        for number, rule in findings(data.decode(errors="replace")):
            print(f"{path.relative_to(root)}:{number}: {rule}")
            found += 1
    print(f"secret scan: {scanned} files, {found} findings")
    return 1 if found or not scanned else 0


if __name__ == "__main__":
    sys.exit(main())
