"""The structs of the controller, and how to dump it and load it. See `atoll.state.object_dumps`.

The constructor of the controller makes the parts and connects them. A dump has the state of the parts.
"""

from __future__ import annotations

from typing import Any

import msgspec

import atoll.controller.islands.island_dumps
import atoll.controller.named_arrays.named_array_dumps
import atoll.controller.operators.operator_dumps
import atoll.controller.sessions.session_dumps
import atoll.launch.launch_dumps
import atoll.migration.migration_dumps
import atoll.state.state_dumps
import atoll.telemetry.telemetry_dumps  # noqa: F401
from atoll._version import __version__
from atoll.cluster.settings import ClusterSettings
from atoll.controller.admission import Admission
from atoll.controller.core import Controller
from atoll.controller.session_persistence import SessionPersistence
from atoll.controller.state import ClusterState
from atoll.controller.watchdog import Watchdog
from atoll.decodable import decodable
from atoll.errors import JournalError
from atoll.journal.event_log import EventLog
from atoll.journal.stored_settings import StoredSettings
from atoll.launch.connections import Peer
from atoll.security.tokens import Guesses
from atoll.state.buffer_directory import NO_ENTRY
from atoll.state.object_dumps import Callback, Dump, Ref, callback, decode, dump, dump_of, load
from atoll.state.session import Session
from atoll.state.stored_forms import DurationsOf


@dump_of(EventLog, "event log")
class EventLogDump(Dump):
    """The number of events so far. The log of a loaded controller begins at the dump."""

    _count: int = 0


def _restore_handlers(admission: Admission) -> None:
    """Give the peers their handlers, which are stored by name."""
    admission.restore_handlers({peer: str(peer.handlers) for peer in admission._peers.values()})


@dump_of(Admission, "admission", version=4, rebuild=_restore_handlers)
class AdmissionDump(Dump):
    _guesses: Ref[Guesses]
    _next_timer: int
    _waiting: list[Ref[Peer]] = []
    _timers: dict[int, Callback] = {}


callback("admission: expect introduction", Admission, Admission._expect_introduction, int)
callback("admission: fail absent worker", Admission, Admission._fail_absent_worker, int, str)
callback("admission: fail without relay", Admission, Admission._fail_without_relay, int, str)


@dump_of(SessionPersistence, "session persistence")
class SessionPersistenceDump(Dump):
    _persist_none: bool = False
    _operators: list[int] = []


@dump_of(Watchdog, "watchdog")
class WatchdogDump(Dump):
    _durations: DurationsOf[tuple[str | int, ...]]
    _reported: set[tuple[str | int, ...]] = set()
    _next: float = 0.0


@dump_of(ClusterState, "cluster state")
class ClusterStateDump(Dump):
    sessions: dict[int, Ref[Session]] = {}


class ControllerDump(msgspec.Struct, frozen=True):
    """A controller: the arguments of its constructor, and the state of its parts."""

    settings: ClusterSettings
    token: str
    host_token: str
    objects: Any  # `Objects`


class _StoredController(ControllerDump, frozen=True, kw_only=True):
    settings: StoredSettings
    objects: msgspec.Raw


def dump_controller(controller: Controller) -> ControllerDump:
    """Return the state of a controller between two turns. Encode it before the controller handles another event."""
    tokens = controller.tokens
    return ControllerDump(controller.settings, tokens.client, tokens.host, dump(_roots(controller)))


def load_controller(content: bytes | msgspec.Raw, version: str = __version__) -> Controller:
    """Return the controller whose dump was encoded. Raises JournalError if this version cannot read or continue it."""
    try:
        found = msgspec.msgpack.decode(content, type=decodable(_StoredController))
    except msgspec.MsgspecError as error:
        raise JournalError(f"the dump of a controller cannot be read: {error}") from None
    controller = Controller(found.settings.current(), found.token, version, found.host_token)
    load(decode(found.objects), _roots(controller))
    return controller


def _roots(controller: Controller) -> dict[str, Any]:
    return {**controller.parts(), "no entry": NO_ENTRY}
