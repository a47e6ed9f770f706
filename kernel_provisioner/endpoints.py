"""Assigned endpoints (spec F): which TCP services of the owner a guest may reach, and where inside.

The owner names ``HOST:PORT``; the guest finds it under the same host and port on its own loopback,
and nothing else. What stands there is the owner's word: it is not identified. An address is the one
thing said here, so whatever looks like more (a URL, a user, a password) is refused, and what was
given is never repeated: it may hold a password.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network

from kernel_provisioner.engines.base import GuestEndpoint
from kernel_provisioner.engines.bwrap.command import HOSTNAME
from kernel_provisioner.errors import ConfigError

MAX_ENDPOINTS = 16
MAX_HOST = 253
MAX_NAME = 100
LOCALHOST = "localhost"
NAMED = IPv4Network("127.0.1.0/24")
"""Where host names are found inside: 127.0.1.1 is the first one's address."""

_EXAMPLE = "write for example sales=db.example.org:5432."
_FORM = "give HOST:PORT, for example db.example.org:5432."
_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]+")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
# What resolvers read as a number, and so as (part of) an IPv4 address of an older form.
_NUMERIC = re.compile(r"[0-9]+|0x[0-9a-f]*")
_PORT = re.compile(r"[0-9]{1,5}")
_CLOUD = "is where a cloud answers with credentials"
_REFUSED_NETWORKS = {
    IPv4Network("0.0.0.0/8"): "is no host: it stands for every address of a machine",
    IPv4Network("169.254.0.0/16"): "is link-local, where clouds answer with credentials",
    IPv4Network("100.100.100.200/32"): _CLOUD,
    IPv4Network("168.63.129.16/32"): _CLOUD,
    IPv4Network("192.0.0.192/32"): _CLOUD,
    IPv4Network("127.0.0.0/32"): "is no host: it stands for a network",
    IPv4Network("127.255.255.255/32"): "is a broadcast address",
    IPv4Network("224.0.0.0/4"): "is a multicast address",
    IPv4Network("255.255.255.255/32"): "is the broadcast address",
    IPv4Network("240.0.0.0/4"): "is reserved",
}
_METADATA = (IPv6Network("fd00:ec2::/32"), IPv6Network("fd20:ce::254/128"))
# NAT64, and the old form for an IPv4 address: the last four bytes are one.
_ENDS_IN_IPV4 = (IPv6Network("64:ff9b::/96"), IPv6Network("::/96"))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A checked endpoint: ``host`` is a DNS name in lower case or an IPv4 address."""

    name: str
    host: str
    port: int


def parse_endpoints(texts: Iterable[str]) -> dict[str, str]:
    """Split several ``NAME=HOST:PORT``, the latter not looked at.

    Raises ConfigError for another form and for two of one name.
    """
    endpoints: dict[str, str] = {}
    for text in texts:
        name, equals, target = text.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise ConfigError("--endpoint: is not NAME=HOST:PORT.", remedy=_EXAMPLE)
        if name in endpoints:
            raise ConfigError(
                f"--endpoint {name}: two endpoints have this name.",
                remedy="give each endpoint a name of its own.",
            )
        endpoints[name] = target
    return endpoints


def check_endpoint(name: str, text: object) -> Endpoint:
    """Return the endpoint ``HOST:PORT``. Raises ConfigError; the caller adds the place."""
    if not isinstance(text, str) or not text:
        raise ConfigError("is no text.", remedy=_FORM)
    if "://" in text:
        raise ConfigError("is a URL.", remedy=f"leave scheme, user and path out; {_FORM}")
    if "@" in text:
        raise ConfigError(
            "holds a user or a password.", remedy=f"leave them out, they are not needed; {_FORM}"
        )
    if "[" in text or text.count(":") > 1:
        reason = (
            "is an IPv6 address, which is not supported" if _is_ipv6(text) else "has two colons"
        )
        raise ConfigError(f"{reason}.", remedy="give a host name or an IPv4 address, and a port.")
    host, colon, port = text.partition(":")
    if not colon or not port:
        raise ConfigError("has no port.", remedy=_FORM)
    if not _PORT.fullmatch(port) or not 1 <= int(port) <= 65535:
        raise ConfigError("has a port that is no number of 1 to 65535.", remedy=_FORM)
    return Endpoint(name, _check_host(host), int(port))


def refused_address(address: IPv4Address | IPv6Address) -> str | None:
    """Return why nothing at this address may be an endpoint, or None.

    It may be what a host name leads to: whoever serves the name has chosen it.
    """
    if isinstance(address, IPv6Address):
        inner = _ipv4_within(address)
        if inner is None:
            if any(address in network for network in _METADATA):
                return _CLOUD
            special = address.is_link_local or address.is_multicast
            return "is no address of one host's service" if special else None
        address = inner
    return next((why for net, why in _REFUSED_NETWORKS.items() if address in net), None)


def read_table(place: Callable[[str], str], table: object) -> dict[str, Endpoint]:
    """Return one place's endpoints by name; ``place`` says where a key stands.

    Raises ConfigError with place, key, reason and remedy, and without the value.
    """
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"{place('endpoints')}: a table of name = HOST:PORT is needed.",
            remedy='write for example sales = "db.example.org:5432" in it.',
        )
    found = {}
    for name, text in table.items():
        if not isinstance(name, str) or not _is_name(name):
            # Not repeated: it may be a URL that was put before the equals sign.
            raise ConfigError(
                f"{place('endpoints')}: the name of an endpoint is not allowed.",
                remedy=f"use 1 to {MAX_NAME} letters, digits, '.', '_' and '-', "
                "but not '.' or '..'.",
            )
        try:
            found[name] = check_endpoint(name, text)
        except ConfigError as error:
            raise ConfigError(
                f"{place(f'endpoints.{name}')}: {error.message}", remedy=error.remedy
            ) from None
    return found


def shown(table: object) -> dict[str, str]:
    """Return a stored table's endpoints for people, without what is refused of names and values."""
    given = table if isinstance(table, Mapping) else {}
    texts = {}
    for given_name, text in given.items():
        name = str(given_name) if _is_name(str(given_name)) else "(refused name)"
        try:
            endpoint = check_endpoint(name, text)
            texts[name] = f"{endpoint.host}:{endpoint.port}"
        except ConfigError as error:
            texts[name] = f"(refused: {error.message})"
    return texts


def assign(
    endpoints: Mapping[str, tuple[Callable[[str], str], Endpoint]],
) -> tuple[GuestEndpoint, ...]:
    """Return where the guest finds endpoints, given by name as (place, endpoint); by name.

    ``place`` says where a key stands, as for ``read_table``.
    Each host name has a loopback address of its own, numbered in the order of the endpoints' names,
    so that stores may share a port. Raises ConfigError for too many, and for two that would be the
    same inside.
    """
    if len(endpoints) > MAX_ENDPOINTS:
        places = ", ".join(sorted({place("endpoints") for place, _ in endpoints.values()}))
        raise ConfigError(
            f"{places}: {len(endpoints)} endpoints are given, which is over {MAX_ENDPOINTS}.",
            remedy="leave out those that the notebook does not need.",
        )
    addresses: dict[str, str] = {LOCALHOST: "127.0.0.1"}
    free = NAMED.hosts()
    taken: dict[tuple[str, int], str] = {}
    assigned = []
    for name, (place, endpoint) in sorted(endpoints.items()):
        host, port = endpoint.host, endpoint.port
        if host not in addresses:
            addresses[host] = host if _is_ipv4(host) else str(next(free))
        other = taken.setdefault((addresses[host], port), name)
        if other != name:
            raise ConfigError(
                f"{place(f'endpoints.{name}')}: is the same as endpoint {other!r} ({host}:{port}).",
                remedy="remove one of them.",
            )
        assigned.append(GuestEndpoint(name, host, addresses[host], port))
    return tuple(assigned)


def _check_host(given: str) -> str:
    """Return the host in lower case. Raises ConfigError."""
    if len(given) > MAX_HOST:
        raise ConfigError(f"has a host of over {MAX_HOST} bytes.", remedy=_FORM)
    host = given.lower()
    labels = host.split(".")
    # Lower case turns some letters of other alphabets into ASCII.
    if not given.isascii() or not all(_LABEL.fullmatch(label) for label in labels):
        raise ConfigError(
            "has a host that is neither a DNS name nor an IPv4 address.",
            remedy="give the host's address, or a name of it without '_'."
            if "_" in given
            else "give a host of letters, digits, '-' and '.', for example db.example.org.",
        )
    if _NUMERIC.fullmatch(labels[-1]):
        try:
            address = IPv4Address(host)
        except AddressValueError:
            raise ConfigError(
                "has a host that ends in a number and is no IPv4 address of four parts.",
                remedy="write the address out, for example 192.0.2.7.",
            ) from None
        reason = refused_address(address)
        if address in NAMED:
            reason = f"is reserved: inside, {NAMED} is where host names are found"
        if reason:
            raise ConfigError(
                f"{address} {reason}.", remedy="give the address of the service itself."
            )
    if host == HOSTNAME:
        raise ConfigError(
            f"{host!r} is the guest's own name.", remedy="give the host's full name or address."
        )
    return host


def _ipv4_within(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address that a translator or a tunnel makes of an IPv6 address, or None."""
    if int(address) == 1:
        # ::1, the host itself.
        return None
    if any(address in network for network in _ENDS_IN_IPV4):
        return IPv4Address(address.packed[-4:])
    return address.ipv4_mapped or address.sixtofour


def _is_name(text: str) -> bool:
    return bool(_NAME.fullmatch(text)) and len(text) <= MAX_NAME


def _is_ipv4(host: str) -> bool:
    return bool(_NUMERIC.fullmatch(host.rpartition(".")[2]))


def _is_ipv6(text: str) -> bool:
    """Tell whether an IPv6 address is what was meant, with or without brackets and a port."""
    host = text.partition("]")[0].removeprefix("[") if "[" in text else text
    try:
        IPv6Address(host)
    except AddressValueError:
        return "[" in text and ":" in host
    return True
