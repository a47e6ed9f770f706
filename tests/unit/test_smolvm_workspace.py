"""What the monitor of an ordinary user is given of the host: its own paths, directories alone."""

from __future__ import annotations

import os
import socket
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from session_request import PROFILE, SESSION

from kernel_provisioner.engines.base import GuestEndpoint, GuestSpec, SourceMount
from kernel_provisioner.engines.smolvm.release import Prepared
from kernel_provisioner.engines.smolvm.workspace import Places, listen, own_view
from kernel_provisioner.errors import StartFailed


@pytest.fixture
def places(tmp_path: Path) -> Places:
    found = Places(tmp_path / "machines" / SESSION, tmp_path / "sockets" / SESSION)
    for path in (found.state, found.sockets):
        path.mkdir(parents=True)
    return found


def spec(home: Path, *sources: Path) -> GuestSpec:
    code = home / "code"
    code.mkdir()
    (code / "agent.py").write_text("1")
    mounts = tuple(SourceMount(path.name.strip(":"), path) for path in sources)
    return GuestSpec(
        session=SESSION,
        profile=PROFILE,
        image_root=home / "image",
        guest_code=code,
        socket_dir=home / "sockets",
        sources=mounts,
    )


def test_single_file_is_alone_in_a_directory_of_the_session(tmp_path: Path, places: Places) -> None:
    for name in ("one", "beside"):
        (tmp_path / name).write_text(name)
    asked = spec(tmp_path, tmp_path, tmp_path / "one")
    view = own_view(asked, places, Prepared(tmp_path / "engine", "1", {}))
    assert view.sources[0] == str(tmp_path)
    (told,) = Path(view.sources[1]).iterdir()
    assert told.parent.is_relative_to(places.state)
    assert told.read_text() == "one"
    assert (Path(view.guest_code) / "agent.py").is_file()


def test_sockets_below_the_programs_home_fit_whatever_the_users_home(tmp_path: Path) -> None:
    """The program makes a socket this deep; below ``~/.local/share`` its path was too long."""
    runtime = Path(f"/tmp/backintel-{(1 << 32) - 2}")
    longest = Places(tmp_path, runtime / SESSION / SESSION).home / f".cache/smolvm/vms/{SESSION}"
    assert len(SESSION) == 16
    assert len(str(longest / "agent.sock")) <= 107


def test_home_that_the_program_is_told_leads_to_the_state(tmp_path: Path, places: Places) -> None:
    view = own_view(spec(tmp_path), places, Prepared(tmp_path / "engine", "1", {}))
    assert Path(view.state) == places.home
    assert places.home.resolve() == places.state


def test_path_that_the_options_cannot_express_is_refused(tmp_path: Path, places: Places) -> None:
    odd = tmp_path / "a:b"
    odd.mkdir()
    with pytest.raises(StartFailed) as refused:
        own_view(spec(tmp_path, odd), places, Prepared(tmp_path / "engine", "1", {}))
    assert str(odd) in refused.value.message and "colon" in refused.value.message
    assert refused.value.remedy
    assert list(places.state.iterdir()) == []


def endpoints(count: int) -> tuple[GuestEndpoint, ...]:
    return tuple(
        GuestEndpoint(f"n{number}", "db.internal", "127.0.1.1", 5000 + number)
        for number in range(count)
    )


def test_only_the_monitors_user_can_connect_to_an_endpoint(tmp_path: Path, places: Places) -> None:
    user = 0x70000001 if os.geteuid() == 0 else None
    found = listen(replace(spec(tmp_path), endpoints=endpoints(2)), places, user)
    try:
        assert sorted(found) == ["n0", "n1"]
        for name, path in (("n0", "e-0"), ("n1", "e-1")):
            told = (places.sockets / path).stat()
            assert stat.S_ISSOCK(told.st_mode) and stat.S_IMODE(told.st_mode) == 0o600
            assert told.st_uid == (os.geteuid() if user is None else user)
            assert not found[name].getblocking() and not found[name].get_inheritable()
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(places.sockets / path))
                found[name].accept()[0].close()
    finally:
        for listener in found.values():
            listener.close()


def test_more_endpoints_than_a_machine_can_have_are_refused(tmp_path: Path, places: Places) -> None:
    asked = spec(tmp_path)
    with pytest.raises(StartFailed, match="17 endpoints") as caught:
        listen(replace(asked, endpoints=endpoints(17)), places, None)
    assert caught.value.remedy == "assign at most 16."
    assert list(places.sockets.iterdir()) == []


def test_endpoint_that_cannot_be_listened_for_is_named(tmp_path: Path, places: Places) -> None:
    (places.sockets / "e-1").touch()
    with pytest.raises(StartFailed, match="the endpoint n1: "):
        listen(replace(spec(tmp_path), endpoints=endpoints(2)), places, None)
