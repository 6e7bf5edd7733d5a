"""Worlds: sets of islands on whose hosts functions of a tenant run together (`devices.xla.xla_world`).

A world is *waiting* until all of its islands work. Then its first host starts a service, and all of its hosts join. A
world is closed when the workers of one of its islands end or one of its hosts cannot join it, and a new one takes its
place when a function needs it again. Tenants share no worlds, because a failure of a function may close its world.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from atoll.cluster.lifecycle import IslandDrained, IslandFailed, IslandReady, IslandRemoved, IslandRestarted
from atoll.cluster.state_machine import StateMachine
from atoll.errors import Code, Status, StatusError
from atoll.launch.launches import Launches
from atoll.launch.shared_state import SharedState
from atoll.protocol import messages as m
from atoll.state.closed_worlds import ended_with_others
from atoll.state.queued_nodes import QueuedNode
from atoll.state.session import GangRun

# Limits for the worlds of a tenant: those with functions, and all.
MAX_WORLDS = 16
IDLE_WORLDS = 4


class WorldState(Enum):
    """The state of a world. A closed world is forgotten."""

    WAITING = "waiting"  # for an island
    STARTING = "starting"  # its first host starts the service
    JOINING = "joining"  # its hosts join, or have joined


TRANSITIONS: Mapping[WorldState, frozenset[WorldState]] = {
    WorldState.WAITING: frozenset({WorldState.STARTING}),
    WorldState.STARTING: frozenset({WorldState.JOINING}),
    WorldState.JOINING: frozenset(),
}


@dataclass(eq=False)
class World(StateMachine[WorldState]):
    """Hosts of several islands that run functions together."""

    transitions = TRANSITIONS
    number: int
    tenant: str
    islands: tuple[int, ...]
    hosts: tuple[int, ...]  # by rank
    state: WorldState = WorldState.WAITING
    functions: set[str] = field(default_factory=set)  # that run in it


# The tenant and the islands of a world.
WorldKey = tuple[str, tuple[int, ...]]


def world_of(node: QueuedNode[GangRun]) -> WorldKey | None:
    """Return the world that a node's function runs in, if it runs together on several islands."""
    return None if node.gangs and node.gangs[0].run.spec.is_apart else _possible_world_of(node)


def _possible_world_of(node: QueuedNode[GangRun]) -> WorldKey | None:
    """Return the world where a node's function runs if it needs one, or was compiled when there was one."""
    if not node.gangs or not node.gangs[0].run.spec.collective:
        return None
    islands = node.islands
    return (node.tenant.name, tuple(sorted(islands))) if len(islands) > 1 else None


class Worlds:
    """The worlds of all tenants."""

    def __init__(self, shared: SharedState, launches: Launches) -> None:
        self._in_flight = launches.in_flight
        self._resources = shared.resources
        self._outbox = shared.outbox
        self._worlds: dict[WorldKey, World] = {}  # the least recently used first
        # Nodes in flight that have left their worlds, by number, with the reason if their world was replaced.
        self._left: dict[int, Status | None] = {}
        self._next = 1

    def check(self, tenant: str, islands: tuple[int, ...]) -> None:
        """Raise RESOURCE_EXHAUSTED if the tenant's functions use too many worlds for one more on these islands."""
        used = sum(bool(each.functions) for each in self._worlds.values() if each.tenant == tenant)
        if used >= MAX_WORLDS and (tenant, islands) not in self._worlds:
            text = f"compiled functions of this tenant run on {MAX_WORLDS} different sets of islands already"
            raise StatusError(Code.RESOURCE_EXHAUSTED, f"{text}: release some of them, or use fewer meshes")

    def has(self, tenant: str, islands: tuple[int, ...]) -> bool:
        """Return whether the tenant has a world of these islands."""
        return (tenant, islands) in self._worlds

    def use(self, tenant: str, islands: tuple[int, ...], function: str) -> World:
        """Return the world in which a function of the tenant runs on these islands, and start it if necessary."""
        key = tenant, islands
        world = self._worlds.pop(key, None)
        if world is None:
            self._close_idle(tenant)
            world = self._new(tenant, islands)
        self._worlds[key] = world
        world.functions.add(function)
        self._start(world)
        return world

    def released(self, function: str) -> None:
        """Note that no session has the function any more."""
        for world in self._worlds.values():
            world.functions.discard(function)

    def served(self, host: int, message: m.WorldServed) -> None:
        """Have the other hosts of a world join the service of its first host."""
        for world in self._worlds.values():
            if (world.number, world.hosts[0]) == (message.world, host) and world.state is WorldState.STARTING:
                world.enter(WorldState.JOINING)
                for rank, each in enumerate(world.hosts[1:], 1):
                    self._outbox.to_host(each, self._join(world, rank, message.address))

    def failed(self, host: int, message: m.WorldFailed) -> set[str]:
        """Close a world that one of its hosts cannot join. Return the functions that its hosts have lost.

        The next function on these islands gets a new world. Runs that wait for functions of this world fail.
        """
        key = next((key for key, each in self._worlds.items() if each.number == message.world), None)
        if key is None or host not in self._worlds[key].hosts:
            return set()
        world, nodes = self._worlds[key], {}
        for gang in self._in_flight.values():
            nodes[gang.node.number] = gang.node
            if world_of(gang.node) == key:
                gang.run.failure = gang.run.failure or message.status.within(gang.run.launch.program.name)
        self._close(world, message.status, self._leave(key, nodes))
        return world.functions

    def start_waiting(self, works: IslandReady | IslandRestarted) -> None:
        """Start the worlds that waited for an island that works now."""
        for world in self._worlds.values():
            if works.island in world.islands:
                self._start(world)

    def close_worlds_of(self, ended: IslandFailed | IslandRemoved | IslandDrained) -> None:
        """Close the worlds of an island whose workers end, and note that runs in flight have left these worlds."""
        closed = {key: each for key, each in self._worlds.items() if ended.island in each.islands}
        nodes = {gang.node.number: gang.node for gang in self._in_flight.values()}
        for key, world in closed.items():
            self._close(world, ended.status, self._leave(key, nodes))

    def has_left(self, node: QueuedNode[GangRun]) -> bool:
        """Return whether the world in which a run in flight began was closed, even if a new world has replaced it."""
        return node.number in self._left

    def cause_of(self, node: QueuedNode[GangRun]) -> Status | None:
        """Return why the world of a node in flight was replaced, or None. The errors of its hosts follow from it."""
        return self._left.get(node.number)

    def replace(self, node: QueuedNode[GangRun], status: Status, others: Iterable[QueuedNode[GangRun]] = ()) -> bool:
        """Close the world of a run whose hosts wait for each other, and have its functions continue in a new one.

        The runs of this world among the `others` end as well. If a host has ended one of these runs, it may have begun
        any other run in flight, and other hosts may not, so all runs of this world end. The client may have released
        the run's function. Return False if the run has no world, or has left it.
        """
        key = world_of(node)
        if key is None or key not in self._worlds or self.has_left(node):
            return False
        world = self._worlds[key]
        in_flight = {gang.node.number: gang.node for gang in self._in_flight.values()}
        left = {each.number: status for each in (node, *others) if world_of(each) == key}
        if any(_has_ended_on_a_host(in_flight[each]) for each in left if each in in_flight):
            status = ended_with_others(status)
            left = {each.number: status for each in in_flight.values() if world_of(each) == key} | left
        self._note_left(left, in_flight)
        new = self._new(world.tenant, world.islands)
        new.functions |= world.functions
        self._close(world, status, left, new.number)
        self._worlds[key] = new
        self._start(new)
        return True

    def _leave(self, key: WorldKey, in_flight: Mapping[int, QueuedNode[GangRun]]) -> Container[int]:
        """Note that the nodes in flight of a world have left it. Return their numbers."""
        left = dict.fromkeys(number for number, node in in_flight.items() if world_of(node) == key)
        self._note_left(left, in_flight)
        return left

    def _note_left(self, left: Mapping[int, Status | None], in_flight: Container[int]) -> None:
        """Add nodes that have left their worlds, and forget those that are not in flight any more."""
        known = {number: why for number, why in self._left.items() if number in in_flight}
        self._left = known | {number: why or known.get(number) for number, why in left.items()}

    def _new(self, tenant: str, islands: tuple[int, ...]) -> World:
        hosts = tuple(host for island in islands for host in self._resources.topology.hosts_of(island))
        self._next += 1
        return World(self._next - 1, tenant, islands, hosts)

    def _start(self, world: World) -> None:
        islands = self._resources.islands
        if world.state is WorldState.WAITING and all(islands[each].works for each in world.islands):
            world.enter(WorldState.STARTING)
            self._outbox.to_host(world.hosts[0], self._join(world, 0, ""))

    def _join(self, world: World, rank: int, address: str) -> m.JoinWorld:
        return m.JoinWorld(world.number, rank, len(world.hosts), address, world.islands)

    def _close(self, world: World, status: Status, left: Container[int], successor: int = 0) -> None:
        """Have the hosts close a world. The nodes that have `left` it may not have begun on all hosts."""
        del self._worlds[world.tenant, world.islands]
        ended: dict[int, list[int]] = {}
        for gang in self._in_flight.values():
            if gang.node.number in left:
                for host in gang.run.hosts_left.union(gang.run.left_out):
                    ended.setdefault(host, []).append(gang.sequence)
        for host in world.hosts:
            self._outbox.to_host(host, m.CloseWorld(world.number, status, successor, tuple(ended.get(host, ()))))

    def _close_idle(self, tenant: str) -> None:
        """Close worlds of the tenant that no function uses, except those that were used last."""
        idle = [each for each in self._worlds.values() if each.tenant == tenant and not each.functions]
        if len(idle) <= IDLE_WORLDS:
            return
        # Runs of functions that were released also need their world.
        used = {_possible_world_of(gang.node) for gang in self._in_flight.values()}
        idle = [each for each in idle if (each.tenant, each.islands) not in used]
        for each in idle[: max(0, len(idle) - IDLE_WORLDS)]:
            self._close(each, Status(Code.CANCELLED, "no function used this world"), ())


def _has_ended_on_a_host(node: QueuedNode[GangRun]) -> bool:
    """Return whether a host has ended its part of a node without a failure."""
    runs = [gang.run for gang in node.gangs]
    return any(not run.hosts_left.union(run.left_out).issuperset(run.spec.hosts) for run in runs)
