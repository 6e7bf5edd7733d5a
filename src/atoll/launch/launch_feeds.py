"""The bytes that gangs await from their clients and from other hosts: their arrival, and their end if a gang fails.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.errors import Status
from atoll.launch.scheduler import Scheduler
from atoll.launch.shared_state import SharedState
from atoll.protocol import messages as m
from atoll.state.gang_specs import GangSpec
from atoll.state.gang_states import Reason
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun, Key, Launch, Session


class LaunchFeeds:
    """The feeds of all launches. `Session.feeds` has those of each client."""

    def __init__(self, shared: SharedState, scheduler: Scheduler[GangRun]) -> None:
        self._sessions = shared.sessions
        self._resources = shared.resources
        self._outbox = shared.outbox
        self._scheduler = scheduler

    def arrived(self, session: Session, host: int, feed: int) -> bool:
        """Note that a feed is complete at a host's data port. Return whether a launch waited for it."""
        node = session.feeds.awaited.pop((host, feed), None)
        if node is None:
            return False
        self._scheduler.arrived(node, Reason.BYTES)
        return True

    def await_again(self, launch: Launch, hosts: set[int]) -> None:
        """Have a launch in line wait for all bytes that its client sends to these hosts, which have lost them."""
        feeds = self._sessions[launch.session].feeds
        for node in launch.nodes:
            for gang in node.gangs:
                for key in launch.awaited_by(gang.run.spec):
                    if key[0] in hosts and key not in feeds.awaited:
                        feeds.awaited[key] = node
                        self._scheduler.lacks(node, Reason.BYTES)

    def fail_incoming(self, gang: Gang[GangRun], status: Status) -> None:
        """Have the gang's hosts stop waiting for bytes of other hosts, and drop those that arrive."""
        if not gang.run.hosts_left:
            return
        for host, feeds in gang.run.incoming():
            if not self._resources.has_failed(host):
                self._outbox.to_host(host, m.FailFeeds(gang.node.session, feeds, status))

    def refuse(self, session: Session, gangs: Sequence[GangSpec], feeds: tuple[int, ...], taken: bool = False) -> None:
        """Drop the client's bytes for gangs that will not run, whether they have arrived or are on their way.

        If `taken` is true, the launch has claimed its feeds, and `session.feeds.awaited` has those not arrived yet.
        """
        for gang in gangs:
            for host, feed in gang.awaited:
                if feed >= len(feeds):
                    continue
                key: Key = (host, feeds[feed])
                has_arrived = taken and key not in session.feeds.awaited
                if has_arrived or session.feeds.refuse(key):
                    self._outbox.to_host(host, m.DropFeed(session.number, key[1]))
