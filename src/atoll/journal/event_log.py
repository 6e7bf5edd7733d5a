"""The controller's event log: the last events in order, and how to replay them.

The log is bounded by count and by bytes, and drops the oldest events first. A dump of it contains neither the digests
of tokens nor the secrets of sessions and hosts nor contents of arrays: placeholders replace them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from atoll.cluster.settings import ClusterSettings
from atoll.cluster.tenant_settings import DEFAULT_NAME
from atoll.errors import AtollError
from atoll.journal.records import decode_event, encode_event
from atoll.protocol import messages as m
from atoll.protocol.actions import AnyAction
from atoll.protocol.events import AnyEvent, ConnectionOpened, Received, SessionsPersisted, Skipped
from atoll.security.roles import is_of_the_cluster
from atoll.security.tokens import Tokens

MAX_EVENTS = 50_000
# Of encoded events. A dump contains them in base64 and must fit into one message.
MAX_BYTES = 32 * 1024 * 1024

# Placeholders in a log for a correct token and for any other.
RIGHT_TOKEN = "right"
_WRONG_TOKEN = "wrong"
_NO_TOKENS = Tokens()
_MESSAGES_WITH_SECRETS: frozenset[type[Any]] = frozenset((m.Hello, m.SetTenant))
_EVENTS_WITH_SECRETS: frozenset[type[Any]] = frozenset((ConnectionOpened, SessionsPersisted))


class Header(msgspec.Struct, frozen=True):
    """The first line of a dump: the controller's version and settings, and how many older events are missing.

    `base` is the state of the controller before the first event (`controller.controller_dumps`); b"" for that of a new
    controller.
    """

    version: str
    settings: ClusterSettings
    has_token: bool = False
    missing: int = 0
    has_host_token: bool = False
    base: bytes = b""


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event of a dump: the fields to search for, and the whole event as a record (see `records.decode_event`)."""

    number: int
    seconds: float
    event: str
    encoded: bytes
    connection: int = 0
    message: str = ""


class EventLog:
    """Keeps the last events. They are encoded, so that they do not share messages with the controller.

    `turn` has the records of the last turn, including digests, secrets and contents of arrays, for the journal, which
    encrypts them. `dump` contains none of these. The log of a restored controller begins at the snapshot.
    """

    def __init__(self, settings: ClusterSettings, version: str, tokens: Tokens = _NO_TOKENS) -> None:
        # The header contains placeholders in place of digests, so nobody can authenticate using a dump.
        tenants = tuple(
            msgspec.structs.replace(each, token_hash=_token_of(each.name) if each.token_hash else "")
            for each in settings.tenants
        )
        self._header = Header(
            version,
            msgspec.structs.replace(settings, tenants=tenants),
            bool(tokens.client),
            has_host_token=bool(tokens.host),
        )
        self._tokens = tokens
        self.turn: Sequence[bytes] = ()  # the records between the last two calls of `trim`
        self._new: list[bytes] = []  # since `trim`
        self._events: deque[bytes] = deque()
        self._count = 0  # includes dropped events
        self._bytes = 0
        self._replaced: dict[int, bytes] = {}  # by number: records without secrets, for events that contain secrets

    def record(self, event: AnyEvent) -> None:
        """Keep the event. This is on the path of every message, so work that can be delayed is in `trim`."""
        self._new.append(encode_event(event))
        if event.__class__ is Received:
            if event.message.__class__ in _MESSAGES_WITH_SECRETS:
                self._keep_shown(msgspec.structs.replace(event, message=self._without_secrets(event.message)))
        elif event.__class__ in _EVENTS_WITH_SECRETS:
            self._keep_shown(_event_without_secrets(event))

    def trim(self) -> None:
        """Drop the oldest events beyond the bounds. Call this once per turn."""
        new, events = self._new, self._events
        self.turn, self._new = new, []
        events.extend(new)
        self._count += len(new)
        nbytes = self._bytes + sum(map(len, new))
        excess = len(events) - MAX_EVENTS
        if excess > 0:
            nbytes -= sum([len(events.popleft()) for _ in range(excess)])
        while nbytes > MAX_BYTES:
            nbytes -= len(events.popleft())
        self._bytes = nbytes
        if self._replaced:
            missing = self._count - len(events)
            while self._replaced and (first := next(iter(self._replaced))) <= missing:
                del self._replaced[first]

    def dump(self) -> bytes:
        """Return one line of JSON for the header, and one per event."""
        missing = self._count - len(self._events)
        encode = msgspec.json.encode
        lines = [encode(msgspec.structs.replace(self._header, missing=missing))]
        lines.extend(
            encode(line_of(number, self._replaced.get(number, record)))
            for number, record in enumerate((*self._events, *self._new), missing + 1)
        )
        return b"\n".join(lines) + b"\n"

    def statistics(self) -> dict[str, int]:
        """Return how many events and bytes are kept, and how many events were dropped."""
        nbytes = self._bytes + sum(map(len, self._new))
        count = len(self._events) + len(self._new)
        return {"events": count, "bytes": nbytes, "missing": self._count - len(self._events)}

    def _keep_shown(self, event: AnyEvent) -> None:
        """Show `event` in dumps in place of the last event."""
        self._replaced[self._count + len(self._new)] = encode_event(event)

    def _without_secrets(self, message: Any) -> Any:
        if isinstance(message, m.Hello):
            return msgspec.structs.replace(message, token=self._shown(message))
        return msgspec.structs.replace(message, token_hash=_token_of(message.name) if message.token_hash else "")

    def _shown(self, hello: m.Hello) -> str:
        """Return the placeholder for the token of `hello`."""
        if not self._tokens.are_right(hello.role, hello.token):
            return _WRONG_TOKEN
        tenant = None if is_of_the_cluster(hello.role) else self._tokens.tenant_of(hello.token)
        return RIGHT_TOKEN if tenant in (None, DEFAULT_NAME) else _token_of(str(tenant))


def _event_without_secrets(event: AnyEvent) -> AnyEvent:
    match event:
        case ConnectionOpened(connection=connection):
            return msgspec.structs.replace(event, secret=f"secret of connection {connection}")
        case SessionsPersisted(secrets=secrets):
            shown = {session: f"secret of session {session}" for session in secrets}
            return msgspec.structs.replace(event, secrets=shown)
    return event


def without_contents(message: Any) -> Any:
    """Return the message with zeros in place of the contents of arrays, which decide nothing in the controller."""
    if isinstance(message, m.Launch) and message.contents:
        return msgspec.structs.replace(message, contents=bytes(len(message.contents)))
    return message


def line_of(number: int, record: bytes) -> Line:
    """Return the line of an event, without changing its record."""
    event = decode_event(record)
    message = getattr(event, "message", None)
    if isinstance(event, Received) and isinstance(message, m.Launch) and message.contents:
        record = encode_event(msgspec.structs.replace(event, message=without_contents(message)))
    kind = "" if message is None else type(message).__name__
    return Line(number, event.seconds, type(event).__name__, record, getattr(event, "connection", 0), kind)


def _token_of(tenant: str) -> str:
    return f"{RIGHT_TOKEN}:{tenant}"


def with_skips(events: Iterable[AnyEvent]) -> Iterator[tuple[AnyEvent, bool]]:
    """Yield each event, and whether it is skipped because the controller failed at it, as the next event says."""
    last: AnyEvent | None = None
    for event in events:
        if last is not None:
            yield last, isinstance(event, Skipped) and event.skips
        last = event
    if last is not None:
        yield last, False


def replayed(
    handle: Callable[[AnyEvent], list[AnyAction]], events: Iterable[AnyEvent], skips: bool = True
) -> Iterator[tuple[AnyEvent, list[AnyAction]]]:
    """Yield each event with the actions of a controller that handles it. The same events give the same actions.

    Events at which the controller failed are skipped, as by the next controller. Without `skips`, they raise.
    """
    for event, is_skipped in with_skips(events):
        yield event, [] if skips and is_skipped else _handled(handle, event)


def _handled(handle: Callable[[AnyEvent], list[AnyAction]], event: AnyEvent) -> list[AnyAction]:
    try:
        return handle(event)
    except AtollError:
        return []  # as in the original run: the shell closed the connection, which is the next event
