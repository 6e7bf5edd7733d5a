"""Plans that go to their hosts in pieces, behind everything else: which hosts do not have them yet, and who waits.

What is sent to a host later may overtake a large plan. A gang must not: were it to wait at one of its hosts, what is
behind it would, too, and elsewhere not. So its node waits here, and is not committed before all hosts of its program
have said that they have their plans. Meanwhile the islands run what others have launched.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from atoll.cluster.resources import ResourceManager
from atoll.launch.scheduler import Scheduler
from atoll.state.gang_states import Reason
from atoll.state.queued_nodes import QueuedNode
from atoll.state.session import GangRun


class LargePlans:
    """By the numbers of the plans."""

    def __init__(self, resources: ResourceManager, scheduler: Scheduler[GangRun]) -> None:
        self._resources = resources
        self._scheduler = scheduler
        self._missing: dict[int, set[int]] = {}  # hosts that do not have them
        self._held: dict[int, dict[QueuedNode[GangRun], None]] = {}

    def __contains__(self, plan: int) -> bool:
        return plan in self._missing

    def sent(self, plan: int, hosts: Collection[int]) -> None:
        """The plan is on its way to these hosts."""
        self._missing.setdefault(plan, set()).update(hosts)

    def hold(self, plan: int, node: QueuedNode[GangRun]) -> None:
        """The node waits while a host lacks the plan."""
        if self._missing.get(plan):
            held = self._held.setdefault(plan, {})
            if node not in held:
                held[node] = None
                self._scheduler.lacks(node, Reason.PLAN)

    def arrived(self, host: int, plan: int) -> bool:
        """Whether the host has said so for the first time."""
        missing = self._missing.get(plan, set())
        if host not in missing:
            return False
        missing.discard(host)
        if not missing:
            for node in self._held.pop(plan, ()):
                self._scheduler.arrived(node)
        return True

    def dropped(self, plan: int) -> set[int]:
        """Nobody needs the plan any more. Returns the hosts that it has yet to reach: they drop it once it is there."""
        missing = self._missing.get(plan, set())
        if not missing:
            self._missing.pop(plan, None)
        return set(missing)

    def lost(self, island: int, plans: Mapping[int, Collection[int]]) -> None:
        """The island's hosts have no plans any more. `plans` are those in use, with their hosts."""
        hosts = set(self._resources.hosts_of(island))
        for plan, missing in list(self._missing.items()):
            if plan in plans:
                missing.update(hosts.intersection(plans[plan]))
            else:
                missing -= hosts
                if not missing:
                    del self._missing[plan]
        for node in self._scheduler.nodes(island):
            if node.is_pending:
                self.hold(node.gangs[0].run.launch.program.number, node)
