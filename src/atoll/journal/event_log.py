"""The controller's event log: all events in order, from which its decisions replay.

A log is a complete account of why something happened. It is bounded by count and by bytes; the oldest events go first.
A dump has neither the digests of tokens nor the secrets of sessions and hosts: fixed texts replace them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec

from atoll.cluster.settings import ClusterSettings
from atoll.cluster.tenant_settings import DEFAULT_NAME
from atoll.journal.records import decode_event, encode_event
from atoll.protocol import messages as m
from atoll.protocol.events import AnyEvent, ConnectionOpened, Received, SessionsPersisted
from atoll.security.roles import is_of_the_cluster
from atoll.security.tokens import Tokens

MOST_EVENTS = 50_000
# Of encoded events. A dump has them in base64, and must fit into one message.
MOST_BYTES = 32 * 1024 * 1024

# What stands in a log for the token that was expected, and for any other.
RIGHT_TOKEN = "right"
_WRONG_TOKEN = "wrong"
_NO_TOKENS = Tokens()
_MESSAGES_WITH_SECRETS: frozenset[type[Any]] = frozenset((m.Hello, m.SetTenant))
_EVENTS_WITH_SECRETS: frozenset[type[Any]] = frozenset((ConnectionOpened, SessionsPersisted))


class Header(msgspec.Struct, frozen=True):
    """How the controller was started, and how many events are missing at the beginning."""

    version: str
    settings: ClusterSettings
    has_token: bool = False
    missing: int = 0
    has_host_token: bool = False


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event of a dump: what a reader looks for, and the whole event as its record (`records.decode_event`)."""

    number: int
    seconds: float
    event: str
    encoded: bytes
    connection: int = 0
    message: str = ""


class EventLog:
    """Keeps the last events, encoded: they share nothing with what the controller does to the messages in them.

    `turn` has the records of the last turn, with digests and secrets in them, for a journal, which encrypts them.
    `dump` shows neither. A restored controller has the log from then on.
    """

    def __init__(self, settings: ClusterSettings, version: str, tokens: Tokens = _NO_TOKENS) -> None:
        # A log replays with the texts that replace digests in it: nobody gets in with these.
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
        self.turn: Sequence[bytes] = ()  # what came between the last two calls of `trim`
        self._new: list[bytes] = []  # since `trim`
        self._events: deque[bytes] = deque()
        self._count = 0  # also of those that are not kept any more
        self._bytes = 0
        self._replaced: dict[int, bytes] = {}  # in place of the events of these numbers, which have secrets

    def record(self, event: AnyEvent) -> None:
        """Keeps the event. This is on the path of every message: what can wait is done in `trim`."""
        self._new.append(encode_event(event))
        if event.__class__ is Received:
            if event.message.__class__ in _MESSAGES_WITH_SECRETS:
                self._keep_shown(msgspec.structs.replace(event, message=self._without_secrets(event.message)))
        elif event.__class__ in _EVENTS_WITH_SECRETS:
            self._keep_shown(_event_without_secrets(event))

    def trim(self) -> None:
        """Drops the oldest events beyond the bounds. To be called once for many events."""
        new, self._new = self._new, []
        self.turn = new
        self._events.extend(new)
        self._count += len(new)
        self._bytes += sum(map(len, new))
        while self._bytes > MOST_BYTES or len(self._events) > MOST_EVENTS:
            self._bytes -= len(self._events.popleft())
        if self._replaced:
            missing = self._count - len(self._events)
            while self._replaced and (first := next(iter(self._replaced))) <= missing:
                del self._replaced[first]

    def dump(self) -> bytes:
        """A line of JSON for the start, and one for each event."""
        missing = self._count - len(self._events)
        encode = msgspec.json.encode
        lines = [encode(msgspec.structs.replace(self._header, missing=missing))]
        lines.extend(
            encode(_line(number, self._replaced.get(number, record)))
            for number, record in enumerate((*self._events, *self._new), missing + 1)
        )
        return b"\n".join(lines) + b"\n"

    def statistics(self) -> dict[str, int]:
        """How much is kept, and how many events are not any more."""
        nbytes = self._bytes + sum(map(len, self._new))
        count = len(self._events) + len(self._new)
        return {"events": count, "bytes": nbytes, "missing": self._count - len(self._events)}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"turn": (), "_new": [], "_events": deque(), "_bytes": 0, "_replaced": {}}

    def _keep_shown(self, event: AnyEvent) -> None:
        """A dump shows this in place of the last event."""
        self._replaced[self._count + len(self._new)] = encode_event(event)

    def _without_secrets(self, message: Any) -> Any:
        if isinstance(message, m.Hello):
            return msgspec.structs.replace(message, token=self._shown(message))
        return msgspec.structs.replace(message, token_hash=_token_of(message.name) if message.token_hash else "")

    def _shown(self, hello: m.Hello) -> str:
        """What stands for its token."""
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


def _line(number: int, record: bytes) -> Line:
    event = decode_event(record)
    message = getattr(event, "message", None)
    kind = "" if message is None else type(message).__name__
    return Line(number, event.seconds, type(event).__name__, record, getattr(event, "connection", 0), kind)


def _token_of(tenant: str) -> str:
    return f"{RIGHT_TOKEN}:{tenant}"
