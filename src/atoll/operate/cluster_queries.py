"""Find a running cluster, and send it the requests of commands and displays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from atoll.cluster.cluster_runs import ClusterRun, RunRecord, names_of_runs, runs_of
from atoll.cluster.environment_variables import ADDRESS, JOIN
from atoll.cluster.processes.process_table import ancestors
from atoll.cluster.usage.usage_records import By
from atoll.controller_process.standby_status import StandbyStatus, standby_status
from atoll.decodable import decodable
from atoll.errors import ClusterError, UnreachableError
from atoll.journal.successor import NAME as SUCCESSOR
from atoll.journal.successor import Successor, decode_successor
from atoll.missing import read_if_exists
from atoll.operate.cluster_registry import DEFAULT_NAME, ClusterRecord, ClusterRegistry, embedded_clusters
from atoll.operate.joining import is_at, reach, reach_of
from atoll.operate.log_tail import LogTail
from atoll.operate.operator_requests import (
    OPERATION_SECONDS,
    OperatorConnection,
    ask_serving,
    request_check,
    request_dump,
    request_operation,
    request_recording,
    request_report,
    request_trace,
    request_usage,
)
from atoll.operate.traces import chrome_trace
from atoll.protocol import messages as m
from atoll.protocol.spans import Span, TraceRecord
from atoll.security.join_token import JoinToken
from atoll.telemetry.log_rows import LogRow
from atoll.wire.address import Address, parse_address

_START_HINT = (
    "start one with `atoll up --islands 1x1x8`, or set ATOLL_ADDRESS to the address of one; for one on another "
    "machine, set ATOLL_JOIN to a copy of the file from `atoll up --join-file FILE`"
)
_NO_LOG = (
    "this command does not find the log of this cluster: `atoll web` shows the log of a cluster that the same user has "
    "started on the same machine, without --foreground"
)
_ADD_GRACE_SECONDS = 30.0  # for the controller to fail a new island itself, with the reason
_FETCH_SECONDS = 30.0  # for fetching a recording after its end
_RECHECKS = 2
_RECHECK_SECONDS = 0.5
_decode_trace = msgspec.msgpack.Decoder(decodable(TraceRecord)).decode


@dataclass(frozen=True)
class Target:
    """The cluster that a command addresses, with its record if it is this user's cluster on this machine.

    `join` is set if the cluster uses TLS.
    """

    address: Address
    record: ClusterRecord | None = None
    join: JoinToken | None = None

    @property
    def reached_at(self) -> str:
        """The address to show to users, at which they reach the cluster."""
        is_own = self.record is not None and str(self.address) == self.record.address
        return self.record.reached_at if self.record is not None and is_own else str(self.address)

    @property
    def standby(self) -> StandbyStatus | None:
        """The state of the standby, if it is one and on this machine, and has not taken over."""
        return standby_status(self.record.directory) if self.record is not None else None


def find(address: str = "", name: str = "", join: str = "", *, embedded: bool = True, standby: bool = False) -> Target:
    """Return the cluster that a command addresses, by the first of these rules that applies:

    1. the cluster at `address` or of the join token `join`
    2. the cluster with this `name`
    3. the cluster of ATOLL_ADDRESS or ATOLL_JOIN
    4. the embedded cluster of the script that runs this process
    5. the standing cluster named "default"
    6. the only standing cluster
    7. the only embedded cluster

    If `embedded` is False, an embedded cluster is found only by its name or address. If `standby` is False, a standby
    on this machine is an error, because it answers no requests. If its address is one of several, the result is the
    cluster, which answers at another one.

    Raises AddressError, AccessError or ClusterError. The error names the address that was tried and what to start.
    """
    target = _find(address, name, join, embedded)
    found = None if standby else target.standby
    if found is not None and target.record is not None:
        raise ClusterError(
            f"{target.record.name} is a standby, which has only `atoll status`, `atoll logs` and `atoll down`: for its "
            f"controller, {_how_to_reach(found.controller)}"
        )
    return target


def _find(address: str, name: str, join: str, embedded: bool) -> Target:
    registry = ClusterRegistry()
    standing, embedded_ones = registry.all(), embedded_clusters()
    if not (address or join or name):
        address, join = ADDRESS.text(), JOIN.text()
    if address or join:
        known = [*standing, *embedded_ones]
        reached = reach(address, join, known)
        same = [each for each in known if is_at(each, reached.address)]
        if reached.address.others:  # of a controller and its standby, only the controller answers
            same = [each for each in same if standby_status(each.directory) is None]
        return Target(reached.address, same[0] if same else None, reached.join)
    if name:
        found = [each for each in (*standing, *embedded_ones) if each.name == name]
    else:
        found = _without_a_name(standing, embedded_ones if embedded else [])
    if not found:
        tried = registry.address(name or DEFAULT_NAME)
        ended = _last_end(name)
        others = ", ".join(each.name for each in (*standing, *embedded_ones))
        facts = [f"tried {tried}", *([ended] if ended else []), *([f"up: {others}"] if others else [])]
        text = f"no cluster{' ' + name if name else ''} is up ({'; '.join(facts)})"
        raise ClusterError(f"{text}: {_START_HINT}")
    if len(found) > 1:
        names = ", ".join(each.title for each in found)
        raise ClusterError(f"several clusters are up: choose one with --name ({names})")
    reached = reach_of(found[0])
    return Target(reached.address, found[0], reached.join)


def _last_end(name: str) -> str:
    """Describe the last end of the cluster with this name, by default that of the cluster that ended last.

    Return "" if it is unknown.
    """
    try:
        ends = [(run.record, run) for each in ([name] if name else names_of_runs()) for run in runs_of(each)[:1]]
    except ClusterError:
        return ""
    known = [(record, run) for record, run in ends if record is not None and record.ended]
    if not known:
        return ""
    record, run = max(known, key=lambda each: each[0].ended)
    return run.end_text() + _later_controller(record)


def _later_controller(record: RunRecord) -> str:
    """Return which controller may continue the cluster of a run that has ended, and how to reach it. "" for none."""
    content = None
    if record.journal:
        with contextlib.suppress(OSError):
            content = read_if_exists(Path(record.journal) / SUCCESSOR)
    later = decode_successor(content) if content else Successor()
    return f"; {later} may have taken over: {_how_to_reach(later.address)}" if later.address else ""


def _how_to_reach(address: str) -> str:
    """Return the option with which a command addresses the controller at an address."""
    if parse_address(address).tls:
        return f"give `--join FILE` with a join token that contains its address, {address}"
    return f"give `--address {address}`"


def _without_a_name(standing: list[ClusterRecord], embedded_ones: list[ClusterRecord]) -> list[ClusterRecord]:
    """Return the candidates. If there are several, the user has to choose."""
    owners = {each.owner: each for each in embedded_ones}
    for pid in ancestors(os.getpid()):
        if pid in owners:
            return [owners[pid]]
    default = [each for each in standing if each.name == DEFAULT_NAME]
    return default or standing or embedded_ones


def other_clusters(target: Target) -> list[ClusterRecord]:
    """Return this user's other clusters on this machine."""
    every = (*ClusterRegistry().all(), *embedded_clusters())
    return [each for each in every if not is_at(each, target.address)]


def report_of(target: Target, token: str) -> dict[str, Any]:
    """Return the state of the cluster; see `atoll.telemetry.report`. Raises ConnectError or a subclass."""
    with explained(target):
        report: dict[str, Any] = msgspec.json.decode(request_report(target.address, token, target.join))
        return report


def dump_of(target: Target, token: str) -> bytes:
    """Return the controller's event log; see `atoll.journal.event_log`. Raises ConnectError or a subclass."""
    with explained(target):
        return request_dump(target.address, token, target.join)


def check(target: Target, token: str) -> m.CheckReply:
    """Check the controller's state against itself and its hosts. Raises ConnectError or a subclass.

    Messages in transit cause differences that change from check to check, so only lasting differences are returned.
    """
    with explained(target):
        reply = request_check(target.address, token, target.join)
        for _ in range(_RECHECKS if reply.differences else 0):
            time.sleep(_RECHECK_SECONDS)
            later = request_check(target.address, token, target.join)
            still = tuple(each for each in later.differences if each in reply.differences)
            reply = msgspec.structs.replace(later, differences=still)
        return reply


def operate(target: Target, token: str, operation: m.Operation) -> str:
    """Perform an operation, and return a description of the result. Raises StatusError, ConnectError or a subclass.

    A request for an island takes as long as the cluster waits for the island.
    """
    seconds = OPERATION_SECONDS
    if isinstance(operation, m.AddIslandRequest):
        seconds = (operation.wait_seconds or float(report_of(target, token)["wait_seconds"])) + _ADD_GRACE_SECONDS
    with explained(target):
        return request_operation(target.address, token, operation, target.join, seconds)


def trace_of(target: Target, token: str, seconds: float = 0.0) -> bytes:
    """Return a trace as Chrome trace events: recent work, or that of the next `seconds`.

    Raises ConnectError or a subclass.
    """
    with explained(target):
        recording = None
        if seconds > 0:
            recording = request_recording(target.address, token, seconds + _FETCH_SECONDS, target.join)
            time.sleep(seconds)
        return chrome_trace(request_trace(target.address, token, join=target.join, recording=recording))


def usage_of(target: Target, token: str, by: By, seconds: float) -> dict[str, Any]:
    """Return the usage of the last `seconds`, or of all time if 0. Raises ConnectError or a subclass."""
    with explained(target):
        usage: dict[str, Any] = msgspec.json.decode(request_usage(target.address, token, by, seconds, target.join))
        return usage


@contextlib.contextmanager
def explained(target: Target) -> Iterator[None]:
    """Add a hint to the error that no controller listens at the target's address."""
    try:
        yield
    except UnreachableError as error:
        raise UnreachableError(f"{error}; {_hint_for(target.record)}") from None


def _hint_for(record: ClusterRecord | None) -> str:
    """Return what to do if no controller listens at the address of a cluster. Its engine runs if there is a record."""
    if record is None:
        return _START_HINT
    if record.continues_at:
        return (
            f"a standby took over, and cluster {record.name} continues at {record.continues_at}: use "
            f"`--address {record.continues_at}`"
        )
    if record.ray:
        return (
            f"the controller of cluster {record.name} on Ray is starting or restarting, or the cluster has ended: try "
            f"again, or remove what is left of it with `atoll down --name {record.name}`"
        )
    return (
        f"the engine of cluster {record.name} runs, so its controller is starting or restarting: try again, and see "
        f"`atoll logs --name {record.name}` if this persists"
    )


class ClusterSource:
    """A `telemetry.watch.Source` that polls one cluster over one connection, with one identity.

    It opens the connection on the first request, and again after the connection was lost.
    """

    def __init__(self, target: Target, token: str) -> None:
        self._target = target
        self._token = token
        self._connection: OperatorConnection | None = None
        self._opening = asyncio.Lock()
        self._log: LogTail | None = None

    @property
    def name(self) -> str:
        return self._target.record.title if self._target.record else str(self._target.address)

    async def report(self) -> bytes:
        reply = await self._ask(m.StatusRequest())
        if isinstance(reply, m.OperationReply):
            reply.status.raise_if_error()
        assert isinstance(reply, m.StatusReply)
        return reply.content

    async def spans(self, position: int, limit: int) -> tuple[list[Span], int]:
        reply = await self._ask(m.TraceRequest(after=position, limit=limit))
        assert isinstance(reply, m.TraceReply)
        return _decode_trace(reply.content).spans, reply.position

    async def usage(self, by: By, seconds: float) -> dict[str, Any]:
        # On a separate connection, since the cluster reads it from a disk, and replies of a connection are in order.
        return await asyncio.to_thread(usage_of, self._target, self._token, by, seconds)

    async def trace(self) -> bytes:
        return await asyncio.to_thread(trace_of, self._target, self._token)

    async def log(self) -> list[LogRow]:
        if self._log is None:
            if self._target.record is None or not self._target.record.run:
                raise ClusterError(_NO_LOG)
            self._log = LogTail(ClusterRun(Path(self._target.record.run)).log)
        return await asyncio.to_thread(self._log.rows)

    async def _ask(self, request: m.Message) -> Any:
        async with self._opening:
            connection = self._connection
            if connection is None or connection.is_lost:
                self.close()
                with explained(self._target):
                    self._connection, reply = await ask_serving(
                        self._target.address, self._token, self._target.join, request
                    )
                return reply
        return await connection.ask(request)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def operate(self, operation: m.Operation) -> str:
        # On a separate connection, because it may take minutes.
        return await asyncio.to_thread(operate, self._target, self._token, operation)
