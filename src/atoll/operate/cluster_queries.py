"""Finds a cluster that is up, and asks it for what a command shows or does."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from atoll.cluster.processes.process_table import ancestors
from atoll.cluster.usage.usage_records import By
from atoll.errors import ClusterError, ConnectError
from atoll.operate.cluster_registry import DEFAULT_NAME, ClusterRecord, ClusterRegistry, embedded_clusters
from atoll.operate.joining import is_at, reach, reach_of
from atoll.operate.operator_requests import (
    Operation,
    request_check,
    request_dump,
    request_operation,
    request_recording,
    request_report,
    request_trace,
    request_usage,
)
from atoll.operate.traces import chrome_trace
from atoll.protocol.messages import AddIslandRequest, CheckReply
from atoll.security.join_token import JOIN_VARIABLE, JoinToken
from atoll.wire.address import Address

_WHAT_TO_START = "start one with `atoll up --islands 1x1x8`, or set ATOLL_ADDRESS to where one listens"


# For the controller to give a new island up by itself, and say why.
_ADD_GRACE_SECONDS = 30.0
# For a recording to be fetched when its time is over.
_FETCH_SECONDS = 30.0
_MORE_LOOKS = 2
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Target:
    """A cluster that a command is about; with its record where it is this user's, on this machine.

    Use a join token if the cluster uses TLS.
    """

    address: Address
    record: ClusterRecord | None = None
    join: JoinToken | None = None


def find(address: str = "", name: str = "", join: str = "", *, embedded: bool = True) -> Target:
    """The cluster that a command is about; the first of these that applies:

    the one at `address` or of the string `join`, of that `name`, of ATOLL_ADDRESS or ATOLL_JOIN, the embedded one of
    the script that runs this process, the one named "default", the only one that stays, the only embedded one. With
    `embedded` False, an embedded cluster is found by name or address alone.

    Raises AddressError, AccessError or ClusterError, which names the address that was tried and what to start.
    """
    registry = ClusterRegistry()
    standing, embedded_ones = registry.all(), embedded_clusters()
    if not (address or join or name):
        address, join = os.environ.get("ATOLL_ADDRESS", ""), os.environ.get(JOIN_VARIABLE, "")
    if address or join:
        known = [*standing, *embedded_ones]
        reached = reach(address, join, known)
        same = [each for each in known if is_at(each, reached.address)]
        return Target(reached.address, same[0] if same else None, reached.join)
    if name:
        found = [each for each in (*standing, *embedded_ones) if each.name == name]
    else:
        found = _without_a_name(standing, embedded_ones if embedded else [])
    if not found:
        tried = registry.address(name or DEFAULT_NAME)
        raise ClusterError(f"no cluster{' ' + name if name else ''} is up (tried {tried}): {_WHAT_TO_START}")
    if len(found) > 1:
        names = ", ".join(each.title for each in found)
        raise ClusterError(f"several clusters are up: choose one with --name ({names})")
    reached = reach_of(found[0])
    return Target(reached.address, found[0], reached.join)


def _without_a_name(standing: list[ClusterRecord], embedded_ones: list[ClusterRecord]) -> list[ClusterRecord]:
    """The candidates; more than one where the user has to choose."""
    owners = {each.owner: each for each in embedded_ones}
    for pid in ancestors(os.getpid()):
        if pid in owners:
            return [owners[pid]]
    default = [each for each in standing if each.name == DEFAULT_NAME]
    return default or standing or embedded_ones


def other_clusters(target: Target) -> list[ClusterRecord]:
    """This user's clusters on this machine but for the target."""
    every = (*ClusterRegistry().all(), *embedded_clusters())
    return [each for each in every if not is_at(each, target.address)]


def report_of(target: Target, token: str) -> dict[str, Any]:
    """What the cluster has and does; see `atoll.telemetry.report`. Raises ConnectError and its kin."""
    with explained():
        report: dict[str, Any] = msgspec.json.decode(request_report(target.address, token, target.join))
        return report


def dump_of(target: Target, token: str) -> bytes:
    """The controller's event log; see `atoll.journal.event_log`. Raises ConnectError and its kin."""
    with explained():
        return request_dump(target.address, token, target.join)


def check(target: Target, token: str) -> CheckReply:
    """Whether the controller agrees with itself and with its hosts. What is only on its way does not differ each time,
    so only what does is named. Raises ConnectError and its kin.
    """
    with explained():
        reply = request_check(target.address, token, target.join)
        for _ in range(_MORE_LOOKS if reply.differences else 0):
            time.sleep(_LOOK_SECONDS)
            later = request_check(target.address, token, target.join)
            still = tuple(each for each in later.differences if each in reply.differences)
            reply = msgspec.structs.replace(later, differences=still)
        return reply


def operate(target: Target, token: str, operation: Operation) -> str:
    """Has the cluster do something; returns what it has done. Raises StatusError, ConnectError and its kin."""
    with explained():
        return request_operation(target.address, token, operation, target.join)


def add_island(target: Target, token: str, request: AddIslandRequest) -> str:
    """Has the cluster start one more island; as `operate`, for as long as the cluster waits for it."""
    seconds = request.wait_seconds or float(report_of(target, token)["wait_seconds"])
    with explained():
        return request_operation(target.address, token, request, target.join, seconds + _ADD_GRACE_SECONDS)


def trace_of(target: Target, token: str, seconds: float = 0.0) -> bytes:
    """What ran on the cluster lately, or what it does for so many seconds from now, as Chrome's trace events.

    Raises ConnectError and its kin.
    """
    with explained():
        recording = None
        if seconds > 0:
            recording = request_recording(target.address, token, seconds + _FETCH_SECONDS, target.join)
            time.sleep(seconds)
        return chrome_trace(request_trace(target.address, token, join=target.join, recording=recording))


def usage_of(target: Target, token: str, by: By, seconds: float) -> dict[str, Any]:
    """Return the usage of the last `seconds` (0: of all time). Raise ConnectError, or another error of Atoll."""
    with explained():
        usage: dict[str, Any] = msgspec.json.decode(request_usage(target.address, token, by, seconds, target.join))
        return usage


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Adds what to do to the error that no controller listens."""
    try:
        yield
    except ConnectError as error:
        if not str(error).startswith("cannot reach"):
            raise
        raise ConnectError(f"{error}; {_WHAT_TO_START}") from None
