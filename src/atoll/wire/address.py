"""Addresses, and the rule of who may listen where.

An address is `unix:/path`, `tls://HOST:PORT` (by TLS, where both sides prove themselves) or `HOST:PORT` (in the clear,
also written `tcp://HOST:PORT`). What is reached on several networks has several of HOST:PORT, separated by commas: who
dials tries them in turn. Loopback and unix sockets are reachable by this machine alone; anything else is
reachable by strangers, so it needs TLS, or at least a token.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace

from atoll.errors import AddressError

_UNIX_PATH_LIMIT = 107  # sun_path on Linux is 108 bytes with its terminating zero
_EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True)
class Address:
    """Where a process listens: a unix socket's `path`, or `host` and `port`, perhaps with TLS; and its `others`."""

    path: str = ""
    host: str = ""
    port: int = 0
    tls: bool = False
    others: tuple[Address, ...] = ()

    @property
    def each(self) -> tuple[Address, ...]:
        """Its addresses, to be dialed in this order."""
        return (replace(self, others=()), *self.others) if self.others else (self,)

    @property
    def is_unix(self) -> bool:
        return bool(self.path)

    @property
    def is_local(self) -> bool:
        """True where nobody from outside this machine can connect."""
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
        """As people write it, whether with TLS or without."""
        first = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        return ",".join([first, *(each.host_and_port for each in self.others)])

    @property
    def is_everywhere(self) -> bool:
        """True where it stands for all of a machine's addresses: to be listened at, and not to be dialed."""
        return self.host in _EVERYWHERE

    def secured(self) -> Address:
        """The same with TLS; a unix socket needs none."""
        return self if self.is_unix else replace(self, tls=True, others=tuple(each.secured() for each in self.others))


def parse_address(text: str) -> Address:
    """Reads `unix:/path`, `tls://HOST:PORT`, `HOST:PORT`, `[V6]:PORT`, `tcp://HOST:PORT` or `grpc://HOST:PORT`."""
    rest = text.strip()
    tls = rest.startswith("tls://")
    for scheme in ("tls://", "tcp://", "grpc://"):
        rest = rest.removeprefix(scheme)
    if rest.startswith("unix:"):
        path = rest.removeprefix("unix:")
        path = path[2:] if path.startswith("///") else path
        if not path.startswith("/"):
            raise AddressError(f"{text!r}: a unix address needs an absolute path, such as unix:/run/atoll.sock")
        if len(path.encode()) > _UNIX_PATH_LIMIT:
            raise AddressError(f"{text!r}: a unix socket's path may have {_UNIX_PATH_LIMIT} bytes at most")
        return Address(path=path)
    first, *more = rest.split(",")
    found = [_host_and_port(each, text, tls) for each in (first, *more)]
    return replace(found[0], others=tuple(found[1:])) if more else found[0]


def _host_and_port(rest: str, text: str, tls: bool) -> Address:
    host, colon, port = rest.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise AddressError(f"{text!r} is no address: expected unix:/path or HOST:PORT")
    return Address(host=host, port=int(port), tls=tls)


def check_may_listen(address: Address, token: str) -> None:
    """Raises AddressError for several addresses, and where listening would open the cluster to strangers.

    That is without TLS or a token.
    """
    if address.others:
        raise AddressError(f"{address}: a process listens at one address; on several networks at 0.0.0.0 or [::]")
    if not address.is_local and not address.tls and not token:
        raise AddressError(
            f"{address} can be reached from other machines, so it needs a token: set ATOLL_TOKEN "
            "(the same for the cluster and for its clients), or listen on 127.0.0.1 or a unix socket"
        )
