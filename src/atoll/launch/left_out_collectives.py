"""Keep count of the collectives in flight that a host has failed in or left out.

Such a host starts no other collective until this one is over on all hosts that communicate in it.
"""

from __future__ import annotations

from collections.abc import Mapping

from atoll.launch.outbox import Outbox
from atoll.protocol import messages as m
from atoll.state.queued_nodes import Gang, QueuedNode
from atoll.state.session import GangRun


class LeftOutCollectives:
    """The nodes whose gangs have `GangRun.left_out`. They can be found again from the gangs in flight."""

    def __init__(self, in_flight: Mapping[int, Gang[GangRun]], outbox: Outbox) -> None:
        self._in_flight = in_flight
        self._outbox = outbox
        self._nodes: set[int] = set()  # numbers

    def add(self, gang: Gang[GangRun], host: int) -> None:
        """Note that a host has failed in a collective or left it out."""
        gang.run.left_out += (host,)
        self._nodes.add(gang.node.number)

    def ended(self, node: QueuedNode[GangRun]) -> None:
        """If a collective is over on all hosts, let those hosts start others that failed in it or left it out."""
        if node.number not in self._nodes:  # nearly always: a look at all gangs is too much for each that ends
            return
        over = [gang for gang in node.gangs if gang.is_over or not gang.run.hosts_left]
        if len(over) < len(node.gangs) and not node.gangs[0].run.spec.is_apart:  # its islands communicate
            return
        for gang in over:
            for host in gang.run.left_out:
                self._outbox.to_host(host, m.CollectiveEnded(gang.sequence))
            gang.run.left_out = ()
        if not any(gang.run.left_out for gang in node.gangs):
            self._nodes.discard(node.number)

    def find(self) -> None:
        """Find the nodes among the gangs in flight, after those were loaded."""
        self._nodes = self._found()

    def validate(self) -> None:
        """Raise AssertionError if the gangs in flight contradict what was noted."""
        assert self._nodes == self._found(), f"nodes {self._nodes} were noted as left out"

    def _found(self) -> set[int]:
        nodes = (gang.node for gang in self._in_flight.values())
        return {node.number for node in nodes if any(gang.run.left_out for gang in node.gangs)}
