"""Profiles of a session's hosts: one query a host, of all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from atoll.errors import Code, Status, StatusError
from atoll.protocol import profiles as p
from atoll.session.cluster_session import ClusterSession

# So many hosts hand over at once: each has one part of its profile on the way.
_HANDING_OVER = 8
# Hosts that are gone for good do not keep the others from being profiled.
_GONE = (Code.DATA_LOSS, Code.UNAVAILABLE, Code.NOT_FOUND)


def hosts_of(cluster: ClusterSession) -> dict[int, int]:
    """A device of each of the session's hosts, by host."""
    return {
        device.host: device.id for device in sorted(cluster.welcome.devices, key=lambda each: (each.host, -each.id))
    }


async def ask_hosts(cluster: ClusterSession, hosts: Mapping[int, int], request: p.Request) -> dict[int, Status]:
    """Has all of these hosts do it. Returns those that are gone, or know of no profile, each with the reason.

    Raises StatusError where another host refuses, or none is left.
    """
    room = asyncio.Semaphore(_HANDING_OVER if isinstance(request, p.Collect) else len(hosts))
    payload = p.encode(request)

    async def ask(device: int) -> Status | None:
        async with room:
            try:
                await cluster.inquire("profile", device, payload=payload)
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
