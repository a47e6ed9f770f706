"""Endpoints (spec F1): what is accepted, what is refused and why, where the guest finds them."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import KernelManager
from session_request import request
from traitlets import TraitError
from traitlets.config import Application, Config

from kernel_provisioner.config import resolve_settings
from kernel_provisioner.endpoints import (
    MAX_ENDPOINTS,
    Endpoint,
    assign,
    check_endpoint,
    parse_endpoints,
    refused_address,
    shown,
)
from kernel_provisioner.engines.base import GuestEndpoint, Leftovers
from kernel_provisioner.errors import ConfigError, StartFailed
from kernel_provisioner.lab import plans
from kernel_provisioner.profiles import MIB, HostCapacity
from kernel_provisioner.provisioner import SandboxProvisioner
from kernel_provisioner.session.opening import Opening
from kernel_provisioner.session.receipt import Receipt, stated_endpoints
from kernel_provisioner.session.request import Start

HOST = HostCapacity(8, 16384 * MIB)
CANARY = "canary-5432"
"""A value that no error may repeat."""
WITH_PASSWORD = [
    f"postgres://analyst:{CANARY}@db:5432/sales",
    f"analyst:{CANARY}@db:5432",
    f"{CANARY}@db:5432",
    f"analyst:{CANARY}",
    f"db:5432:{CANARY}",
    f"[{CANARY}]:5432",
    f"db:5432/{CANARY}",
    f"db:5432?password={CANARY}",
    f"db host={CANARY}:5432",
    f"{CANARY}.1:5432",
    f"{CANARY}",
]


def resolve(files: tuple[Path, ...] = (), **places: Mapping[str, object]) -> tuple[str, ...]:
    settings = resolve_settings(
        command_line=places.get("cli", {}),
        environ={},
        kernelspec=places.get("spec", {}),
        files=files,
        default_profile="analysis",
        host=HOST,
    )
    return tuple(f"{e.name}={e.host}:{e.port}" for e in settings.endpoints)


def found(*texts: str) -> list[tuple[str, str, int]]:
    """Return where endpoints named ``e00``, ``e01``, ... are found inside."""
    given = {f"e{n:02}": text for n, text in enumerate(texts)}
    assigned = assign(
        {name: ("place of {}".format, check_endpoint(name, text)) for name, text in given.items()}
    )
    assert [e.name for e in assigned] == list(given)
    return [(e.host, e.address, e.port) for e in assigned]


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("db:5432", "db", 5432),
        ("DB-1.Example.ORG:1", "db-1.example.org", 1),
        ("localhost:65535", "localhost", 65535),
        ("127.0.0.1:9000", "127.0.0.1", 9000),
        ("10.1.2.3:80", "10.1.2.3", 80),
        ("3store.example:80", "3store.example", 80),
        ("xn--bcher-kva.example:80", "xn--bcher-kva.example", 80),
        (".".join(["a" * 63] * 3 + ["b" * 61]) + ":80", ".".join(["a" * 63] * 3 + ["b" * 61]), 80),
    ],
)
def test_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert check_endpoint("a", text) == Endpoint("a", host, port)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (5432, "is no text"),
        (["db:5432"], "is no text"),
        ("", "is no text"),
        ("db", "has no port"),
        ("db:", "has no port"),
        ("db:0", "a port that is no number of 1 to 65535"),
        ("db:65536", "a port that is no number of 1 to 65535"),
        ("db:054320", "a port that is no number of 1 to 65535"),
        ("db:+80", "a port that is no number of 1 to 65535"),
        ("db:http", "a port that is no number of 1 to 65535"),
        ("db:\u0661", "a port that is no number of 1 to 65535"),
        ("db:80\n", "a port that is no number of 1 to 65535"),
        ("db:80/path", "a port that is no number of 1 to 65535"),
        (":80", "neither a DNS name nor an IPv4 address"),
        ("a..b:80", "neither a DNS name nor an IPv4 address"),
        ("db.:80", "neither a DNS name nor an IPv4 address"),
        ("-db:80", "neither a DNS name nor an IPv4 address"),
        ("db-:80", "neither a DNS name nor an IPv4 address"),
        ("d_b:80", "neither a DNS name nor an IPv4 address"),
        ("d b:80", "neither a DNS name nor an IPv4 address"),
        ("db\n:80", "neither a DNS name nor an IPv4 address"),
        ("\u212aelvin:80", "neither a DNS name nor an IPv4 address"),
        ("b\u00fccher.example:80", "neither a DNS name nor an IPv4 address"),
        ("a" * 64 + ":80", "neither a DNS name nor an IPv4 address"),
        (".".join(["a" * 63] * 3 + ["b" * 62]) + ":80", "has a host of over 253 bytes"),
        ("postgres://db:80", "is a URL"),
        ("db://:80", "is a URL"),
        ("user@db:80", "holds a user or a password"),
        ("user:pw@db:80", "holds a user or a password"),
        ("[::1]:80", "is an IPv6 address, which is not supported"),
        ("[fe80::1%eth0]:80", "is an IPv6 address, which is not supported"),
        ("[::1]", "is an IPv6 address, which is not supported"),
        ("::1", "is an IPv6 address, which is not supported"),
        ("2001:db8::1:80", "is an IPv6 address, which is not supported"),
        ("db:80:80", "has two colons"),
        ("0.0.0.0:80", "0.0.0.0 is no host"),
        ("0.1.2.3:80", "0.1.2.3 is no host"),
        ("169.254.169.254:80", "169.254.169.254 is link-local"),
        ("100.100.100.200:80", "100.100.100.200 is where a cloud answers with credentials"),
        ("168.63.129.16:80", "168.63.129.16 is where a cloud answers with credentials"),
        ("192.0.0.192:80", "192.0.0.192 is where a cloud answers with credentials"),
        ("127.0.0.0:80", "127.0.0.0 is no host"),
        ("127.255.255.255:80", "127.255.255.255 is a broadcast address"),
        ("224.0.0.1:80", "224.0.0.1 is a multicast address"),
        ("239.255.255.255:80", "239.255.255.255 is a multicast address"),
        ("255.255.255.255:80", "255.255.255.255 is the broadcast address"),
        ("240.0.0.1:80", "240.0.0.1 is reserved"),
        ("127.0.1.1:80", "127.0.1.1 is reserved"),
        ("127.0.1.200:80", "127.0.1.200 is reserved"),
        # Other ways to write an address, each one of those above or 127.0.0.1.
        ("0:80", "ends in a number and is no IPv4 address"),
        ("2852039166:80", "ends in a number and is no IPv4 address"),
        ("0xa9fea9fe:80", "ends in a number and is no IPv4 address"),
        ("169.254.0xa9fe:80", "ends in a number and is no IPv4 address"),
        ("169.254.43518:80", "ends in a number and is no IPv4 address"),
        ("0251.0376.0251.0376:80", "ends in a number and is no IPv4 address"),
        ("127.1:80", "ends in a number and is no IPv4 address"),
        ("10.0.0.256:80", "ends in a number and is no IPv4 address"),
        ("db.1:80", "ends in a number and is no IPv4 address"),
        ("backintel:80", "'backintel' is the guest's own name"),
    ],
)
def test_what_is_no_endpoint(value: object, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_endpoint("a", value)
    assert reason in caught.value.message
    assert caught.value.remedy


def test_a_name_with_an_underscore_has_a_remedy_of_its_own() -> None:
    with pytest.raises(ConfigError) as caught:
        check_endpoint("a", "my_db:80")
    assert caught.value.remedy == "give the host's address, or a name of it without '_'."


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("100.100.100.200", "credentials"),
        ("fd00:ec2::254", "credentials"),
        ("fd20:ce::254", "credentials"),
        ("fe80::1", "no address of one host's service"),
        ("::", "is no host"),
        ("::ffff:169.254.169.254", "link-local"),
        ("64:ff9b::169.254.169.254", "link-local"),
        ("64:ff9b::168.63.129.16", "credentials"),
        ("2002:a9fe:a9fe::1", "link-local"),
        ("2002:6464:64c8::", "credentials"),
        ("::169.254.169.254", "link-local"),
        ("::192.0.0.192", "credentials"),
        ("::ffff:127.255.255.255", "broadcast"),
    ],
)
def test_an_address_that_is_refused_however_it_is_written(address: str, reason: str) -> None:
    assert reason in (refused_address(ip_address(address)) or "")


@pytest.mark.parametrize(
    "address",
    [
        "::1",
        "127.0.0.1",
        "10.1.2.3",
        "100.100.100.201",
        "2001:db8::1",
        "fd20:ce::253",
        "::ffff:10.1.2.3",
        "64:ff9b::10.1.2.3",
        "2002:a01:203::1",
    ],
)
def test_an_address_that_may_be_an_endpoint(address: str) -> None:
    assert refused_address(ip_address(address)) is None


@pytest.mark.parametrize("text", WITH_PASSWORD)
def test_no_error_repeats_what_may_be_a_password(text: str, tmp_path: Path) -> None:
    file = tmp_path / "backintel.toml"
    for place, table in (
        ("cli", {"a": text}),
        ("spec", {"a": text}),
        ("cli", {text: "db:5432"}),
        ("spec", {text: "db:5432"}),
        ("spec", text),
        ("spec", {"a": [text]}),
    ):
        if not (isinstance(table, dict) and CANARY in table):
            with pytest.raises(ConfigError) as caught:
                resolve(**{place: {"endpoints": table}})
            assert CANARY not in json.dumps(caught.value.as_dict())
    file.write_text(f"[endpoints]\nsales = {json.dumps(text)}\n")
    with pytest.raises(ConfigError) as caught:
        resolve((file,))
    assert caught.value.message.startswith(f"{file}: endpoints.sales: ")
    assert CANARY not in json.dumps(caught.value.as_dict())
    with pytest.raises(ConfigError) as caught:
        parse_endpoints([text])
    assert CANARY not in json.dumps(caught.value.as_dict())
    assert CANARY not in json.dumps(shown({"a": text}))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "a\n", "\u00e4", "x" * 101])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"kernelspec: endpoints: the name .* is not allowed"):
        resolve(spec={"endpoints": {name: "db:80"}})


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["sales"], "--endpoint: is not NAME=HOST:PORT"),
        (["=db:80"], "--endpoint: is not NAME=HOST:PORT"),
        (["db:80"], "--endpoint: is not NAME=HOST:PORT"),
        (["a=db:80", "a=db:81"], "--endpoint a: two endpoints have this name"),
    ],
)
def test_what_cannot_be_typed(texts: list[str], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_endpoints(texts)
    assert reason in caught.value.message
    assert caught.value.remedy


def test_the_place_is_named_as_it_was_written() -> None:
    with pytest.raises(ConfigError, match=r"^--endpoint sales: has no port"):
        resolve(cli={"endpoints": {"sales": "db"}})
    with pytest.raises(ConfigError, match=r"^kernelspec: endpoints\.sales: has no port"):
        resolve(spec={"endpoints": {"sales": "db"}})
    with pytest.raises(ConfigError, match=r"^kernelspec: endpoints: a table of name = HOST:PORT"):
        resolve(spec={"endpoints": ["db:80"]})


def test_the_places_add_up_and_the_first_names_a_name(tmp_path: Path) -> None:
    user, system = tmp_path / "user.toml", tmp_path / "system.toml"
    system.write_text('[endpoints]\na = "system:1"\nb = "system:1"\nc = "system:1"\nd = "d:1"\n')
    user.write_text('[endpoints]\na = "user:1"\nb = "user:1"\nc = "user:1"\n')
    spec = {"endpoints": {"a": "spec:1", "b": "spec:1"}}
    cli = {"endpoints": {"a": "cli:1"}}
    # One host and port per name: what is overridden does not count as given.
    given = resolve((user, system), spec=spec, cli=cli)
    assert given == ("a=cli:1", "b=spec:1", "c=user:1", "d=d:1")


def test_each_host_name_has_an_address_and_a_literal_keeps_its_own() -> None:
    assert found(
        "zeta:5432", "10.1.2.3:5432", "alpha:5432", "Zeta:5433", "localhost:5432", "127.0.0.5:5432"
    ) == [
        ("zeta", "127.0.1.1", 5432),
        ("10.1.2.3", "10.1.2.3", 5432),
        ("alpha", "127.0.1.2", 5432),
        ("zeta", "127.0.1.1", 5433),
        ("localhost", "127.0.0.1", 5432),
        ("127.0.0.5", "127.0.0.5", 5432),
    ]


def test_addresses_do_not_depend_on_the_order_in_which_places_speak() -> None:
    table = {"b": "two:1", "a": "one:1", "c": "three:1"}
    both = (
        resolve_settings(
            command_line={"endpoints": first},
            environ={},
            kernelspec={"endpoints": second},
            files=(),
            default_profile="analysis",
            host=HOST,
        ).endpoints
        for first, second in ((table, {}), ({"c": "three:1"}, {"a": "one:1", "b": "two:1"}))
    )
    one, other = both
    assert one == other
    assert [(e.host, e.address) for e in one] == [
        ("one", "127.0.1.1"),
        ("two", "127.0.1.2"),
        ("three", "127.0.1.3"),
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("db:80", "DB:80"),
        ("10.0.0.1:80", "10.0.0.1:80"),
        ("localhost:80", "127.0.0.1:80"),
        ("127.0.0.1:80", "localhost:80"),
    ],
)
def test_two_that_are_one_inside(first: str, second: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^place of endpoints\.e01: is the same as endpoint 'e00'"
    ) as caught:
        found(first, second)
    assert caught.value.remedy


def test_sixteen_are_allowed_in_all(tmp_path: Path) -> None:
    half = {f"a{n}": f"host-{n}:80" for n in range(MAX_ENDPOINTS // 2)}
    rest = {f"b{n}": f"other-{n}:80" for n in range(MAX_ENDPOINTS // 2)}
    assert len(resolve(cli={"endpoints": half}, spec={"endpoints": rest})) == MAX_ENDPOINTS
    with pytest.raises(ConfigError, match=r"17 endpoints are given, which is over 16") as caught:
        resolve(cli={"endpoints": half}, spec={"endpoints": {**rest, "one": "more:80"}})
    assert caught.value.remedy


def test_a_place_with_too_many_is_named_once(tmp_path: Path) -> None:
    file = tmp_path / "backintel.toml"
    lines = [f'a{n} = "host-{n}:80"' for n in range(MAX_ENDPOINTS)]
    file.write_text("\n".join(["[endpoints]", *lines]))
    with pytest.raises(ConfigError) as caught:
        resolve((file,), cli={"endpoints": {"one": "more:80", "two": "more:81"}})
    assert caught.value.message.startswith(f"--endpoint, {file}: endpoints: 18 endpoints are")


def _provisioner(config: Mapping[str, Any], parent: Any = None) -> SandboxProvisioner:
    spec = KernelSpec(
        argv=["python3", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        metadata={"kernel_provisioner": {"config": config}},
    )
    return SandboxProvisioner(
        kernel_id="k", kernel_spec=spec, parent=parent or KernelManager(), **config
    )


def _typed(value: str) -> Config:
    """Return what ``value`` on the command line of a Jupyter server makes of its configuration."""
    server = Application()
    server.parse_command_line([f"--SandboxProvisioner.endpoints={value}"])
    return server.config


def test_a_kernels_endpoints_reach_the_guests_specification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("BACKINTEL_HOME", str(tmp_path / "home"))
    table = {"sales": "db.example.org:5432", "files": "localhost:9000"}
    provisioner = _provisioner({"engine": "bwrap", "profile": "benchmark", "endpoints": table})
    provisioner.settings = provisioner.plan()
    message = json.loads(json.dumps(provisioner._request(None)))
    assert message["endpoints"] == [
        {"name": "files", "host": "localhost", "address": "127.0.0.1", "port": 9000},
        {"name": "sales", "host": "db.example.org", "address": "127.0.1.1", "port": 5432},
    ]
    own = request(tmp_path, "bwrap")
    start = Start.parse(
        {**message, "session": own.session, "socket_dir": str(own.socket_dir), "started_at": 0.0}
    )
    assert start.endpoints == (
        GuestEndpoint("files", "localhost", "127.0.0.1", 9000),
        GuestEndpoint("sales", "db.example.org", "127.0.1.1", 5432),
    )

    class Recording:
        """Stands in for an engine: keeps what it is asked to start."""

        leftovers = Leftovers()
        asked: list[Any]

        def __init__(self) -> None:
            self.asked = []

        def plan(self, spec: Any) -> Leftovers:
            self.asked.append(spec)
            return Leftovers()

        def launch(self, spec: Any) -> Recording:
            self.asked.append(spec)
            return self

    engine = Recording()
    opening = Opening(start)
    opening.engine = engine  # type: ignore[assignment]
    opening.image = SimpleNamespace(root=tmp_path)  # type: ignore[assignment]
    opening.journal.open()
    opening.launch(())
    assert [spec.endpoints for spec in engine.asked] == [start.endpoints] * 2


@pytest.mark.parametrize(
    "endpoints", [None, [{"name": "a", "host": "db", "port": 80}], [["a"]], [{"port": "x"}]]
)
def test_a_malformed_request_is_refused(tmp_path: Path, endpoints: object) -> None:
    with pytest.raises(StartFailed, match="the start request is malformed"):
        request(tmp_path, "bwrap", endpoints=endpoints)


def test_neither_a_start_request_nor_its_environment_names_endpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("BACKINTEL_ENDPOINTS", "a=db:80")
    provisioner = _provisioner({"engine": "bwrap", "profile": "benchmark"})
    words = {
        "env": {"BACKINTEL_ENDPOINTS": "a=db:80"},
        "endpoints": {"a": "db:80"},
        "extra_arguments": ["--endpoint", "a=db:80"],
    }
    asyncio.run(provisioner.pre_launch(**words))
    assert provisioner.settings is not None
    assert provisioner.settings.endpoints == ()


def test_jupyters_own_configuration_names_endpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    base = {"engine": "bwrap", "profile": "benchmark"}
    in_file = Config({"SandboxProvisioner": {"endpoints": {"sales": "db:5432"}}})
    for config in (in_file, _typed("sales=db:5432")):
        (endpoint,) = _provisioner(base, KernelManager(config=config)).plan().endpoints
        assert endpoint == GuestEndpoint("sales", "db", "127.0.1.1", 5432)


@pytest.mark.parametrize("text", WITH_PASSWORD)
def test_jupyters_own_refusal_repeats_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    base = {"engine": "bwrap", "profile": "benchmark"}
    in_file = Config({"SandboxProvisioner": {"endpoints": text}})
    for config in (in_file, _typed(text)):
        with pytest.raises((TraitError, ConfigError)) as caught:
            _provisioner(base, KernelManager(config=config)).plan()
        assert CANARY not in "".join(traceback.format_exception(caught.value))


def test_a_plan_and_a_receipt_say_whose_word_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    config = {"engine": "bwrap", "profile": "benchmark", "endpoints": {"sales": "DB:5432"}}
    kernel = {
        "argv": ["python3", "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "x",
        "language": "python",
        "metadata": {
            "kernel_provisioner": {"provisioner_name": "backintel-provisioner", "config": config}
        },
    }
    directory = tmp_path / "jupyter/kernels/sandboxed"
    directory.mkdir(parents=True)
    (directory / "kernel.json").write_text(json.dumps(kernel))
    expected = [{"name": "sales", "kind": "tcp", "host": "db", "port": 5432, "identity": "stated"}]
    assert plans.plan("sandboxed", KernelSpecManager(), None)["endpoints"] == expected
    receipt = Receipt("0123456789abcdef", "k")
    receipt.update(endpoints=stated_endpoints([GuestEndpoint("sales", "db", "127.0.1.1", 5432)]))
    assert receipt.data["endpoints"] == expected
    schema = json.loads((repository / "docs/receipt.schema.json").read_text())
    part = schema["properties"]["endpoints"]
    jsonschema.validate(receipt.data["endpoints"], part)
    for wrong in ({"port": 0}, {"identity": "proven"}, {"kind": "udp"}, {"host": None}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate([{**expected[0], **wrong}], part)
