"""A skipped test is a failure in CI: the hook in tests/conftest.py, by a real pytest run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SKIPS = {
    "call": "import pytest\ndef test_x():\n    pytest.skip('no such tool')\n",
    "mark": "import pytest\n@pytest.mark.skip(reason='no such tool')\ndef test_x(): pass\n",
    "module": "import pytest\npytest.skip('no such tool', allow_module_level=True)\n",
}


def _run(repository: Path, directory: Path, source: str, environ: dict[str, str]) -> str:
    conftest = (repository / "tests/conftest.py").read_text()
    (directory / "conftest.py").write_text(conftest)
    (directory / "test_x.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(directory), str(directory)]
    base = {k: v for k, v in os.environ.items() if k not in ("CI", "BACKINTEL_STRICT")}
    done = subprocess.run(
        command, env=base | environ, capture_output=True, text=True, timeout=60, check=False
    )
    return f"exit {done.returncode}\n{done.stdout}"


@pytest.mark.parametrize("kind", SKIPS)
@pytest.mark.parametrize("environ", [{"CI": "true"}, {"BACKINTEL_STRICT": "1"}])
def test_a_skip_fails_where_skips_are_forbidden(
    repository: Path, tmp_path: Path, kind: str, environ: dict[str, str]
) -> None:
    printed = _run(repository, tmp_path, SKIPS[kind], environ)
    assert not printed.startswith("exit 0"), printed
    assert "no such tool" in printed
    assert "forbids that" in printed


def test_a_stated_skip_passes(repository: Path, tmp_path: Path) -> None:
    stated = "import pytest\npytestmark = pytest.mark.may_skip('no such tool')\n" + SKIPS["call"]
    printed = _run(repository, tmp_path, stated, {"CI": "true"})
    assert printed.startswith("exit 0"), printed
    other = stated.replace("pytest.skip('no such tool'", "pytest.skip('another tool'")
    assert not _run(repository, tmp_path, other, {"CI": "true"}).startswith("exit 0")


def test_elsewhere_a_skip_is_a_skip(repository: Path, tmp_path: Path) -> None:
    printed = _run(repository, tmp_path, SKIPS["call"], {})
    assert printed.startswith("exit 0"), printed
    assert "1 skipped" in printed
