"""Messages between the controller and operators' commands."""

from __future__ import annotations

import msgspec

from atoll.cluster.topology import IslandShape
from atoll.cluster.usage.usage_records import By
from atoll.errors import Status
from atoll.protocol.messages.opening_messages import Message, Refused


class StatusRequest(Message, frozen=True, tag=80):
    pass


class StopRequest(Message, frozen=True, tag=81):
    """End the cluster. With `all_sessions`, also end the sessions on disk that the next cluster could resume."""

    all_sessions: bool = False


class StatusReply(Message, frozen=True, tag=82):
    """Answer StatusRequest with JSON."""

    content: bytes


class DumpRequest(Message, frozen=True, tag=84):
    pass


class DumpReply(Message, frozen=True, tag=85):
    """Answer DumpRequest with the controller's event log, as one JSON object per line."""

    content: bytes


class RecordRequest(Message, frozen=True, tag=145):
    """Let proxies record their clients' calls for `seconds`, or until a TraceRequest fetches them.

    0 stands for the longest possible recording.
    """

    seconds: float = 0.0


class RecordReply(Message, frozen=True, tag=146):
    """Answer RecordRequest with the number of the recording and the position in the trace at which it began."""

    recording: int
    position: int


class TraceRequest(Message, frozen=True, tag=86):
    """Request spans: all that are stored, or with `after`, those recorded since a reply with that `position`.

    A reply has at most some hundred spans, the oldest ones; use its `position` as `after` of the next request. With
    `limit`, the reply has only the newest spans, at most that number, as reported, from dispatch to end and without
    waits. With `recording`, it also has the calls that proxies recorded, and the recording ends.
    """

    since: int = 0  # excludes spans that ended earlier, in nanoseconds of the controller's clock
    after: int = -1
    limit: int = 0
    recording: int = 0


class TraceReply(Message, frozen=True, tag=87):
    """Answer TraceRequest with msgpack of a `protocol.spans.TraceRecord`.

    `position` is after the last span of the reply, and `end` is after the last recorded span.
    """

    content: bytes
    position: int = 0
    end: int = 0


class UsageRequest(Message, frozen=True, tag=143):
    """Request the usage of the last `seconds`, or of all time if 0, aggregated by `by`."""

    by: By = By.TENANT
    seconds: float = 0.0


class UsageReply(Message, frozen=True, tag=144):
    """Answer UsageRequest with JSON (see `cluster.usage.usage_store`), or "" if the cluster does not store usage."""

    content: bytes


class RemapRequest(Message, frozen=True, tag=97):
    """Migrate a slice to an island, to `devices` with these numbers in the report, or to any devices."""

    session: int
    slice: int
    island: int
    devices: tuple[int, ...] = ()


class SuspendRequest(Message, frozen=True, tag=165):
    """Suspend a session until it is resumed: store its arrays in host memory or on disk, and free its devices."""

    session: int
    to_disk: bool = False


class ResumeRequest(Message, frozen=True, tag=166):
    """Resume a suspended session on its original islands, or on `islands`, one per original island.

    Wait at most `wait_seconds` for free devices and memory there.
    """

    session: int
    islands: tuple[int, ...] = ()
    wait_seconds: float = 0.0


class AddIslandRequest(Message, frozen=True, tag=99):
    """Add an island of shape `shape`, or like island `like`, or if neither is given, like the others.

    Give up if it does not start within `wait_seconds`, or the time in the cluster's settings if 0.
    """

    shape: IslandShape | None = None
    like: int = -1
    wait_seconds: float = 0.0


class DrainRequest(Message, frozen=True, tag=100):
    """Migrate all slices on the island to others, and end its workers.

    The engine sets `returns` if a machine leaves: the island then starts again once machines are available for it. With
    `has_spares`, they are available now.
    """

    island: int
    returns: bool = False
    has_spares: bool = False


class UndrainRequest(Message, frozen=True, tag=192):
    """Start the workers of a drained island again, once machines are available for it."""

    island: int


class SetTenant(Message, frozen=True, tag=140):
    """Change a tenant, or add it if `is_new`. Fields that are None or "" do not change.

    `limits` are quotas by their names in `cluster.tenant_settings.TenantSettings`. The token itself is never sent. A
    new token replaces the former one for new connections; open connections continue.
    """

    name: str
    is_new: bool = False
    token_hash: str = ""
    share: float | None = None
    priority: int | None = None
    role: str | None = None
    limits: dict[str, int] = msgspec.field(default_factory=dict)
    native_code: bool | None = None
    publish: tuple[str, ...] | None = None
    subscribe: tuple[str, ...] | None = None


class RemoveTenant(Message, frozen=True, tag=141):
    """Remove a tenant and end its sessions."""

    name: str


class EndSessionRequest(Message, frozen=True, tag=142):
    """End a session with an error for its client."""

    session: int


class RemoveArraysRequest(Message, frozen=True, tag=190):
    """Remove a version of published arrays, or if `version` is -1, all versions of the name.

    The name may begin with the name of a tenant and a slash. Scripts that have opened a version keep it.
    """

    name: str
    version: int = -1


class CheckRequest(Message, frozen=True, tag=149):
    """Check whether the controller's state is consistent, and whether it agrees with the hosts."""


class CheckReply(Message, frozen=True, tag=150):
    """Answer CheckRequest, with one sentence per inconsistency."""

    contradictions: tuple[str, ...]  # sentences about contradictions within the controller's state
    differences: tuple[str, ...]  # sentences about differences between the controller, hosts and proxies
    arrays: int  # number of checked arrays
    hosts: int  # number of checked hosts


class OperationReply(Message, frozen=True, tag=98):
    """Answer a request of an operator, after it is completed or refused, with a sentence."""

    status: Status
    text: str


class StopReply(Message, frozen=True, tag=83):
    """Answer StopRequest when the cluster ends."""

    persisted: tuple[tuple[int, str], ...] = ()  # (number, name) of sessions that stay suspended on disk
    seconds: float = 0.0  # time for which the sessions' scripts wait for the next cluster


# Requests that change the cluster, and are answered with an OperationReply.
Operation = (
    RemapRequest
    | SuspendRequest
    | ResumeRequest
    | AddIslandRequest
    | DrainRequest
    | UndrainRequest
    | SetTenant
    | RemoveTenant
    | EndSessionRequest
    | RemoveArraysRequest
)
FromOperator = (
    Operation | StatusRequest | DumpRequest | TraceRequest | RecordRequest | UsageRequest | StopRequest | CheckRequest
)
ToOperator = (
    Refused | StatusReply | DumpReply | TraceReply | RecordReply | UsageReply | OperationReply | CheckReply | StopReply
)
