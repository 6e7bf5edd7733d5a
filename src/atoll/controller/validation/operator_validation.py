"""The checks of messages that commands send. A violation is the answer to the command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atoll.cluster.topology import MOST, Topology
from atoll.controller.validation.fields import check_number, check_numbers, check_seconds, check_text, violation
from atoll.protocol import messages as m

_MAX_NAME = 1024
_MAX_HASH = 128
_MAX_LIMITS = 64
_MAX_SHARE = 1e9
_MAX_PRIORITY = 1 << 31

_Validator = Callable[[Any, Topology], None]


def usage_request(message: m.UsageRequest, topology: Topology) -> None:
    check_seconds(message, "seconds")


def remap_request(message: m.RemapRequest, topology: Topology) -> None:
    for field in ("session", "slice", "island"):
        check_number(message, field)
    check_numbers(message, "devices", most=MOST)


def resume_request(message: m.ResumeRequest, topology: Topology) -> None:
    check_number(message, "session")
    check_numbers(message, "islands", most=MOST)
    check_seconds(message, "wait_seconds")


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
        # The service refuses shares that no tenant can have, in the words of the command.
        raise violation(message, "share", message.share, f"a number up to {_MAX_SHARE:g}")
    if message.priority is not None and abs(message.priority) > _MAX_PRIORITY:
        raise violation(message, "priority", message.priority, f"at most {_MAX_PRIORITY}")
    if len(message.limits) > _MAX_LIMITS:
        raise violation(message, "limits", f"{len(message.limits)} entries", f"at most {_MAX_LIMITS}")


def remove_tenant(message: m.RemoveTenant, topology: Topology) -> None:
    check_text(message, "name", _MAX_NAME)


def _number(field: str) -> _Validator:
    def check(message: Any, topology: Topology) -> None:
        check_number(message, field)

    return check


OPERATORS: Mapping[type[Any], _Validator] = {
    m.UsageRequest: usage_request,
    m.RemapRequest: remap_request,
    m.SuspendRequest: _number("session"),
    m.ResumeRequest: resume_request,
    m.AddIslandRequest: add_island_request,
    m.DrainRequest: _number("island"),
    m.SetTenant: set_tenant,
    m.RemoveTenant: remove_tenant,
    m.EndSessionRequest: _number("session"),
}
NOTHING_FROM_OPERATORS = frozenset(
    {m.StatusRequest, m.DumpRequest, m.StopRequest, m.CheckRequest, m.TraceRequest, m.RecordRequest}
)
