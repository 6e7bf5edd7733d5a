"""Delegated runs in virtual time: how few messages they need, and that others notice nothing of them."""

from __future__ import annotations

import pytest

from atoll.devices.null.null_program import NullProgram
from atoll.protocol import messages as m
from atoll.session.bare import BareClient, call, program, sharded, transfer
from atoll.virtual.cluster import VirtualCluster
from atoll.virtual.virtual_time import Future
from tests.virtual.test_cluster import Chain

VECTOR = ("uint8", (4,))
SECONDS = 0.005  # of each computation
ROUNDS = 20


class ToAndFro:
    """A client whose program computes on island 0, then on island 1, and so on, from the result of the last launch."""

    def __init__(self, cluster: VirtualCluster, client: BareClient) -> None:
        self.cluster, self.client = cluster, client
        specs = [sharded((device,)) for device in client.devices[:2]]
        compiled = [
            cluster.run(client.compile(NullProgram("f", SECONDS, (VECTOR,), (VECTOR,)), (device,)))
            for device in client.devices[:2]
        ]
        nodes = []
        for value in range(0, 4 * ROUNDS, 2):
            here = value // 2 % 2
            nodes += [
                call(compiled[here], (value,), (specs[here],), (client.devices[here],)),
                transfer(value + 1, specs[1 - here]),
            ]
        made = NullProgram("made", 0.0, (), (VECTOR,))
        first = cluster.run(client.compile(made, client.devices[:1]))
        self.made = client.register(program("made", (), [call(first, (), specs[:1], client.devices[:1])], (0,)))
        self.step = client.register(program("step", specs[:1], nodes, (4 * ROUNDS,)))

    async def run(self, count: int) -> None:
        (x,) = await self.client.launch(self.made, (), 1)
        for _ in range(count):
            (y,) = await self.client.launch(self.step, (x,), 1)
            self.client.release((x,))
            x = y
        await self.client.wait((x,))
        self.client.release((x,))


def counted(cluster: VirtualCluster) -> list[type]:
    """The types of what hosts are sent from now on."""
    sent: list[type] = []
    deliver = cluster.process._deliver

    def delivered(connection: int, message: object) -> None:
        sent.append(type(message))
        deliver(connection, message)

    cluster.process._deliver = delivered  # type: ignore[method-assign]
    return sent


def test_a_launch_costs_a_message_for_each_host():
    cluster = VirtualCluster("2x1x1")
    client = ToAndFro(cluster, cluster.client())
    cluster.run(client.run(2))
    sent = counted(cluster)
    cluster.run(client.run(5))
    assert sent.count(m.Run) == 1 + 2 * 5
    assert sent.count(m.Dispatch) == 0
    spans = cluster.controller.trace.spans()
    assert len(spans) == 2 + 7 * 6 * ROUNDS, "of every gang"
    assert sorted({round((each.ended - each.started) / 1e9, 3) for each in spans if each.kind == "call"}) == [
        0,
        SECONDS,
    ]


def test_it_takes_as_long_as_node_by_node():
    took = []
    for seconds in (1.0, None):
        cluster = VirtualCluster("2x1x1")
        cluster.controller.launches.delegated_runs._exclusive_after = seconds
        client = ToAndFro(cluster, cluster.client())
        cluster.run(client.run(3))
        began, sent = cluster.now(), counted(cluster)
        cluster.run(client.run(5))
        assert (m.Dispatch in sent) == (seconds is None)
        took.append(cluster.now() - began)
    assert took[0] == pytest.approx(took[1], rel=0.02)


def test_a_newcomer_beside_a_delegated_run_waits_no_longer_than_beside_others():
    cluster = VirtualCluster("2x1x1")
    long, short = ToAndFro(cluster, cluster.client()), Chain(cluster, cluster.client(), (0,), SECONDS)
    sent = counted(cluster)
    came: list[float] = []

    async def come() -> list[float]:
        soon: Future[None] = Future()
        cluster.clock.call_later(3.3 * SECONDS, lambda: soon.set_result(None))
        await soon
        assert sent.count(m.Run) > 1
        came.append(cluster.now())
        return await short.run(3)

    ready, _ = cluster.run_all([come(), long.run(4)])
    assert sent.count(m.RevokeRuns) == 2
    assert ready[0] - came[0] < 3.1 * SECONDS, "the rest of one, one more, and its own"
    assert cluster.controller.launches.in_flight == {}


def test_what_somebody_has_had_alone_is_not_held_against_it():
    """A delegated run of a second is revoked; from then on both have half of the island."""
    cluster = VirtualCluster("2x1x1")
    first, second = cluster.client(), cluster.client()
    spec = sharded((0,))
    compiled = cluster.run(first.compile(NullProgram("f", SECONDS, (VECTOR,), (VECTOR,)), (0,)))
    made = cluster.run(first.compile(NullProgram("made", 0.0, (), (VECTOR,)), (0,)))
    nodes = [call(compiled, (value,), (spec,), (0,)) for value in range(300)]
    step = first.register(program("step", (spec,), [*nodes, transfer(300, sharded((1,)))], (301,)))
    start = first.register(program("made", (), [call(made, (), (spec,), (0,))], (0,)))
    other = Chain(cluster, second, (0,), SECONDS)
    ended: list[float] = []

    async def alone() -> None:
        (x,) = await first.launch(start, (), 1)
        y = await first.launch(step, (x,), 1)
        await first.wait(y)
        ended.append(cluster.now())

    async def come() -> list[float]:
        soon: Future[None] = Future()
        cluster.clock.call_later(1.0, lambda: soon.set_result(None))
        await soon
        return await other.run(200)

    began = cluster.now()
    cluster.run_all([alone(), come()])
    # One second without others, and the other 100 computations in turn with as many of the other client.
    assert ended[0] - began == pytest.approx(1.0 + 200 * SECONDS, rel=0.05)
