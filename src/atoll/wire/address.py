"""Addresses of processes.

An address is `unix:/path`, `tls://HOST:PORT` (mutual TLS) or `HOST:PORT` (unencrypted, also written `tcp://HOST:PORT`).
A process on several networks has several HOST:PORT, separated by commas, and clients try them in turn. Only this
machine can reach loopback addresses and unix sockets. All other addresses need TLS or at least a token.
"""

from __future__ import annotations

import ipaddress

import msgspec
from msgspec.structs import replace

from atoll.errors import AddressError

_UNIX_PATH_LIMIT = 107  # sun_path on Linux is 108 bytes with its terminating zero
_EVERYWHERE = ("0.0.0.0", "::")


class Address(msgspec.Struct, frozen=True):
    """The address of a process: the `path` of a unix socket, or `host` and `port`, and `others` on other networks."""

    path: str = ""
    host: str = ""
    port: int = 0
    tls: bool = False
    others: tuple[Address, ...] = ()

    @property
    def each(self) -> tuple[Address, ...]:
        """The single addresses, in the order in which to dial them."""
        return (replace(self, others=()), *self.others) if self.others else (self,)

    @property
    def is_unix(self) -> bool:
        return bool(self.path)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        if not all(each.is_local for each in self.others):
            return False
        if self.is_unix or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.is_unix:
            return f"unix:{self.path}"
        return ("tls://" if self.tls else "") + self.host_and_port

    @property
    def host_and_port(self) -> str:
        """The address as users write it, without the scheme."""
        first = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        return ",".join([first, *(each.host_and_port for each in self.others)])

    @property
    def is_everywhere(self) -> bool:
        """Whether the address means all addresses of a machine. A process can listen there, but not dial it."""
        return self.host in _EVERYWHERE

    def secured(self) -> Address:
        """Return the address with TLS, or a unix address unchanged."""
        return self if self.is_unix else replace(self, tls=True, others=tuple(each.secured() for each in self.others))


def parse_address(text: str) -> Address:
    """Parse `unix:/path`, `tls://HOST:PORT`, `HOST:PORT`, `[V6]:PORT`, `tcp://HOST:PORT` or `grpc://HOST:PORT`.

    Raise AddressError for other text.
    """
    rest = text.strip()
    if rest.startswith("atoll://"):  # a secret, so the error does not contain it
        raise AddressError("the address is a join token: set ATOLL_JOIN or --join to it, or to a file with it")
    tls = rest.startswith("tls://")
    for scheme in ("tls://", "tcp://", "grpc://"):
        rest = rest.removeprefix(scheme)
    if rest.startswith("unix:"):
        path = rest.removeprefix("unix:")
        path = path[2:] if path.startswith("///") else path
        if not path.startswith("/"):
            raise AddressError(f"{text!r}: a unix address needs an absolute path, such as unix:/run/atoll.sock")
        if len(path.encode()) > _UNIX_PATH_LIMIT:
            raise AddressError(f"{text!r}: the path of a unix socket is limited to {_UNIX_PATH_LIMIT} bytes")
        return Address(path=path)
    first, *more = rest.split(",")
    found = [_host_and_port(each, text, tls) for each in (first, *more)]
    return replace(found[0], others=tuple(found[1:])) if more else found[0]


def _host_and_port(rest: str, text: str, tls: bool) -> Address:
    host, colon, port = rest.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or "/" in host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise AddressError(f"invalid address {text!r}: expected unix:/path or HOST:PORT")
    return Address(host=host, port=int(port), tls=tls)


def check_reached_by_hosts(address: Address) -> None:
    """Raise AddressError for a unix socket, since host agents on other machines cannot connect to it."""
    if address.is_unix:
        raise AddressError(
            "host agents connect from other machines: choose where the controller listens, such as with "
            "`--listen 10.0.0.1:7000`"
        )


def check_may_listen(address: Address, token: str) -> None:
    """Raise AddressError for several addresses, and for one that others can reach if there is no TLS and no token."""
    if address.others:
        raise AddressError(f"{address}: a process listens at one address; for several networks, use 0.0.0.0 or [::]")
    if not address.is_local and not address.tls and not token:
        raise AddressError(
            f"{address} can be reached from other machines, so it needs a token: set ATOLL_TOKEN to the same value "
            "for the cluster and its clients, or listen on 127.0.0.1 or a unix socket"
        )
