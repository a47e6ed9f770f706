"""The repository's own checks: each finds what it is for, and leaves alone what it is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import check_links
import mdfile
import pytest
import secret_scan

# Put together here, so that this file holds none itself.
SECRETS = {
    "private key": "-----BEGIN RSA " + "PRIVATE KEY-----",
    "AWS access key": "AKIA" + "ABCDEFGHIJKLMNOP",
    "GitHub token": "ghp_" + "a1B2" * 9,
    "package index token": "pypi-" + "AgEI" * 12,
    "Slack token": "xoxb-" + "1234567890-abc",
    "model provider key": "sk-" + "ab12" * 6,
    "JSON web token": "eyJ" + "a" * 12 + "." + "eyJ" + "b" * 12 + "." + "c" * 8,
    "password in a URL": "postgresql://reader:" + "hunter2@db.example/sales",
    "assigned secret": 'API_KEY = "' + "abcd1234" * 3 + '"',
    "host of a package registry": "index-url = https://" + "pypi." + "org/simple",
}


def test_every_rule_has_an_example() -> None:
    assert SECRETS.keys() == secret_scan.RULES.keys()


@pytest.mark.parametrize("rule", SECRETS)
def test_a_secret_is_found(rule: str) -> None:
    assert (2, rule) in list(secret_scan.findings(f"first line\nx {SECRETS[rule]} y\n"))


def test_an_allowed_line_is_passed_over() -> None:
    assert not list(secret_scan.findings(f"{SECRETS['AWS access key']}  # secret-scan: allow"))


@pytest.mark.parametrize(
    "line",
    [
        "password = getpass.getpass()",
        "postgresql://USER:PASSWORD in the docs is written {user}:{password}@host",
        "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
        "secret = os.environ['DB_PASSWORD']",
    ],
)
def test_ordinary_lines_are_no_secrets(line: str) -> None:
    assert not list(secret_scan.findings(line))


TEXT = """# A title: with `code`

[one](other.md#there) and `[not](a-link.md)`

<!-- run -->
```sh
echo "# not a heading" # [not](a-link.md)
```

```python
x = 1
```
<!-- not run: needs a screen -->
```console
$ jupyter lab
```
"""


def test_blocks_carry_language_text_and_mark() -> None:
    found = [(b.line, b.language, b.mark) for b in mdfile.blocks(TEXT)]
    assert found == [
        (6, "sh", "run"),
        (10, "python", ""),
        (14, "console", "not run: needs a screen"),
    ]
    assert next(mdfile.blocks(TEXT)).text == 'echo "# not a heading" # [not](a-link.md)\n'


def test_an_open_fence_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 2: this fence is never closed"):
        list(mdfile.blocks("x\n```sh\necho\n"))


def test_links_and_anchors_leave_code_out() -> None:
    assert list(mdfile.links(TEXT)) == [(3, "other.md#there")]
    assert mdfile.anchors(TEXT) == {"a-title-with-code"}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("README.md", ""),
        ("https://example.org/x", ""),
        ("http://example.org/x", "is not https"),
        ("no-such-file.md", "leads to no file"),
        ("README.md#no-such-heading", "leads to no heading"),
        ("../../etc/passwd", "leaves the repository"),
    ],
)
def test_link_problems(repository: Path, target: str, expected: str) -> None:
    assert check_links.problem(repository / "CONTRIBUTING.md", target) == expected


def test_an_emulated_machine_that_told_its_result_is_not_waited_for(
    repository: Path, tmp_path: Path
) -> None:
    words = ["sh", "-c", "echo BACKINTEL-LIVE-EXIT 3; exec sleep 1000"]
    code = (
        "import machine, pathlib, sys\n"
        f"sys.exit(machine.run({words!r}, pathlib.Path(sys.argv[1]), 1000))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "console.log")]
    done = subprocess.run(command, cwd=repository / "tools" / "live", timeout=100, check=False)
    assert done.returncode == 3
