"""Tests of collectives that a host has failed in: it learns when the collective is over on all hosts."""

from __future__ import annotations

from typing import Any, cast

import pytest

from atoll.launch.left_out_collectives import LeftOutCollectives
from atoll.protocol import messages as m
from atoll.state.gang_states import GangState
from atoll.state.queued_nodes import Gang, QueuedNode
from atoll.state.session import GangRun
from tests.launch.gang_stand_ins import node_of, spec


class Rig:
    """Collectives in flight. `sent` has the hosts and the gangs of the messages."""

    def __init__(self, *nodes: QueuedNode[GangRun]) -> None:
        self.sent: list[tuple[int, int]] = []
        self.in_flight: dict[int, Gang[GangRun]] = {gang.sequence: gang for node in nodes for gang in node.gangs}
        self.left_out = LeftOutCollectives(self.in_flight, cast(Any, self))

    def to_host(self, host: int, message: m.CollectiveEnded) -> None:
        self.sent.append((host, message.sequence))


def collective(is_apart: bool = False) -> QueuedNode[GangRun]:
    """Return a collective on two islands of two hosts."""
    islands = [{2 * island: (0,), 2 * island + 1: (0,)} for island in range(2)]
    return node_of(10, *[spec(each, island=i, collective=True, is_apart=is_apart) for i, each in enumerate(islands)])


@pytest.mark.parametrize("is_apart", [False, True])
def test_a_host_that_failed_in_a_collective_learns_when_it_is_over_where_hosts_communicate(is_apart: bool) -> None:
    node = collective(is_apart)
    rig = Rig(node)
    first, second = node.gangs
    rig.left_out.add(first, 1)
    rig.left_out.validate()
    first.run.hosts_left.discard(1)
    rig.left_out.ended(node)
    assert rig.sent == [], "host 0 has not ended"
    first.run.hosts_left.clear()
    rig.left_out.ended(node)
    assert rig.sent == ([(1, 10)] if is_apart else [])
    second.state = GangState.DONE
    rig.left_out.ended(node)
    assert rig.sent == [(1, 10)], "once"
    rig.left_out.validate()


def test_collectives_in_which_no_host_failed_send_nothing() -> None:
    node = collective()
    rig = Rig(node)
    for gang in node.gangs:
        gang.run.hosts_left.clear()
    rig.left_out.ended(node)
    assert rig.sent == []


def test_after_a_load_the_collectives_are_found_among_the_gangs_in_flight() -> None:
    node = collective()
    Rig(node).left_out.add(node.gangs[0], 0)
    loaded = Rig(node)
    with pytest.raises(AssertionError, match="were noted"):
        loaded.left_out.validate()
    loaded.left_out.find()
    loaded.left_out.validate()
    for gang in node.gangs:
        gang.run.hosts_left.clear()
    loaded.left_out.ended(node)
    assert loaded.sent == [(0, 10)]
