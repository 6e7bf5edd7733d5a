"""Gangs without a session or a program, for tests of modules that look at gangs one by one."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

from atoll.state.gang_specs import GangSpec
from atoll.state.gang_states import GangState
from atoll.state.queued_nodes import Gang, HostCallKind, QueuedNode
from atoll.state.session import GangRun, Launch
from atoll.state.usage import Account


def spec(
    devices: Mapping[int, tuple[int, ...]],
    *,
    island: int = 0,
    host_call: HostCallKind | None = None,
    collective: bool = False,
    is_apart: bool = False,
) -> GangSpec:
    """Return the specification of a call on these devices, by host."""
    return GangSpec(
        island,
        tuple(devices),
        "call",
        ("f",),
        *((),) * 7,
        collective,
        devices,
        host_call=host_call,
        is_apart=is_apart,
    )


def launch_stand_in(session: int = 1) -> Launch:
    """Return a launch with only a session, and with a program that has only an account."""
    return cast(Launch, SimpleNamespace(session=session, error=None, program=SimpleNamespace(account=Account())))


def node_of(number: int, *specs: GangSpec, state: GangState = GangState.RUNNING) -> QueuedNode[GangRun]:
    """Return a node with a gang for each specification, all in this state."""
    node: QueuedNode[GangRun] = QueuedNode(number, 1)
    launch = launch_stand_in()
    gangs = [
        Gang(number + i, each.island, node, GangRun(launch, each, set(each.hosts)), hosts=each.hosts)
        for i, each in enumerate(specs)
    ]
    for gang in gangs:
        gang.state = state
    node.gangs = tuple(gangs)
    return node


def gang_of(number: int, made: GangSpec, **options: Any) -> Gang[GangRun]:
    """Return the only gang of a node."""
    (gang,) = node_of(number, made, **options).gangs
    return gang
