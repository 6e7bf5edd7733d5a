"""How to reach a cluster: its address, and the credentials of this user."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from atoll.errors import AccessError, AddressError
from atoll.operate.cluster_registry import (
    ClusterRecord,
    ClusterRegistry,
    embedded_clusters,
    is_cluster_name,
    standing_clusters,
)
from atoll.security.access import is_insecure
from atoll.security.join_token import JoinToken, host_join_file, join_file, join_of_environment, read_join
from atoll.wire.address import Address, parse_address
from atoll.wire.tls.tls_errors import no_identity


@dataclass(frozen=True)
class Reach:
    """The address of a cluster, and a join token if the address uses TLS."""

    address: Address
    join: JoinToken | None = None


def reach(
    address: str = "", join: str = "", records: list[ClusterRecord] | None = None, for_hosts: bool = False
) -> Reach:
    """Return how to reach the cluster of a join token, or the one at an address, or the one with a name as `address`.

    `join` defaults to ATOLL_JOIN. With both, `address` may be another address of the same cluster. The clusters in
    `records`, by default all of this user on this machine, need no join token, and have names. Raises AddressError,
    and AccessError if another cluster on TCP has no join token and ATOLL_INSECURE does not allow that.
    """
    if is_cluster_name(address):
        return reach_of(_named(address, records), for_hosts=for_hosts)
    join_token = read_join(join) if join else join_of_environment()
    if not address:
        if join_token is None:
            raise AccessError("an address or a join token is required")
        return Reach(join_token.address, join_token)
    parsed = parse_address(address)
    if parsed.is_unix:
        return Reach(parsed)
    if join_token is None:
        record = _own(parsed, records)
        if record is not None:
            return reach_of(record, parsed, for_hosts)
    if join_token is not None:
        return Reach(parsed.secured(), replace(join_token, address=parsed.secured()))
    if parsed.tls or not is_insecure():
        raise no_identity(parsed, "the cluster", for_hosts)
    return Reach(parsed)


def reach_of(record: ClusterRecord, address: Address | None = None, for_hosts: bool = False) -> Reach:
    """Return how to reach this user's cluster on this machine, by another `address` if given. Raises AccessError."""
    listens = parse_address(record.address)
    if not listens.tls:
        return Reach(address or listens)
    secured = (address or listens).secured()
    file = (host_join_file if for_hosts else join_file)(record.directory)
    if not file.exists():
        raise AccessError(f"cluster {record.name} starts or ends now, so {file} does not exist: try again")
    return Reach(secured, replace(read_join(str(file)), address=secured))


def join_token_with(token: str, record: ClusterRecord | None, join: JoinToken | None) -> JoinToken | None:
    """Return the join token of a cluster for clients with this `token`, or None if the cluster has no TLS.

    `record` is that of this user's cluster on this machine, if it is one, and `join` the join token in use. The
    cluster's own file has the advertised address. Raises AccessError.
    """
    if join is None:
        return None
    known = read_join(str(join_file(record.directory))) if record is not None else join
    return replace(known, token=token)


def is_at(record: ClusterRecord, address: Address) -> bool:
    """Return whether the cluster listens at `address`, or is reached there by others, with or without TLS."""
    listens = parse_address(record.address)
    if address.others:
        return any(is_at(record, each) for each in address.each)
    if listens.is_everywhere and address.is_local and not address.is_unix:
        return listens.port == address.port
    known = (listens, *parse_address(record.reached_at).each)
    return replace(address, tls=False) in (replace(each, tls=False) for each in known)


def _named(name: str, records: list[ClusterRecord] | None) -> ClusterRecord:
    """Return this user's running cluster with a name. Raises AddressError."""
    known = [*standing_clusters(), *embedded_clusters()] if records is None else records
    found = next((each for each in known if each.name == name), None)
    if found is None:
        names = ", ".join(each.name for each in known) or "none"
        raise AddressError(
            f"no cluster of yours with the name {name!r} is up on this machine (up: {names}): start it with "
            f"`atoll up --name {name}`, or use another name, or an address (unix:/path or HOST:PORT)"
        )
    return found


def _own(address: Address, records: list[ClusterRecord] | None) -> ClusterRecord | None:
    known = [*ClusterRegistry().all(), *embedded_clusters()] if records is None else records
    return next((each for each in known if is_at(each, address) or _continues_at(each, address)), None)


def _continues_at(record: ClusterRecord, address: Address) -> bool:
    where = record.continues_at
    return bool(where) and replace(parse_address(where), tls=False) == replace(address, tls=False)
