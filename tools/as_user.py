"""Run a command in a copy of this checkout as a fresh ordinary user with delegated cgroups.

Needs root. The user gets what a login with systemd gets: cgroups of its own with memory, cpu, pids
and a freezer (chowned directories, v2 or v1, as the host has them), a home, nothing else. User,
home and cgroups are removed afterwards, whatever happens.
Usage: ``as_user.py COMMAND [ARGUMENT...]``.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

CONTROLLERS = ("memory", "cpu", "pids", "freezer")
CGROUP_ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def ordinary_user() -> Iterator[pwd.struct_passwd]:
    """Make a user with a home; remove both afterwards."""
    name = f"bki-test-{os.getpid()}"
    home = f"/home/{name}"
    subprocess.run(
        ["useradd", "--create-home", "--home-dir", home, "--shell", "/bin/bash", name], check=True
    )
    user = pwd.getpwnam(name)
    try:
        yield user
    finally:
        subprocess.run(["userdel", "--force", name], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(f"/tmp/backintel-{user.pw_uid}", ignore_errors=True)  # noqa: S108


def own_directories() -> list[Path]:
    """Return this process's cgroup directory of each needed hierarchy."""
    directories = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        for controller in CONTROLLERS:
            if controller in names:
                directories.append(CGROUP_ROOT / controllers / path.lstrip("/"))
    if not directories:
        directories.append(CGROUP_ROOT)
    return list(dict.fromkeys(directories))


@contextlib.contextmanager
def delegated(user: pwd.struct_passwd) -> Iterator[list[Path]]:
    """Make a cgroup for the user in each hierarchy; yield them; remove them afterwards."""
    made = []
    try:
        for parent in own_directories():
            directory = parent / f"bki-test-user-{user.pw_uid}"
            directory.mkdir()
            made.append(directory)
            os.chown(directory, user.pw_uid, user.pw_gid)
            for name in ("cgroup.procs", "tasks", "cgroup.subtree_control"):
                with contextlib.suppress(FileNotFoundError):
                    os.chown(directory / name, user.pw_uid, user.pw_gid)
        yield made
    finally:
        for directory in made:
            empty(directory)


def empty(directory: Path) -> None:
    """Kill the members of a cgroup that we made and remove it with its children."""
    deadline = time.monotonic() + 10
    for path in sorted(directory.rglob("*"), key=lambda p: -len(p.parts)):
        if path.is_dir():
            empty(path)
    while time.monotonic() < deadline:
        try:
            for member in (directory / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(member), signal.SIGKILL)
            directory.rmdir()
        except FileNotFoundError:
            return  # whoever made it was quicker
        except OSError:
            time.sleep(0.05)
        else:
            return
    print(f"as_user: {directory} could not be removed", file=sys.stderr)


def main() -> int:
    """Run the command; return its exit status."""
    if os.geteuid() != 0 or len(sys.argv) < 2:
        print("as_user: needs root and a command", file=sys.stderr)
        return 2
    if subprocess.run(["/usr/bin/python3", "-c", "import ensurepip"], check=False).returncode:
        # The user cannot install what its virtual environment needs.
        apt = ["apt-get", "-o", "Acquire::Retries=3", "-qq"]
        command = [*apt, "install", "-y", "--no-install-recommends", "python3-venv"]
        subprocess.run([*apt, "update"], check=True)
        subprocess.run(command, check=True, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})
    checkout = Path(__file__).resolve().parent.parent
    with ordinary_user() as user, delegated(user) as cgroups:
        copy = Path(user.pw_dir) / "checkout"
        shutil.copytree(
            checkout,
            copy,
            symlinks=True,
            ignore=shutil.ignore_patterns(".venv", ".git", "out", ".*_cache", "__pycache__"),
        )
        subprocess.run(["chown", "-R", f"{user.pw_uid}:{user.pw_gid}", str(copy)], check=True)

        def enter() -> None:
            for directory in cgroups:
                (directory / "cgroup.procs").write_text("0")

        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("XDG_", "PYENV", "BACKINTEL_"))
        }
        environment |= {
            "HOME": user.pw_dir,
            "USER": user.pw_name,
            "LOGNAME": user.pw_name,
            "PATH": "/usr/local/bin:/usr/bin:/bin",
        }
        return subprocess.run(
            sys.argv[1:],
            cwd=copy,
            env=environment,
            user=user.pw_uid,
            group=user.pw_gid,
            extra_groups=[],
            preexec_fn=enter,
            check=False,
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
