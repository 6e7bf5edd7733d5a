"""Large plans, which are sent to their hosts in pieces: the hosts that lack them, and the nodes that wait for them.

Later messages to a host may overtake a large plan. If a gang overtook its plan, it would block the gangs behind it on
that host, but not on others. So a node is not committed before all hosts of its program have acknowledged their plans.
Meanwhile the islands run the launches of other sessions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from atoll.cluster.resources import ResourceManager
from atoll.launch.scheduler import Scheduler
from atoll.state.gang_states import Reason
from atoll.state.queued_nodes import QueuedNode
from atoll.state.session import GangRun


class LargePlans:
    """The large plans that are on their way or in use, by number."""

    def __init__(self, resources: ResourceManager, scheduler: Scheduler[GangRun]) -> None:
        self._resources = resources
        self._scheduler = scheduler
        self._missing: dict[int, set[int]] = {}  # hosts that lack the plan, by plan
        self._held: dict[int, dict[QueuedNode[GangRun], None]] = {}  # nodes that wait for it, by plan

    def __contains__(self, plan: int) -> bool:
        return plan in self._missing

    def sent(self, plan: int, hosts: Collection[int]) -> None:
        """Note that the plan is on its way to these hosts."""
        self._missing.setdefault(plan, set()).update(hosts)

    def hold(self, plan: int, node: QueuedNode[GangRun]) -> None:
        """Have the node wait while a host lacks the plan."""
        if self._missing.get(plan):
            held = self._held.setdefault(plan, {})
            if node not in held:
                held[node] = None
                self._scheduler.lacks(node, Reason.PLAN)

    def arrived(self, host: int, plan: int) -> bool:
        """Note that a host has acknowledged the plan. Return whether it lacked the plan until now."""
        missing = self._missing.get(plan, set())
        if host not in missing:
            return False
        missing.discard(host)
        if not missing:
            for node in self._held.pop(plan, ()):
                self._scheduler.arrived(node, Reason.PLAN)
        return True

    def dropped(self, plan: int) -> set[int]:
        """Forget a plan that is not needed any more. Return the hosts that lack it, which drop it when it arrives."""
        missing = self._missing.get(plan, set())
        if not missing:
            self._missing.pop(plan, None)
        return set(missing)

    def require_again(self, island: int, plans: Mapping[int, Collection[int]]) -> None:
        """Handle that the island's hosts have lost all plans. `plans` has the plans in use, with their hosts."""
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
