"""Sessions that outlive their cluster, at the shell: their proxies' connections, and the file that they are kept in."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from atoll.cluster.former import FormerCluster
from atoll.controller.core import Controller
from atoll.controller_process.state import ShellState
from atoll.journal.kept import KeptSessions
from atoll.journal.snapshots import pickled
from atoll.protocol.actions import KeepSessions
from atoll.wire.resumption.resumable_connections import ResumableConnections


def leave(
    controller: Controller, state: ShellState, resumable: ResumableConnections, kept: Sequence[KeepSessions]
) -> bytes:
    """Closes all connections, but for those of the sessions that are `kept`: they wait for who goes on with them.

    Returns what that one needs; b"" where nothing is kept.
    """
    numbers = {number for each in kept for number in each.sessions.values()}
    for connection in resumable.all():
        if connection.number in numbers:
            connection.detach(controller.settings.suspended_seconds)
        else:
            connection.close()
    if not kept:
        return b""
    state.links = [link for link in state.links if link.number in numbers]
    state.others, state.timers = {}, {}
    former = FormerCluster(controller.resources.topology.shapes, tuple(sorted(kept[-1].sessions)))
    return msgspec.msgpack.encode(KeptSessions(former, pickled(state), kept[-1].content, kept[-1].secrets))
