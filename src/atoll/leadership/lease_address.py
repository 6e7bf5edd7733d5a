"""The address of a lease, as in `atoll up --leader-lease etcd://one:2379,two:2379/atoll`."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from atoll.cluster.environment_variables import LEADER_LEASE_AUTHORITY, LEADER_LEASE_CERTIFICATE, LEADER_LEASE_KEY
from atoll.errors import LeaseError
from atoll.leadership.lease_record import LeaseStore

_FORMS = "expected etcd://HOST:PORT/NAME, etcds://HOST:PORT/NAME or kubernetes://NAMESPACE/NAME"
_SERVER = re.compile(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{1,5})", re.ASCII)
_MAX_PORT = 65535
_LABEL = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)


class LeaseKind(StrEnum):
    """The kinds of servers, as in an address."""

    ETCD = "etcd"
    ETCD_WITH_TLS = "etcds"
    KUBERNETES = "kubernetes"


class LeaseAddress(msgspec.Struct, frozen=True):
    """An address. `servers` are those of etcd, or the namespace in Kubernetes."""

    kind: LeaseKind
    servers: tuple[str, ...]
    name: str


def parse_lease(text: str) -> LeaseAddress:
    """Return the address in a text. Raise LeaseError if it has another form."""
    scheme, _, rest = text.partition("://")
    where, _, name = rest.partition("/")
    servers = tuple(where.split(","))
    try:
        kind = LeaseKind(scheme)
    except ValueError:
        raise _wrong(text) from None
    if kind is LeaseKind.KUBERNETES:
        is_right = len(servers) == 1 and bool(_LABEL.fullmatch(where)) and bool(_LABEL.fullmatch(name))
    else:
        is_right = all(map(_is_server, servers)) and bool(name) and name.isprintable() and len(name) <= 200
    if not is_right:
        raise _wrong(text)
    return LeaseAddress(kind, servers, name)


def _is_server(text: str) -> bool:
    found = _SERVER.fullmatch(text)
    return found is not None and 0 < int(found[2]) <= _MAX_PORT


def _wrong(text: str) -> LeaseError:
    """Return the error for an address of another form, without what is before an "@", which may be a password."""
    _, at, rest = text.rpartition("@")
    shown = f"...@{rest}" if at else text
    return LeaseError(f"the lease is {shown[:200]!r}: {_FORMS}")


def open_lease(text: str, environment: Mapping[str, str] = os.environ) -> LeaseStore:
    """Return the lease at an address, without a request. Raise LeaseError if files for its server are missing."""
    # The modules of HTTP, which take long to import, are only needed with a lease.
    from atoll.leadership.etcd_lease import EtcdLease
    from atoll.leadership.kubernetes_lease import KubernetesLease, api_server
    from atoll.leadership.lease_http import LeaseServer

    address = parse_lease(text)
    if address.kind is LeaseKind.KUBERNETES:
        return KubernetesLease(api_server(environment), address.servers[0], address.name)
    tls = _tls(environment) if address.kind is LeaseKind.ETCD_WITH_TLS else None
    return EtcdLease([LeaseServer(each, "etcd", tls) for each in address.servers], address.name)


def _tls(environment: Mapping[str, str]) -> ssl.SSLContext:
    files = [each.text(environment) for each in (LEADER_LEASE_AUTHORITY, LEADER_LEASE_CERTIFICATE, LEADER_LEASE_KEY)]
    authority, certificate, key = files
    try:
        context = ssl.create_default_context(cafile=authority or None)
        if certificate or key:
            context.load_cert_chain(certificate, key or None)
    except (OSError, ValueError) as error:
        variables = ", ".join(
            each.variable for each in (LEADER_LEASE_AUTHORITY, LEADER_LEASE_CERTIFICATE, LEADER_LEASE_KEY)
        )
        raise LeaseError(f"cannot read the files of {variables}: {error}") from None
    return context
