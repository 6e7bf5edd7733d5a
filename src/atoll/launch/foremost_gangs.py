"""Find the gangs in flight that are the first on their hosts, for which the other gangs in flight wait."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from atoll.cluster.topology import IslandShape
from atoll.state.queued_nodes import Gang, HostCallKind
from atoll.state.session import GangRun


def foremost_gangs(in_flight: Iterable[Gang[GangRun]]) -> Iterator[Gang[GangRun]]:
    """Yield the gangs that are the first on all of their hosts. `in_flight` is in the order in which they started."""
    busy: set[int] = set()
    for gang in in_flight:
        left = gang.run.hosts_left
        if busy.isdisjoint(left):
            yield gang
        busy |= left


def with_foremost(
    in_flight: Iterable[Gang[GangRun]], shapes: Sequence[IslandShape]
) -> Iterator[tuple[Gang[GangRun], Gang[GangRun] | None]]:
    """Yield the gangs, each with the foremost gang that it waits for on its hosts, or None.

    Unlike for `foremost_gangs`, a gang that calls Python counts only for the gangs that wait while its Python runs.
    `shapes` are those of the cluster's islands.
    """
    first: dict[int, Gang[GangRun]] = {}  # by host, the gang that all others on it wait for
    first_of_several: dict[int, Gang[GangRun]] = {}  # the same for gangs on several devices of the host
    for gang in in_flight:
        of_several = [host for host in gang.run.hosts_left if len(gang.run.spec.devices.get(host, ())) > 1]
        found = [first[host] for host in sorted(gang.run.hosts_left) if host in first]
        found += [first_of_several[host] for host in sorted(of_several) if host in first_of_several]
        ahead = found[0] if found else None
        yield gang, ahead
        if not _runs_beside_others(gang, shapes):
            for host in gang.run.hosts_left:
                first.setdefault(host, ahead or gang)
        elif gang.run.spec.host_call is HostCallKind.CLIENT:
            for host in of_several:
                first_of_several.setdefault(host, ahead or gang)


def _runs_beside_others(gang: Gang[GangRun], shapes: Sequence[IslandShape]) -> bool:
    """Return whether gangs on one device run while this gang waits for Python: see docs/design/callbacks.md."""
    call = gang.run.spec.host_call
    if call is HostCallKind.CLIENT:  # on accelerators, it occupies its devices meanwhile
        return all(shapes[island].platform == "cpu" for island in gang.run.islands_left)
    return call is not None
