"""/artifacts as a trap for whoever reads it: races, leases, odd files, and names for a terminal."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from live_guest import LiveGuest, Starter

from kernel_provisioner.artifacts import Artifact, ExportLimits, publish
from kernel_provisioner.errors import ExportRefused

pytestmark = pytest.mark.sandbox


def _publish(live: LiveGuest, destination: Path) -> list[Artifact]:
    limits = ExportLimits(max_bytes=live.spec.profile.artifacts_bytes)
    with live.guest.artifacts() as stream:
        return publish(stream, destination, limits, deadline=time.monotonic() + 30)


def test_links_swapped_in_while_it_is_read_bring_nothing_out(
    start: Starter, tmp_path: Path
) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("the host's")
    live = start()
    live.check(
        f"""
        import os, random
        if os.fork() == 0:
            while True:
                name = f'/artifacts/{{random.randrange(12)}}.csv'
                try:
                    if random.random() < 0.1:
                        target = random.choice([{str(secret)!r}, '/etc/passwd', '/proc/self/mem'])
                        os.symlink(target, name + '.new')
                    else:
                        with open(name + '.new', 'w') as file:
                            file.write('guest ' * random.randrange(20000))
                    os.rename(name + '.new', name)
                except OSError:
                    pass
        """
    )
    for attempt in range(25):
        destination = tmp_path / f"out-{attempt}"
        try:
            artifacts = _publish(live, destination)
        except ExportRefused:
            assert not destination.exists()
            continue
        for artifact in artifacts:
            assert set((destination / artifact.name).read_text().split()) <= {"guest"}
    assert secret.read_text() == "the host's"
    assert not list(tmp_path.glob(".backintel-export-*"))


def test_a_file_that_grows_shrinks_and_vanishes_is_never_half_published(
    start: Starter, tmp_path: Path
) -> None:
    live = start()
    live.check(
        """
        import os
        if os.fork() == 0:
            while True:
                with open('/artifacts/a.csv', 'w') as file:
                    file.write('x' * (8 << 20))
                os.truncate('/artifacts/a.csv', 10)
                os.unlink('/artifacts/a.csv')
        """
    )
    for attempt in range(25):
        destination = tmp_path / f"out-{attempt}"
        try:
            artifacts = _publish(live, destination)
        except ExportRefused:
            assert not destination.exists()
            continue
        for artifact in artifacts:
            assert (destination / artifact.name).stat().st_size == artifact.size


def test_leases_and_extreme_times_do_not_hold_up_an_export(start: Starter, tmp_path: Path) -> None:
    live = start()
    live.check(
        """
        import fcntl, os, signal
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        for name, when in (('past.csv', -1e10), ('future.csv', 1e13)):
            fd = os.open('/artifacts/' + name, os.O_RDWR | os.O_CREAT)
            os.write(fd, b'1')
            os.utime(fd, (when, when))
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        """
    )
    live.guest.kill()
    live.wait()
    began = time.monotonic()
    assert [item.name for item in _publish(live, tmp_path / "out")] == ["future.csv", "past.csv"]
    # Breaking a lease takes 45 s if its holder does not answer.
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("os.truncate(os.open('/artifacts/a.csv', os.O_CREAT | os.O_RDWR), 1 << 29)", "over its"),
        ("open('/artifacts/\\x1b]0;own\\x07.csv', 'w')", "control character"),
        ("open('/artifacts/\\u202evsc.csv', 'w')", "control character"),
        ("open('/artifacts/a\\nremedy: run me.csv', 'w')", "control character"),
        ("os.makedirs('/artifacts' + '/d' * 20)", "levels deep"),
        ("os.makedirs('/artifacts' + ('/' + 'd' * 250) * 6)", "bytes; 1024 are allowed"),
        ("import socket; socket.socket(1).bind('/artifacts/a.csv')", "is a socket"),
        ("open(b'/artifacts/caf\\xe9.csv', 'w')", "not UTF-8"),
    ],
    ids=["sparse", "escape", "direction", "line feed", "deep", "long", "socket", "latin-1"],
)
def test_a_trap_is_refused_by_name_and_cannot_write_to_a_terminal(
    start: Starter, tmp_path: Path, code: str, reason: str
) -> None:
    live = start()
    live.check(f"import os; {code}")
    with pytest.raises(ExportRefused, match=reason) as refused:
        _publish(live, tmp_path / "out")
    assert str(refused.value).isprintable()
    assert list(tmp_path.iterdir()) == []
