"""The same contract for an ordinary user: the other modules run again, without root.

Root makes the user and delegates cgroup directories to it, as systemd does for a login.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from as_user import delegated, ordinary_user

from kernel_provisioner.paths import state_dirs

pytestmark = [pytest.mark.sandbox, pytest.mark.root, pytest.mark.slow]

HERE = Path(__file__).parent


def interpreter() -> str:
    """Return a Python of this version that every user may run: root's own may lie in its home."""
    own = Path(sys.executable).resolve()
    if all(parent.stat().st_mode & 0o005 == 0o005 for parent in own.parents):
        return sys.executable
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    found = shutil.which(name, path="/usr/local/bin:/usr/bin:/bin")
    if found is None:
        pytest.skip(f"no {name} that an ordinary user may run; put one into /usr/bin")
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a user")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("module", "selection"),
    [
        ("test_guest_facts.py", ""),
        ("test_guest_denials.py", ""),
        ("test_guest_limits.py", "full_mount or 500 or memfd or cpu or backstop or share"),
        ("test_guest_life.py", "signal_ignoring or supervisor or special or interrupt_ends"),
    ],
)
def test_contract_as_an_ordinary_user(module: str, selection: str) -> None:
    with ordinary_user() as user, delegated(user) as cgroups:

        def enter() -> None:
            for directory in cgroups:
                (directory / "cgroup.procs").write_text("0")

        done = subprocess.run(
            [
                interpreter(),
                *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp"),
                f"{user.pw_dir}/pytest",
                str(HERE / module),
                *(["-k", selection] if selection else []),
            ],
            env={
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "HOME": user.pw_dir,
                "TMPDIR": user.pw_dir,
                "PYTHONPATH": os.pathsep.join(sys.path),
                "PYTHONDONTWRITEBYTECODE": "1",
                "BACKINTEL_HOME": str(state_dirs().data),
            },
            user=user.pw_uid,
            group=user.pw_gid,
            extra_groups=[],
            preexec_fn=enter,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        assert " passed" in done.stdout
        assert " skipped" not in done.stdout
