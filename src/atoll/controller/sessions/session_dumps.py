"""The structs of what handles sessions and the requests of their proxies. See `atoll.state.object_dumps`."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from atoll.controller.sessions.detached_sessions import DetachedSessions
from atoll.controller.sessions.inboxes import Inboxes
from atoll.controller.sessions.name_waits import NameWaits
from atoll.controller.sessions.proxy_requests import SliceRequests
from atoll.controller.sessions.queries import Queries
from atoll.controller.sessions.sessions import Sessions
from atoll.protocol import messages as m
from atoll.state.object_dumps import CountsOf, Dump, Ref, callback, dump_of
from atoll.state.session import Session
from atoll.state.stepped_work import Bug
from atoll.state.stored_forms import DurationsOf, TurnsOf


@dump_of(NameWaits, "name waits", version=2)
class NameWaitsDump(Dump):
    _until: dict[int, float] = {}
    _told: set[int] = set()


@dump_of(Sessions, "sessions")
class SessionsDump(Dump):
    next_number: int


@dump_of(DetachedSessions, "detached sessions", version=2)
class DetachedSessionsDump(Dump):
    until: dict[int, float] = {}
    _awaiting: DurationsOf[int] = msgspec.field(default_factory=cast(Any, dict))


@dump_of(Inboxes, "inboxes", version=3)
class InboxesDump(Dump):
    _turns: TurnsOf[m.FromProxy]
    _nodes: CountsOf[int] = {}
    _credits: CountsOf[int] = {}
    _bytes: CountsOf[int] = {}
    _at_once: int = 0
    _cost: int = 0
    failed: dict[int, Bug] = {}


@dump_of(Queries, "queries", rebuilt={"_loads": dict}, rebuild=Queries.count_again)
class QueriesDump(Dump):
    _next: int
    _asked: dict[int, tuple[int, int, m.Query]] = {}


@dump_of(SliceRequests, "slice requests")
class SliceRequestsDump(Dump):
    """Slice requests have no state of their own."""


callback("slice requests: add again", SliceRequests, SliceRequests._add_again, Ref[Session], m.AddSlice)
