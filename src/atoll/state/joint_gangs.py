"""Joint gangs: one gang for a node on many islands, in place of one gang for each of them.

A trainer that uses hundreds of islands calls functions over all of them, and the gangs of such a node on its islands
are alike: they run the same function, with as many devices each. Numbering, sending, counting and charging hundreds of
gangs takes the controller much longer than doing it once for a gang of hundreds of hosts. So such a node has one joint
gang, which starts on all of its islands at once. It is still in the order of each island.

A function that communicates between islands has a joint gang also on few islands. Otherwise, its launch could fail, or
its session end, when only some of them have begun it, and these would wait for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atoll.cluster.locations import MemoryRequirement
from atoll.ir.steps import Steps
from atoll.state.dispatch_units import Unit
from atoll.state.gang_specs import GangSpec, MadeValue

# Gangs that are joined in one step.
_GANGS_PER_STEP = 64


def joint_nodes(
    nodes: Sequence[Unit],
    least: int,
    shared: Callable[[MemoryRequirement], MemoryRequirement],
) -> Steps[tuple[Unit, ...]]:
    """Return the nodes, with a joint gang for each node whose gangs are alike and on several or many islands.

    Args:
      nodes: the gangs of each node, one per island.
      least: number of islands from which a node has a joint gang; if its islands communicate, 2 are enough.
      shared: returns one object for equal requirements.
    """
    found: list[Unit] = []
    for node in nodes:
        are_together = node[0].collective and not node[0].is_apart
        if len(node) >= (2 if are_together else least) and (yield from _are_alike(node)):
            found.append(((yield from _joint(node, shared)),))
        else:
            found.append(node)
        yield
    return tuple(found)


def _are_alike(node: Unit) -> Steps[bool]:
    first = node[0]
    if first.kind != "call" or not first.functions:
        return False
    key = _key(first)
    for i, gang in enumerate(node):
        if gang.awaited or gang.incoming or gang.host_call or _key(gang) != key:
            return False
        if i % _GANGS_PER_STEP == 0:
            yield
    return True


def _key(gang: GangSpec) -> object:
    """Return what is equal for gangs that do the same on different islands."""
    makes = [(each.value, each.views, bool(each.requirement)) for each in gang.makes]
    own = (gang.kind, gang.functions, gang.handles, gang.consumes, gang.drops)
    return own, makes, gang.collective, gang.is_apart, gang.segments, gang.device_count, gang.moved


def _joint(node: Unit, shared: Callable[[MemoryRequirement], MemoryRequirement]) -> Steps[GangSpec]:
    first = node[0]
    hosts: list[int] = []
    scratch: list[tuple[tuple[int, int], int]] = []
    makes: list[list[tuple[tuple[int, int], int]]] = [[] for _ in first.makes]
    devices: dict[int, tuple[int, ...]] = {}
    for i, gang in enumerate(node):
        hosts += gang.hosts
        scratch += gang.scratch
        devices.update(gang.devices)
        for made, each in zip(makes, gang.makes, strict=True):
            made += each.requirement
        if i % _GANGS_PER_STEP == 0:
            yield
    made_values = []
    for made, each in zip(makes, first.makes, strict=True):
        made_values.append(MadeValue(each.value, shared(tuple(made)), each.views))
        yield
    return GangSpec(
        island=first.island,
        hosts=tuple(hosts),
        kind=first.kind,
        functions=first.functions,
        awaited=(),
        incoming=(),
        handles=first.handles,
        makes=tuple(made_values),
        consumes=first.consumes,
        drops=first.drops,
        scratch=shared(tuple(scratch)),
        collective=first.collective,
        devices=devices,
        duration_estimate=first.duration_estimate,
        segments=first.segments,
        moved=sum([gang.moved for gang in node]),
        title=first.title,
        is_apart=first.is_apart,
        islands=tuple([gang.island for gang in node]),
        places=tuple([gang.hosts for gang in node]),
        parts=node,
    )
