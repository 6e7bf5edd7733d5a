"""Queries to all hosts of a session about their profiles."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from atoll.errors import Code, Status, StatusError
from atoll.protocol import messages as m
from atoll.protocol import profiles as p
from atoll.session.cluster_session import ClusterSession

_CONCURRENT_COLLECTS = 8  # hosts that send their profiles concurrently, each one part at a time
# Errors of hosts that have been lost. They do not prevent a profile of the other hosts.
_GONE = (Code.DATA_LOSS, Code.UNAVAILABLE, Code.NOT_FOUND)


def hosts_of(cluster: ClusterSession) -> dict[int, int]:
    """Return a device of each of the session's hosts, by host."""
    return {
        device.host: device.id for device in sorted(cluster.welcome.devices, key=lambda each: (each.host, -each.id))
    }


async def ask_hosts(cluster: ClusterSession, hosts: Mapping[int, int], request: p.Request) -> dict[int, Status]:
    """Send `request` to all of these hosts. Return the hosts that are lost or have no profile, each with the reason.

    Raise StatusError if another host refuses, or if all hosts fail.
    """
    places = asyncio.Semaphore(_CONCURRENT_COLLECTS if isinstance(request, p.Collect) else len(hosts))
    payload = p.encode(request)

    async def ask(device: int) -> Status | None:
        async with places:
            try:
                await cluster.inquire(m.QueryKind.PROFILE, device, payload=payload)
            except StatusError as error:
                return error.status
        return None

    outcomes = await asyncio.gather(*(ask(device) for device in hosts.values()))
    failed = {host: status for host, status in zip(hosts, outcomes, strict=True) if status is not None}
    refused = [status for status in failed.values() if status.code not in _GONE]
    if refused or len(failed) == len(hosts):
        if isinstance(request, p.Start):
            started = {host: device for host, device in hosts.items() if host not in failed}
            if started:
                await ask_hosts(cluster, started, p.Collect())
        (refused or list(failed.values()))[0].raise_if_error()
    return failed
