"""Send gangs to their hosts.

The first message of a launch to a host, `Run`, has all handles and feeds that the launch needs there. Later messages
only name the gang that starts. Hosts with the same plan get the same message, which is encoded once.
"""

from __future__ import annotations

from typing import NamedTuple

from atoll.launch.outbox import Outbox
from atoll.protocol import messages as m
from atoll.state.programs import HostPlan
from atoll.state.queued_nodes import Gang
from atoll.state.session import GangRun, Launch


class _NewestRun(NamedTuple):
    """The message that starts a launch on a host. Hosts whose plans have the same arguments and results share it."""

    launch: Launch
    plan: HostPlan
    segments: int
    run: m.Run

    def is_of(self, launch: Launch, plan: HostPlan, segments: int) -> bool:
        same = self.plan is plan or (self.plan.arguments == plan.arguments and self.plan.results == plan.results)
        return self.launch is launch and self.segments == segments and same


class RunMessages:
    """Makes the messages that start gangs on hosts. If they are `acknowledged`, hosts report each gang they enqueue."""

    def __init__(self, outbox: Outbox, *, acknowledged: bool) -> None:
        self._outbox = outbox
        self._acknowledged = acknowledged
        # While gangs are started on hosts whose processes have relays: the gangs of a node mostly send the same.
        self._newest: _NewestRun | None = None

    def forget_newest(self) -> None:
        """Do not share the message of the last `send` with later gangs."""
        self._newest = None

    def send(self, gang: Gang[GangRun]) -> None:
        """Send a gang to its hosts."""
        launch, segments = gang.run.launch, gang.run.spec.segments
        hosts, sequence = gang.hosts, gang.sequence
        begun, handles, outbox = launch.hosts_started, launch.handles, self._outbox
        if begun:
            (first, *others) = {*map(begun.get, hosts)}
            if first is not None and not others:  # hosts that begin a launch together mostly continue it together
                outbox.dispatch(hosts, launch.session, first, sequence, segments)
                return
            known: dict[int, list[int]] = {}  # hosts, by the first unit of the run there
            for host in hosts:
                if host in begun:
                    known.setdefault(begun[host], []).append(host)
            for first, some in known.items():
                outbox.dispatch(tuple(some), launch.session, first, sequence, segments)
            hosts = tuple([host for host in hosts if host not in begun]) if known else hosts
        begun.update(dict.fromkeys(hosts, sequence))
        for plan, some_hosts in launch.program.by_handles(hosts):
            newest = self._newest
            if newest is not None and newest.is_of(launch, plan, segments):
                outbox.start(some_hosts, newest.run, sequence)
                continue
            run = m.Run(
                sequence,
                launch.session,
                launch.program.number,
                tuple([handles[position] for position in plan.arguments]),
                tuple([handles[position] for position in plan.results]),
                launch.feeds,
                launch.host_feeds,
                self._acknowledged,
                segments,
                contents=launch.contents,
            )
            if outbox.has_processes and not gang.islands:
                self._newest = _NewestRun(launch, plan, segments, run)
                outbox.start(some_hosts, run, sequence)
            else:
                outbox.to_hosts(some_hosts, run)
