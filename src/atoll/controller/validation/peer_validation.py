"""Validation of messages from the cluster's own processes and from operators' commands.

Workers, relays, host agents and the engine are trusted: an invalid message from them comes from another version of
Atoll or from a bug. A command receives the violation as its reply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from atoll.cluster.topology import MAX_PER_LEVEL, Topology
from atoll.controller.validation.fields import (
    MAX_NUMBER,
    check_clock,
    check_count,
    check_number,
    check_numbers,
    check_seconds,
    check_status,
    check_text,
    violation,
)
from atoll.errors import MAX_TEXT
from atoll.protocol import messages as m
from atoll.state.tallies import BOUNDS

_PAIR_BYTES = 16  # the start and the end of a segment
_MAX_NANOSECONDS = 1 << 63
_MAX_NAME = 1024
_MAX_HASH = 128
_MAX_LIMITS = 64
_MAX_SHARE = 1e9
_MAX_PRIORITY = 1 << 31

_Validator = Callable[[Any, Topology], None]


def _field(check: Callable[..., None], field: str, **bounds: Any) -> _Validator:
    """Return a validator that checks only one field."""
    return lambda message, topology: check(message, field, **bounds)


def _all(*validators: _Validator) -> _Validator:
    """Return a validator that applies others in this order."""

    def check(message: Any, topology: Topology) -> None:
        for validator in validators:
            validator(message, topology)

    return check


_STATUS = _field(check_status, "status")
_ERROR = _field(check_status, "status", is_error=True)
_SECONDS = _field(check_seconds, "seconds")
_SESSION = _field(check_number, "session")


def _host(message: Any, topology: Topology) -> None:
    if not 0 <= message.host < topology.host_count:
        raise violation(message, "host", message.host, f"a host of {topology}")


def _island(message: Any, topology: Topology) -> None:
    if not 0 <= message.island < topology.islands:
        raise violation(message, "island", message.island, f"an island of {topology}")


def worker_ready(message: m.WorkerReady, topology: Topology) -> None:
    if not 0 <= message.island < topology.islands:
        return  # `Admission` refuses such a worker
    expected = topology.shapes[message.island].devices
    if len(message.devices) != expected:
        raise violation(message, "devices", f"{len(message.devices)} devices", f"{expected}")
    ordinals = sorted(device.ordinal for device in message.devices)
    if ordinals != list(range(expected)):
        raise violation(message, "devices", ordinals, f"the ordinals 0 to {expected - 1}")
    if not 1 <= message.max_in_flight <= MAX_PER_LEVEL:
        raise violation(message, "max_in_flight", message.max_in_flight, f"1 to {MAX_PER_LEVEL}")


def done(message: m.Done, topology: Topology) -> None:
    for sequence, started, ended in message.runs:
        if not (0 <= started <= ended < _MAX_NANOSECONDS):
            raise violation(message, "runs", (sequence, started, ended), "an end after the start")


def pong(message: m.Pong, topology: Topology) -> None:
    check_seconds(message, "seconds")
    check_clock(message)
    check_numbers(message, "running", max_length=MAX_PER_LEVEL)
    for each in message.compiles:
        if each.progress < -1:
            raise violation(message, "compiles.progress", each.progress, "-1 or more")


def _relayed_pongs(message: m.Gathered | m.MembersDone, topology: Topology) -> None:
    count = topology.host_count
    for each in message.pongs:
        if not 0 <= each.host < count:
            raise violation(message, "pongs.host", each.host, f"hosts of {topology}")
        if not 0 <= each.seconds < math.inf:
            raise violation(message, "pongs.seconds", each.seconds, "a finite number, 0 or more")
        if not (-1 <= each.clock < MAX_NUMBER and 0 <= each.held < MAX_NUMBER):
            raise violation(message, "pongs.clock", (each.clock, each.held), "nanoseconds")
        if each.running and not (
            len(each.running) <= MAX_PER_LEVEL and 0 <= min(each.running) <= max(each.running) < MAX_NUMBER
        ):
            raise violation(message, "pongs.running", len(each.running), f"at most {MAX_PER_LEVEL} numbers from 0 on")


def rows_moved(message: m.RowsMoved, topology: Topology) -> None:
    check_number(message, "sent")
    check_number(message, "received")


def run_progress(message: m.RunProgress, topology: Topology) -> None:
    check_number(message, "first")
    if len(message.times) % _PAIR_BYTES:
        raise violation(message, "times", f"{len(message.times)} bytes", f"a multiple of {_PAIR_BYTES} bytes")
    ended = message.ended
    if ended is not None and len(ended.counts) != len(BOUNDS) + 1:
        raise violation(message, "ended.counts", f"{len(ended.counts)} counts", f"{len(BOUNDS) + 1}")


def gathered(message: m.Gathered, topology: Topology) -> None:
    if message.pongs:
        _relayed_pongs(message, topology)
    count = topology.host_count
    for unit in message.units:
        if len(unit.times) != 2 * len(unit.hosts):
            raise violation(message, "units.times", f"{len(unit.times)} times", f"{2 * len(unit.hosts)}")
        if unit.hosts and not (min(unit.hosts) >= 0 and max(unit.hosts) < count):
            wrong = next(host for host in unit.hosts if not 0 <= host < count)
            raise violation(message, "units.hosts", wrong, f"hosts of {topology}")


def members_done(message: m.MembersDone, topology: Topology) -> None:
    if message.pongs:
        _relayed_pongs(message, topology)
    if len(message.sequences) != len(message.hosts):
        raise violation(message, "sequences", f"{len(message.sequences)} numbers", f"{len(message.hosts)}")
    if len(message.times) != 2 * len(message.hosts):
        raise violation(message, "times", f"{len(message.times)} times", f"{2 * len(message.hosts)}")


HOSTS: Mapping[type[Any], _Validator] = {
    m.WorkerReady: worker_ready,
    m.Compiled: _all(_STATUS, _SECONDS, _field(check_number, "scratch_bytes")),
    m.Done: done,
    m.Failed: _ERROR,
    m.DeviceFailed: _ERROR,
    m.WorkerAnswer: _STATUS,
    m.WorldServed: _all(_field(check_number, "world"), _field(check_text, "address", max_length=_MAX_NAME)),
    m.WorldFailed: _all(_field(check_number, "world"), _ERROR),
    m.NeedsWorld: _field(check_text, "function", max_length=_MAX_NAME),
    m.WorkerFails: _field(check_text, "text", max_length=MAX_TEXT),
    m.Pong: pong,
    m.FeedsLost: _all(_host, _ERROR),
    m.PeerSilent: _all(_host, _SECONDS),
    m.RowsMoved: rows_moved,
    m.SpillReply: _all(_STATUS, _SECONDS),
    m.SendSpilledFailed: _ERROR,
    m.RunProgress: run_progress,
    m.Gathered: gathered,
    m.MembersDone: members_done,
    m.MemberFailed: _all(_host, _ERROR),
    m.StoresReported: _field(check_number, "check"),
    m.WorkerEnded: _host,
    m.IslandNotRestarted: _island,
    m.IslandEnded: _island,
    m.IslandStarts: _island,
    m.EngineReport: _all(*(_field(check_count, field, max_length=MAX_PER_LEVEL) for field in ("waits", "machines"))),
    m.LinkLost: _host,
}
# Unknown numbers in these messages are ignored. The controller forwards the messages of the engine and agents unread.
NOTHING_FROM_HOSTS = frozenset(
    {m.FeedsArrived, m.Enqueued, m.PlanRegistered, m.ValueReported, m.RunsRevoked, m.AgentSays, m.TellAgent}
)


def add_island_request(message: m.AddIslandRequest, topology: Topology) -> None:
    check_seconds(message, "wait_seconds")
    if message.like < -1:
        raise violation(message, "like", message.like, "-1 or more")
    shape = message.shape
    if shape is not None and len(shape.mesh) > _MAX_LIMITS:
        raise violation(message, "shape.mesh", f"{len(shape.mesh)} dimensions", f"at most {_MAX_LIMITS}")
    if shape is not None and max(len(shape.platform), len(shape.kind)) > _MAX_NAME:
        raise violation(message, "shape", shape, f"names of at most {_MAX_NAME} characters")


def set_tenant(message: m.SetTenant, topology: Topology) -> None:
    check_text(message, "name", _MAX_NAME)
    check_text(message, "token_hash", _MAX_HASH)
    if message.share is not None and not abs(message.share) <= _MAX_SHARE:
        # The service refuses other shares that are out of range, in the terms of the command.
        raise violation(message, "share", message.share, f"a number up to {_MAX_SHARE:g}")
    if message.priority is not None and abs(message.priority) > _MAX_PRIORITY:
        raise violation(message, "priority", message.priority, f"at most {_MAX_PRIORITY}")
    if len(message.limits) > _MAX_LIMITS:
        raise violation(message, "limits", f"{len(message.limits)} entries", f"at most {_MAX_LIMITS}")


def remove_arrays(message: m.RemoveArraysRequest, topology: Topology) -> None:
    check_text(message, "name", _MAX_NAME)
    if not -1 <= message.version < MAX_NUMBER:
        raise violation(message, "version", message.version, f"-1 to {MAX_NUMBER - 1}")


OPERATORS: Mapping[type[Any], _Validator] = {
    m.UsageRequest: _SECONDS,
    m.RemapRequest: _all(
        _SESSION,
        _field(check_number, "slice"),
        _field(check_number, "island"),
        _field(check_numbers, "devices", max_length=MAX_PER_LEVEL),
    ),
    m.SuspendRequest: _SESSION,
    m.ResumeRequest: _all(
        _SESSION, _field(check_numbers, "islands", max_length=MAX_PER_LEVEL), _field(check_seconds, "wait_seconds")
    ),
    m.AddIslandRequest: add_island_request,
    m.DrainRequest: _field(check_number, "island"),
    m.UndrainRequest: _field(check_number, "island"),
    m.SetTenant: set_tenant,
    m.RemoveTenant: _field(check_text, "name", max_length=_MAX_NAME),
    m.EndSessionRequest: _SESSION,
    m.RemoveArraysRequest: remove_arrays,
}
NOTHING_FROM_OPERATORS = frozenset(
    {m.StatusRequest, m.DumpRequest, m.StopRequest, m.CheckRequest, m.TraceRequest, m.RecordRequest}
)
