"""Between controller and the commands of those who run a cluster."""

from __future__ import annotations

import msgspec

from atoll.cluster.topology import IslandShape
from atoll.cluster.usage.usage_records import By
from atoll.errors import Status
from atoll.protocol.messages.opening_messages import Message, Refused


class StatusRequest(Message, frozen=True, tag=80):
    pass


class StopRequest(Message, frozen=True, tag=81):
    """End the cluster; and with `all_sessions`, those, too, which are suspended on disk and would go on in the next."""

    all_sessions: bool = False


class StatusReply(Message, frozen=True, tag=82):
    """The answer to StatusRequest: JSON."""

    content: bytes


class DumpRequest(Message, frozen=True, tag=84):
    pass


class DumpReply(Message, frozen=True, tag=85):
    """The answer to DumpRequest: the controller's event log, a line of JSON each."""

    content: bytes


class RecordRequest(Message, frozen=True, tag=145):
    """Have proxies record what their clients ask, until a TraceRequest fetches it, or for so many seconds.

    With 0 for as long as a recording may take.
    """

    seconds: float = 0.0


class RecordReply(Message, frozen=True, tag=146):
    """The answer to RecordRequest: the number of the recording, and the trace's position when it began."""

    recording: int
    position: int


class TraceRequest(Message, frozen=True, tag=86):
    """For what ran: all that is kept, or with an `after` what was recorded since a reply with that `position`.

    One reply has some hundred spans at most, the oldest; the next request is for those after the reply's `position`.
    With `most`, so many spans at most, the newest, as they were reported, from dispatch to end, without what they
    waited for. With `recording`, also what proxies have recorded, which ends that recording.
    """

    since: int = 0  # spans that ended before, in nanoseconds of the controller's clock, are left out
    after: int = -1
    most: int = 0
    recording: int = 0


class TraceReply(Message, frozen=True, tag=87):
    """The answer to TraceRequest: msgpack of a `protocol.spans.TraceRecord`.

    There is more if `position`, which is after what is in the reply, is less than `end`, which is after all that was
    recorded.
    """

    content: bytes
    position: int = 0
    end: int = 0


class UsageRequest(Message, frozen=True, tag=143):
    """What was used in the last `seconds`, 0 for ever, summed up `by` that."""

    by: By = By.TENANT
    seconds: float = 0.0


class UsageReply(Message, frozen=True, tag=144):
    """The reply to UsageRequest: JSON (see `cluster.usage.usage_store`), or "" if the cluster keeps no usage."""

    content: bytes


class RemapRequest(Message, frozen=True, tag=97):
    """Move a slice to an island; to these devices of it, by their numbers in the report, or to any."""

    session: int
    slice: int
    island: int
    devices: tuple[int, ...] = ()


class SuspendRequest(Message, frozen=True, tag=165):
    """Suspend a session until it is resumed: its arrays in host memory or on disk, its devices for others."""

    session: int
    to_disk: bool = False


class ResumeRequest(Message, frozen=True, tag=166):
    """Have a suspended session go on: where it was, or on these islands, one for each that it was on.

    It waits so many seconds for room there, 0: not at all.
    """

    session: int
    islands: tuple[int, ...] = ()
    wait_seconds: float = 0.0


class AddIslandRequest(Message, frozen=True, tag=99):
    """Start one more island: of that shape, else like the one of that number, else like the others.

    It is given up where it is not up within `wait_seconds`; 0: as the cluster's settings say.
    """

    shape: IslandShape | None = None
    like: int = -1
    wait_seconds: float = 0.0


class DrainRequest(Message, frozen=True, tag=100):
    """Move all that is on the island to others, and end its workers.

    With `returns`, as the engine asks it where a machine leaves, it comes back once there are machines for it again;
    with `has_spares`, these are there now.
    """

    island: int
    returns: bool = False
    has_spares: bool = False


class SetTenant(Message, frozen=True, tag=140):
    """Change a tenant, or add one that `is_new`; None and "" leave as it is what they stand for.

    `limits` are quotas by their names in `cluster.tenant_settings.TenantSettings`. The token itself is never sent.
    """

    name: str
    is_new: bool = False
    token_hash: str = ""
    share: float | None = None
    priority: int | None = None
    role: str | None = None
    limits: dict[str, int] = msgspec.field(default_factory=dict)


class RemoveTenant(Message, frozen=True, tag=141):
    """It is a tenant no more, and its sessions end."""

    name: str


class EndSessionRequest(Message, frozen=True, tag=142):
    """End a session: its client gets an error."""

    session: int


class CheckRequest(Message, frozen=True, tag=149):
    """Compare what the controller keeps with itself, and with what hosts have."""


class CheckReply(Message, frozen=True, tag=150):
    """The answer to CheckRequest, about so many arrays and hosts: a sentence for each disagreement of the controller
    with itself, and with its hosts.
    """

    contradictions: tuple[str, ...]
    differences: tuple[str, ...]
    arrays: int
    hosts: int


class OperationReply(Message, frozen=True, tag=98):
    """The answer to a request of an operator, when it is done or refused: a sentence."""

    status: Status
    text: str


class StopReply(Message, frozen=True, tag=83):
    """The answer to StopRequest, as the cluster ends: the sessions that stay, suspended on disk, by number and name,
    and for how many seconds their scripts wait for the next cluster.
    """

    persisted: tuple[tuple[int, str], ...] = ()
    seconds: float = 0.0


FromOperator = (
    RemapRequest
    | SuspendRequest
    | ResumeRequest
    | AddIslandRequest
    | DrainRequest
    | StatusRequest
    | DumpRequest
    | TraceRequest
    | RecordRequest
    | UsageRequest
    | StopRequest
    | SetTenant
    | RemoveTenant
    | EndSessionRequest
    | CheckRequest
)
ToOperator = (
    Refused | StatusReply | DumpReply | TraceReply | RecordReply | UsageReply | OperationReply | CheckReply | StopReply
)
