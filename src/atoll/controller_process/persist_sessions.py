"""Persist suspended sessions for the next cluster: the connections to their proxies, and the file's content."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from atoll.cluster.persisted_cluster import PersistedCluster
from atoll.controller.core import Controller
from atoll.controller_process.shell_state import ShellState
from atoll.journal.persisted_state import PersistedState
from atoll.journal.snapshots import pickled
from atoll.protocol.actions import PersistSessions
from atoll.wire.resumption.resumable_connections import ResumableConnections


def persist_sessions(
    controller: Controller, state: ShellState, resumable: ResumableConnections, persisted: Sequence[PersistSessions]
) -> bytes:
    """Close all connections except those of the `persisted` sessions, which wait for the next cluster.

    Returns the state that the next cluster needs; b"" if no session is persisted.
    """
    numbers = {number for each in persisted for number in each.sessions.values()}
    for connection in resumable.all():
        if connection.number in numbers:
            connection.detach(controller.settings.suspended_seconds)
        else:
            connection.close()
    if not persisted:
        return b""
    state.links = [link for link in state.links if link.number in numbers]
    state.others, state.timers = {}, {}
    cluster = PersistedCluster(controller.resources.topology.shapes, tuple(sorted(persisted[-1].sessions)))
    return msgspec.msgpack.encode(PersistedState(cluster, pickled(state), persisted[-1].content, persisted[-1].secrets))
