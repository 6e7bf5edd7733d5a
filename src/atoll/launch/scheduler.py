"""Decide the order in which gangs are committed, with one line of nodes per session and island.

Each dispatch unit of a launch, usually one node, becomes a queued node, with one gang on each of its islands. The
queued nodes of a session wait in lines, one line per island. A queued node is *ready* if it is at the head of all of
its lines and lacks nothing. When an island is not full, its policy (`launch.policy`) chooses a ready node, and the
scheduler *commits* it if there is memory for it. The gangs of the node then get their positions in the orders of all of
its islands, including islands that are full. So there is one total order, the order of commitment, and the controller
sends the gangs of each island in an order that is a part of it. A host may run another session's unit before one that
is blocked: see `worker.plan_executor`. If a gang awaits data from a gang on another island, that gang is earlier in
this order, so no two gangs wait for each other.

Work in flight is bounded per host. An island starts gangs until those in flight keep a host busy for `BUSY_NS`, and at
most `window` of them. A gang that has a full host blocks the gangs behind it. Nodes are committed as late as possible,
so that a new session gets device time within milliseconds, even between the nodes of a long program.

Islands that only joint gangs use share their lines (`launch.island_lines`), so a joint gang costs little more for
hundreds of islands than for one.

The base class has the queries (`launch.queued_work`).

Pure. Methods such as `enqueue`, `arrived`, `finished` and `drop` are the events. `start_next` commits nodes, and starts
the gangs that it returns, in order. `touched` has the islands that may have a gang to start.
Whether an island works, and which functions a session lacks there, is not stored here: the scheduler asks the island's
record. `island_leaves` reports that an island stops working or lacks functions, before anything else happens,
`offer_again` that it works again or has all functions of a session, and `functions_compiled` that it has more of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import attrgetter

from atoll.cluster.lifecycle import WORKING, Island
from atoll.launch.island_lines import IslandLines
from atoll.launch.policies.fair import FairShares
from atoll.launch.policy import Policy
from atoll.launch.queued_work import QueuedWork
from atoll.state.gang_states import GangState, Reason
from atoll.state.grouped_counts import CountGroup
from atoll.state.host_window import BUSY_NS, HostWindow
from atoll.state.queued_nodes import Dropped, Gang, Payload, QueuedNode
from atoll.state.tenants import Tenant

_AGE = attrgetter("age")


class Scheduler(QueuedWork[Payload]):
    """Decides which gang each island starts next.

    A host whose window is full gets new gangs only when the window is half empty. The gangs are then sent in one
    message, and the host still has half a window of work.

    Args:
      islands: the islands, by number. Nothing starts on an island that does not work.
      window: the limit of gangs in flight on each host.
      policy: makes the scheduling policy of an island.
      busy_ns: the expected duration of the gangs in flight from which on a host is full.
      hosts: the number of hosts of each island, by default 1.
      functions_of: returns the functions that a gang runs. Without it, nodes wait for all functions of their session.
    """

    def __init__(
        self,
        islands: Iterable[Island],
        window: int,
        policy: Callable[[], Policy] = FairShares,
        busy_ns: int = BUSY_NS,
        hosts: Sequence[int] = (),
        functions_of: Callable[[Gang[Payload]], Collection[str]] | None = None,
    ) -> None:
        super().__init__(functions_of)
        self.window = window
        self._busy_ns = busy_ns
        self._policy = policy
        for record in islands:
            self.add_island(record, hosts[record.number] if hosts else 1)
        # Nodes that lack only an island, which does not work or lacks functions of their sessions; by island, in order.
        self._barred: dict[int, dict[QueuedNode[Payload], None]] = {}
        self.now = 0.0  # time of the event that is being handled, by the controller's clock
        self.touched: set[int] = set()  # islands that may have something to start now
        self.contended: set[int] = set()  # sessions with delegated runs on islands for which another has a ready node

    # ---- events

    def add_island(self, record: Island, hosts: int = 1) -> None:
        """Add the island with the next number."""
        self._islands.append(IslandLines(record, self._policy(), self.window, self._busy_ns, hosts))

    def set_limits(self, island: int, window: int, launch_ns: int = 0) -> None:
        """Set what depends on the devices of the island.

        Args:
          island: the island.
          window: the limit of gangs in flight on each host.
          launch_ns: the time that the policy charges for each launch, for each host of its gang.
        """
        if (self._islands[island].window, self._islands[island].launch_ns) != (window, launch_ns):
            self.island_leaves(island)
            self._islands[island].window, self._islands[island].launch_ns = window, launch_ns

    def island_leaves(self, island: int) -> None:
        """Have the island stop sharing lines, because it stops working or a session lacks functions there."""
        self._lines.leave(island, self.touched)

    def enqueue(self, node: QueuedNode[Payload]) -> None:
        """Add a node to its session's lines, which are ordered by age."""
        self._deferred.pop(node.number, None)
        for gang in node.gangs:
            for lines in self._join(gang):
                by_session = lines.lines
                line = by_session.get(node.session)
                if line is None:
                    line = by_session[node.session] = deque()
                index = len(line)
                if index and line[-1].age > node.age:  # nearly never; there may be tens of thousands behind it
                    index = bisect_right(line, node.age, key=_AGE)
                if index:
                    node.behind += 1
                elif line:
                    line[0].behind += 1
                    self._wait(line[0], Reason.OWN)
                line.insert(index, node)
        self._enter_line(node)

    def _join(self, gang: Gang[Payload]) -> Sequence[IslandLines[Payload]]:
        """Return the lines that a gang joins, after changing which islands share them if necessary."""
        if gang.islands:
            return [lines for lines, _ in self._lines.join(gang, self.touched)]
        if self._islands[gang.island].places:
            self.island_leaves(gang.island)
        return (self._islands[gang.island],)

    def defer(self, node: QueuedNode[Payload], own: bool = False) -> None:
        """Defer the node: until it is enqueued, it is in no line and holds up nothing of its session.

        If `own` is true, it waits for other nodes of its launch, and otherwise for Python. A node of a large launch may
        wait for Python after it has waited for the others.
        """
        reason = Reason.OWN if own else Reason.PYTHON
        if node.gangs[0].state is GangState.DEFERRED:
            node.wait_for(reason, self.now)
        else:
            node.enter(GangState.DEFERRED)
            node.reason = reason
        self._deferred[node.number] = node

    def arrived(self, node: QueuedNode[Payload], kind: Reason) -> None:
        """Note that one of the inputs of this kind that the node lacked has arrived."""
        node.note_arrived(kind)
        self._offer(node)

    def lacks(self, node: QueuedNode[Payload], reason: Reason) -> None:
        """Note that the node lacks one more thing. This has no effect after the node was committed."""
        node.note_missing(reason)
        if node.gangs and node.gangs[0].state is GangState.READY:
            self._wait(node, reason)

    def start_next(
        self,
        island: int,
        reserve: Callable[[QueuedNode[Payload]], Reason | None] | None = None,
        line_up_instead: Callable[[QueuedNode[Payload]], bool] | None = None,
    ) -> Gang[Payload] | None:
        """Start the next gang, and return it. If none is committed, first commit the nodes that the policy chooses.

        If its node starts together, this starts all gangs of the node, on their islands. Return None if the island is
        full, does not work, or waits for an exclusive gang or for another island, or if no node is ready.

        Args:
          island: the island.
          reserve: takes the memory of a node before it is committed, or returns what it lacks. A node that lacks memory
            is not committed until `retry`. By default, memory is not counted.
          line_up_instead: is called before a delegated node is committed. If other nodes have to run in its place, it
            drops the node, enqueues these, and returns True.
        """
        lines = self._islands[island]
        if lines.record.state not in WORKING:  # `works` is a call, and this is on the path of every launch
            return None
        while not lines.draining:
            if not lines.committed:
                if lines.full_hosts == lines.hosts:
                    return None
                node = lines.policy.take()
                if node is None:
                    return None
                self._commit(node, reserve, line_up_instead)
                continue
            gang = lines.committed[0]
            if gang.state is GangState.DROPPED:
                self._remove_dropped(lines)
                continue
            if gang.islands or gang.node.starts_together:
                return gang if self._try_start_on_all(gang, lines) else None
            loads = lines.claim(gang, gang.hosts)
            if loads is None:
                return None
            lines.start(gang, loads, self.now)
            return gang
        return None

    def _try_start_on_all(self, gang: Gang[Payload], first: IslandLines[Payload]) -> bool:
        """Start a joint gang, or all gangs of a node that starts together, on all of its islands.

        The gang is the first one on one of them. Return False if another island cannot start its part now. That island
        is touched before it can, and only then is the node tried again.
        """
        noted = gang.node.gangs[0]
        if noted.blocked_on >= 0:
            blocked = self._islands[noted.blocked_on]
            if blocked is not first:
                return False
            for lines, each, hosts in self._parts(gang):  # first where it was blocked: other islands may be hundreds
                if lines is blocked and self._claim(each, lines, hosts) is None:
                    return False
        claimed = []
        for lines, each, hosts in self._parts(gang):
            loads = self._claim(each, lines, hosts)
            if loads is None:
                noted.blocked_on = lines.record.number
                return False
            claimed.append((lines, each, loads))
        noted.blocked_on = -1
        for lines, each, loads in claimed:
            lines.start(each, loads, self.now)
            self.touched.add(lines.record.number)
        return True

    def _parts(self, gang: Gang[Payload]) -> Iterator[tuple[IslandLines[Payload], Gang[Payload], tuple[int, ...]]]:
        """Yield what starts with a gang: on each island a gang, which may be the same one, with its hosts there."""
        if gang.islands:
            for lines, at in self._lines.span(gang):
                yield lines, gang, gang.places[at]
        else:
            for each in gang.node.gangs:
                yield self._islands[each.island], each, each.hosts

    def _claim(
        self, gang: Gang[Payload], lines: IslandLines[Payload], hosts: tuple[int, ...]
    ) -> Sequence[CountGroup[int, HostWindow]] | None:
        """Claim hosts of one of its islands for a gang that starts on several: see `IslandLines.claim`."""
        while lines.committed[0].state is GangState.DROPPED:
            self._remove_dropped(lines)
        if lines.committed[0] is not gang or lines.draining or lines.record.state not in WORKING:
            return None
        return lines.claim(gang, hosts)

    def finished(self, gang: Gang[Payload], nanoseconds: int = 0) -> None:
        """Note that a started gang has left its island. Charge its session the device time, summed over devices.

        The session is also charged for the launch if that costs time of devices.
        """
        places: Iterable[tuple[IslandLines[Payload], tuple[int, ...]]]
        places = ((self._islands[gang.island], gang.hosts),)
        if gang.islands:
            nanoseconds //= len(gang.islands)
            places = [(lines, gang.places[at]) for lines, at in self._lines.span(gang)]
        for lines, hosts in places:
            if gang.charges is not None:
                gang.charged = gang.charges.get(lines.record.number, 0)
            lines.policy.charge(gang, nanoseconds + lines.launch_ns * len(hosts))
            lines.in_flight -= gang.weight
            lines.busy_ns -= gang.estimate
            for group in lines.loads_of(hosts):
                load = group.count
                load.end(gang.weight, gang.estimate)
                if load.full and load.has_room_again(lines.window, self._busy_ns):
                    load.full = False
                    lines.full_hosts -= len(group.keys)
                    self.touched.add(lines.record.number)
            if not gang.weight:
                lines.count_unbounded(-1)
                self.touched.add(lines.record.number)  # full hosts may take gangs, and no gang in flight will report it
            if lines.draining and lines.in_flight == 0:
                lines.draining = False
                self.touched.add(lines.record.number)

    def _remove_dropped(self, lines: IslandLines[Payload]) -> None:
        """Remove the first committed gang, which was dropped, and return to its session what it was charged."""
        gang = lines.committed.popleft()
        if gang.charges is not None:
            gang.charged = gang.charges.get(lines.record.number, 0)
        lines.policy.charge(gang, 0)

    def compiled(self, island: int, session: int, tenant: Tenant, nanoseconds: int) -> None:
        """Charge a compilation to the session. It ran on the island's CPUs, which are also its devices.

        If islands share their lines, each of them is charged an equal part, as for joint gangs.
        """
        lines = self._islands[island]
        lines.policy.compiled(session, tenant, nanoseconds // len(lines.islands))

    def tenant_changed(self, tenant: Tenant) -> None:
        """Apply changed settings of a tenant to its nodes that wait."""
        for lines in self._lines.all():
            lines.policy.tenant_changed(tenant)

    def retry(self, node: QueuedNode[Payload]) -> None:
        """Offer a node again that lacked memory when it was to be committed."""
        self._offer(node)

    def drop(self, node: QueuedNode[Payload]) -> Dropped[Payload]:
        """Drop the gangs of the node that have not started. Return them."""
        is_in_line = node.is_in_line
        dropped = self._drop(node)
        if is_in_line:
            self._leave_lines(node)
        return dropped

    def drop_all(self, nodes: Sequence[QueuedNode[Payload]]) -> list[Dropped[Payload]]:
        """Drop the gangs of these nodes of one session that have not started. Return them by node.

        The nodes leave their lines together: there may be tens of thousands, also ahead of them.
        """
        unsent = [node for node in nodes if any([gang.is_unsent for gang in node.gangs])]
        in_line = [node for node in unsent if node.is_in_line]
        dropped = [self._drop(node) for node in unsent]
        if len(in_line) == 1:
            self._leave_lines(in_line[0])
        elif in_line:
            self._leave_lines_together(in_line)
        return dropped

    def drop_session(self, session: int) -> list[Dropped[Payload]]:
        """Drop all gangs that have not started of a session that has ended. Return them by node."""
        found = [self._drop(node) for node in self.nodes_of((session,))]
        for lines in self._lines.all():
            lines.lines.pop(session, None)
            lines.policy.forget(session)
        return found

    def _drop(self, node: QueuedNode[Payload]) -> Dropped[Payload]:
        if self._deferred:
            self._deferred.pop(node.number, None)
        gangs = [gang for gang in node.gangs if gang.is_unsent]
        were_committed = bool(gangs) and gangs[0].state is GangState.COMMITTED
        if self._barred:
            self._unbar(node, gangs)
        for gang in gangs:
            gang.enter(GangState.DROPPED)
            if were_committed and (gang.islands or node.starts_together):
                # The gangs behind it may have waited for another island.
                self.touched.update([lines.record.number for lines in self._lines_on(gang)])
            if were_committed and node.is_delegated:
                self.delegated_run_ended(gang)
        return Dropped(node, gangs, were_committed)

    def _unbar(self, node: QueuedNode[Payload], gangs: Sequence[Gang[Payload]]) -> None:
        """Forget that a dropped node lacks an island of these gangs."""
        for gang in gangs:
            for island in gang.all_islands:
                self._barred.get(island, {}).pop(node, None)

    def offer_again(self, island: int) -> None:
        """Offer the nodes again that lack only the island: it works again, or a session has its functions there."""
        self.touched.add(island)
        for node in self._barred.pop(island, ()):
            self._offer(node)

    def functions_compiled(self, island: int, session: int) -> None:
        """Offer the session's nodes again that lacked functions on the island, some of which it has now."""
        for node in [each for each in self._barred.get(island, ()) if each.session == session]:
            del self._barred[island][node]
            self._offer(node)

    def remove_island(self, island: int) -> None:
        """Clear an island that will not work again. All nodes that need it were dropped."""
        lines = self._islands[island]
        lines.committed.clear()
        lines.policy = self._policy()
        self._barred.pop(island, None)

    def delegated_run_ended(self, gang: Gang[Payload]) -> None:
        """Handle the end of a delegated gang that was committed: later launches of its session may be committed."""
        delegated, session = self._islands[gang.island].delegated, gang.node.session
        delegated[session] -= 1
        if not delegated[session]:
            del delegated[session]
            self.offer_again(gang.island)

    def seconds_without_others(self, island: int, session: int) -> float:
        """Return the seconds since another session used the island; -1 if another has queued nodes there."""
        lines = self._islands[island]
        if lines.newest not in (0, session) or lines.others_wait(session):
            return -1
        return self.now - lines.exclusive_since

    # ---- lines

    def _offer(self, node: QueuedNode[Payload]) -> None:
        """Make a node ready if it is in line and lacks nothing."""
        if node.is_in_line:
            self._enter_line(node)

    def _enter_line(self, node: QueuedNode[Payload]) -> None:
        """Make a node in line ready, or have it wait for what it lacks."""
        order = Reason.ORDER
        if node.behind:
            reason = Reason.OWN
        elif node.missing > 0:
            reason = node.lacks
        else:
            reason = self._barrier(node)
        if reason is not order:
            self._wait(node, reason)
            return
        if node.reason is not order:
            node.wait_for(order, self.now)
        for gang in node.gangs:
            if gang.state is not GangState.READY:
                gang.enter(GangState.READY)
            for lines in self._lines_on(gang):
                lines.policy.add(node)
                if lines.delegated:
                    self.contended.update(session for session in lines.delegated if session != node.session)
                self.touched.add(lines.record.number)

    def _lines_on(self, gang: Gang[Payload]) -> Sequence[IslandLines[Payload]]:
        """Return the lines of the islands of a gang that has joined them."""
        return self._lines.lines_of(gang) if gang.islands else (self._islands[gang.island],)

    def _wait(self, node: QueuedNode[Payload], reason: Reason) -> None:
        """Have a node in line wait."""
        if reason is not node.reason:
            node.wait_for(reason, self.now)
        if node.gangs[0].state is not GangState.WAITING:
            node.enter(GangState.WAITING)

    def _barrier(self, node: QueuedNode[Payload]) -> Reason:
        """Return why one of the node's islands does not take it now, or ORDER if all do.

        The node is offered again when that island takes it.
        """
        session, gangs = node.session, node.gangs
        if len(gangs) == 1 and not gangs[0].islands:  # nearly always
            lines = self._islands[gangs[0].island]
            record = lines.record
            if not lines.delegated and record.state in WORKING and session not in record.needs_recompile:
                return Reason.ORDER
        for gang in gangs:
            for lines in self._lines_on(gang):
                record = lines.record
                is_away = record.state not in WORKING
                if is_away or self._lacks_functions(gang, record):
                    self._barred.setdefault(record.number, {})[node] = None
                    return Reason.ISLAND if is_away else Reason.FUNCTIONS
                if lines.delegated and session in lines.delegated and not node.is_delegated:
                    self._barred.setdefault(record.number, {})[node] = None
                    return Reason.OWN
        return Reason.ORDER

    def _commit(
        self,
        node: QueuedNode[Payload],
        reserve: Callable[[QueuedNode[Payload]], Reason | None] | None,
        line_up_instead: Callable[[QueuedNode[Payload]], bool] | None,
    ) -> None:
        """Give the gangs of a node their positions in the orders of all of its islands, unless something is missing."""
        # Policies may have several copies of a node, and do not know if it waits again or was dropped.
        if not node.gangs or node.gangs[0].state is not GangState.READY:
            return
        reason = self._barrier(node)
        if reason is not Reason.ORDER:
            self._wait(node, reason)
            return
        if node.is_delegated and line_up_instead is not None and line_up_instead(node):
            return
        for gang in node.gangs:
            if gang.duration_source is not None:
                gang.estimate = gang.duration_source.expected
        lacking = None if reserve is None else reserve(node)
        if lacking is not None:
            self._wait(node, lacking)
            return
        node.committed_at = self.now
        for gang in node.gangs:
            gang.enter(GangState.COMMITTED)
            if gang.islands:
                self._commit_joint(gang)
                continue
            lines = self._islands[gang.island]
            lines.committed.append(gang)
            lines.policy.commit(gang)
            self.touched.add(gang.island)
            if node.is_delegated:
                lines.delegated[node.session] = lines.delegated.get(node.session, 0) + 1
        self._leave_lines(node)

    def _commit_joint(self, gang: Gang[Payload]) -> None:
        for lines in self._lines.lines_of(gang):
            lines.committed.append(gang)
            lines.policy.discard(gang.node)
            lines.policy.commit(gang)
            if gang.charged:
                gang.charges = gang.charges or {}
                gang.charges.update(dict.fromkeys(lines.islands, gang.charged))
                gang.charged = 0
            self.touched.add(lines.record.number)

    def _leave_lines(self, node: QueuedNode[Payload]) -> None:
        """Remove a node from its lines. The nodes behind it move up."""
        for gang in node.gangs:
            for lines in self._lines_on(gang):
                by_session = lines.lines
                line = by_session.get(node.session)
                if line is None:
                    continue
                if line[0] is not node:
                    line.remove(node)
                    continue
                line.popleft()
                self._moved_up(by_session, node.session)

    def _leave_lines_together(self, nodes: Sequence[QueuedNode[Payload]]) -> None:
        """Remove several nodes of one session from their lines."""
        session, leaving = nodes[0].session, set(nodes)
        joined = {id(lines): lines for node in nodes for gang in node.gangs for lines in self._lines_on(gang)}
        for lines in joined.values():
            line = lines.lines.get(session)
            if line is None:
                continue
            first = line[0]
            left = [node for node in line if node not in leaving]
            line.clear()
            line.extend(left)
            if first in leaving:
                self._moved_up(lines.lines, session)

    def _moved_up(self, by_session: dict[int, deque[QueuedNode[Payload]]], session: int) -> None:
        """Note that the first node of a session has left a line."""
        line = by_session[session]
        if not line:
            del by_session[session]
            return
        following = line[0]
        following.behind -= 1
        if not following.behind:
            self._offer(following)
