"""How a cluster is reached: where it is, and what this user proves himself with."""

from __future__ import annotations

from dataclasses import dataclass, replace

from atoll.errors import AccessError
from atoll.operate.cluster_registry import ClusterRecord, ClusterRegistry, embedded_clusters
from atoll.security.access import is_insecure
from atoll.security.join_token import JoinToken, join_of_environment, read_join
from atoll.security.start_security import host_join_file, join_file
from atoll.wire.address import Address, parse_address
from atoll.wire.tls.tls_errors import no_identity


@dataclass(frozen=True)
class Reach:
    """`join` is there where the address is with TLS."""

    address: Address
    join: JoinToken | None = None


def reach(
    address: str = "", join: str = "", records: list[ClusterRecord] | None = None, for_hosts: bool = False
) -> Reach:
    """The cluster of a join token (of ATOLL_JOIN if that is ""), or at an address, which may be another one of it.

    A cluster of this user's on this machine needs no join token. Raises AddressError, and AccessError where there is
    no join token for a cluster on TCP, unless ATOLL_INSECURE says that there is to be none.
    """
    said = read_join(join) if join else join_of_environment()
    if not address:
        if said is None:
            raise AccessError("there is neither an address nor a join token")
        return Reach(said.address, said)
    parsed = parse_address(address)
    if parsed.is_unix:
        return Reach(parsed)
    if said is None:
        record = _own(parsed, records)
        if record is not None:
            return reach_of(record, parsed, for_hosts)
    if said is not None:
        return Reach(parsed.secured(), replace(said, address=parsed.secured()))
    if parsed.tls or not is_insecure():
        raise no_identity(parsed, "the cluster", for_hosts)
    return Reach(parsed)


def reach_of(record: ClusterRecord, address: Address | None = None, for_hosts: bool = False) -> Reach:
    """A cluster of this user's on this machine, perhaps by another address of it. Raises AccessError."""
    listens = parse_address(record.address)
    if not listens.tls:
        return Reach(address or listens)
    secured = (address or listens).secured()
    file = (host_join_file if for_hosts else join_file)(record.directory)
    return Reach(secured, replace(read_join(str(file)), address=secured))


def is_at(record: ClusterRecord, address: Address) -> bool:
    """Whether the cluster listens there, with TLS or without."""
    listens = parse_address(record.address)
    if address.others:
        return any(is_at(record, each) for each in address.each)
    if listens.is_everywhere and address.is_local and not address.is_unix:
        return listens.port == address.port
    return replace(listens, tls=False) == replace(address, tls=False)


def _own(address: Address, records: list[ClusterRecord] | None) -> ClusterRecord | None:
    known = [*ClusterRegistry().all(), *embedded_clusters()] if records is None else records
    return next((each for each in known if is_at(each, address)), None)
