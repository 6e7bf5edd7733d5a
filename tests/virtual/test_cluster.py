"""Tests of virtual time and `atoll.testing`: the real controller and hosts, with times that are the same in
every run.
"""

from __future__ import annotations

import doctest
import gc
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest

import atoll.testing
from atoll.devices.null.model import MODELS
from atoll.devices.null.null_program import NullProgram
from atoll.errors import ClusterError, StatusError
from atoll.ir.program import Node, Route, Switch, Unroute
from atoll.ir.types import ArraySpec, Sharding, Tiled
from atoll.protocol import messages as m
from atoll.session.bare import BareClient, call, program, sharded, transfer
from atoll.state.queued_nodes import QueuedNode
from atoll.state.session import Launch
from atoll.virtual.cluster import VirtualCluster
from atoll.virtual.simulated_costs import Costs
from atoll.virtual.virtual_time import Future, VirtualClock

SCALAR = ("uint8", (4,))
# The controller's time for 50 launches at once before it sends the first one, and the latencies of messages.
BEGINNING = 2e-3


class Chain:
    """A client whose computations on some devices each take the result of the one before."""

    def __init__(self, cluster: VirtualCluster, client: BareClient, devices: Sequence[int], seconds: float) -> None:
        self.cluster = cluster
        self.client = client
        spec = sharded(devices)

        def registered(name: str, seconds: float, takes: int) -> int:
            null = NullProgram(name, seconds, (SCALAR,) * takes, (SCALAR,))
            function = cluster.run(client.compile(null, devices))
            node = call(function, range(takes), (spec,), devices)
            return client.register(program(name, (spec,) * takes, [node], (takes,)))

        self.first, self.next = registered("first", 0.0, 0), registered("next", seconds, 1)

    async def run(self, count: int) -> list[float]:
        """So many; when each was seen to be ready."""
        (x,) = await self.client.launch(self.first, (), 1)
        ready, handles = [], []
        for _ in range(count):
            (x,) = await self.client.launch(self.next, (x,), 1)
            handles.append(x)
        for handle in handles:
            await self.client.wait((handle,))
            ready.append(self.cluster.now())
        return ready


def test_events_happen_by_their_times_and_then_as_they_were_added():
    clock, seen = VirtualClock(), list[str]()
    clock.call_at(2.0, lambda: seen.append("last"))
    clock.call_at(1.0, lambda: seen.append("first"))
    clock.call_at(1.0, lambda: clock.call_at(0.0, lambda: seen.append("a time that has passed is now")))
    clock.call_at(1.0, lambda: seen.append("second"))
    clock.run_until(lambda: len(seen) == 4, 10.0)
    assert seen == ["first", "second", "a time that has passed is now", "last"]
    assert clock.now() == 2.0


def test_what_depends_on_data_is_refused_where_arrays_have_no_contents():
    cluster = VirtualCluster("1x1x1")
    client = cluster.client()
    number = ArraySpec("int32", (), Sharding((0,)))
    branch = program("branch", (number,), [], (0,))

    async def choose() -> None:
        client.register(program("p", (number,), [Switch((0, 0), (number,), (branch,))], (1,)))
        await Future[None]()

    with pytest.raises(StatusError, match="cannot run in virtual time"):
        cluster.run(choose())


def test_what_never_happens_is_an_error_and_no_endless_run():
    cluster = VirtualCluster("1x1x1")

    async def wait_in_vain() -> None:
        await Future[None]()

    with pytest.raises(ClusterError, match="did not happen"):
        cluster.run(wait_in_vain(), patience=5.0)
    assert cluster.now() <= 5.0


@pytest.mark.parametrize("islands", ["1x1x1", "1x4x2"])
def test_a_chain_takes_what_its_computations_take(islands: str):
    cluster = VirtualCluster(islands)
    client = cluster.client()
    chain = Chain(cluster, client, client.devices, seconds=0.01)
    before = cluster.now()
    ready = cluster.run(chain.run(50))
    assert 0.5 <= ready[-1] - before <= 0.5 + BEGINNING


def test_a_chain_of_short_computations_takes_what_the_busiest_process_takes():
    costs = Costs(latency=0.0, controller_gang=0.0, controller_gang_host=2e-4, host_gang=1e-5, message=0.0)
    cluster = VirtualCluster("1x4x1", costs=costs)
    client = cluster.client()
    chain = Chain(cluster, client, client.devices, seconds=1e-6)
    before = cluster.now()
    ready = cluster.run(chain.run(100))
    assert ready[-1] - before == pytest.approx(101 * 4 * 2e-4, rel=0.02)
    assert cluster.process.busy_seconds == pytest.approx(101 * 4 * 2e-4, rel=0.02)


def test_what_launches_leave_behind_goes_without_the_garbage_collector():
    cluster = VirtualCluster("1x1x4")
    client = cluster.client()
    chain = Chain(cluster, client, client.devices, seconds=1e-5)
    cluster.run(chain.run(10))
    gc.collect()
    gc.disable()
    try:
        cluster.run(chain.run(100))
        assert [each for each in gc.get_objects() if isinstance(each, Launch | QueuedNode)] == []
    finally:
        gc.enable()


def test_the_same_run_twice_gives_the_same_times():
    def times() -> list[float]:
        cluster = VirtualCluster("2x2x2")
        clients = [cluster.client(str(i)) for i in range(3)]
        chains = [Chain(cluster, client, client.islands[i % 2], 3e-4 * (1 + i)) for i, client in enumerate(clients)]
        ready = cluster.run_all([chain.run(40) for chain in chains])
        return [at for each in ready for at in each]

    assert times() == times()


def test_clients_share_an_island_fairly():
    cluster = VirtualCluster("1x2x2")
    clients = [cluster.client(str(i)) for i in range(2)]
    chains = [Chain(cluster, client, client.devices, seconds=2e-3) for client in clients]
    for chain in chains:
        cluster.run(chain.run(20))  # the scheduler learns how long they take
    before = cluster.now()
    ours, theirs = cluster.run_all([chain.run(100) for chain in chains])
    assert ours[-1] - before == pytest.approx(0.4, rel=0.05)
    assert theirs[-1] - before == pytest.approx(0.4, rel=0.05)
    halfway = [sum(at - before < 0.2 for at in each) for each in (ours, theirs)]
    assert abs(halfway[0] - halfway[1]) <= 8  # two windows of 8 ms


def test_a_pipeline_takes_a_stage_for_each_micro_batch_and_as_many_as_it_is_long():
    stages, micro_batches, seconds = 4, 16, 0.05
    cluster = VirtualCluster(f"{stages}x1x2")
    client = cluster.client()
    specs = [sharded(devices, nbytes=1 << 20) for devices in client.islands]
    part = ("uint8", (1 << 20,))
    functions = [
        cluster.run(client.compile(NullProgram(f"stage {i}", seconds, (part,) * (i > 0), (part,)), devices))
        for i, devices in enumerate(client.islands)
    ]
    nodes: list[Node] = []
    value = [-1] * micro_batches  # the position of each client

    def add(micro_batch: int, node: Node) -> None:
        value[micro_batch] = len(nodes)
        nodes.append(node)

    for wave in range(stages + micro_batches - 1):
        busy = [(stage, wave - stage) for stage in range(stages) if 0 <= wave - stage < micro_batches]
        for stage, micro_batch in busy:
            inputs = (value[micro_batch],) if stage else ()
            add(micro_batch, call(functions[stage], inputs, (specs[stage],), client.islands[stage]))
        for stage, micro_batch in busy:
            if stage + 1 < stages:
                add(micro_batch, transfer(value[micro_batch], specs[stage + 1]))
    number = client.register(program("pipeline", (), nodes, value))

    async def run() -> float:
        before = cluster.now()
        await client.wait(await client.launch(number, (), micro_batches))
        return cluster.now() - before

    ideal = (micro_batches + stages - 1) * seconds
    assert ideal <= cluster.run(run()) <= 1.02 * ideal


@pytest.mark.parametrize(
    ("costs", "seconds"),
    [
        (Costs(), 0.1),
        (Costs(data_bandwidth=5e8), 0.2),
        (Costs(data_bandwidth=1e12), 0.1),  # the network is what is slow
        (Costs(staging_bandwidth=2e9), 0.2),  # copied twice, before it is sent and after
    ],
)
def test_between_islands_a_transfer_takes_what_the_data_path_takes(costs: Costs, seconds: float):
    model = msgspec.structs.replace(MODELS["tpu-v3"], dcn_bandwidth=1e9)
    cluster = VirtualCluster("2x1x1", model, costs)
    client = cluster.client()
    here, there = (sharded(devices, nbytes=100_000_000) for devices in client.islands)
    null = NullProgram("make", 0.0, (), (("uint8", (100_000_000,)),))
    make = cluster.run(client.compile(null, client.islands[0]))
    number = client.register(
        program("send", (), [call(make, (), (here,), client.islands[0]), transfer(0, there)], (1,))
    )

    async def run() -> float:
        before = cluster.now()
        return await client.when_ready(await client.launch(number, (), 1)) - before

    assert cluster.run(run()) == pytest.approx(seconds, rel=0.02)


def test_a_policy_of_ones_own_decides_who_goes_first():
    """The example of `atoll.testing`, which has one."""
    found = doctest.testmod(atoll.testing)
    assert found.attempted >= 5
    assert not found.failed


def test_a_failure_reaches_the_client():
    cluster = VirtualCluster("2x1x1")
    client = cluster.client()
    with pytest.raises(StatusError, match="does not exist"):
        cluster.run(client.compile(NullProgram("elsewhere", 1.0, (), (SCALAR,)), (*client.devices, 9)))


def test_a_function_runs_on_two_islands_at_the_same_time():
    cluster = VirtualCluster("2x1x1")
    client = cluster.client()

    ready = cluster.run(Chain(cluster, client, client.devices, 1.0).run(2))
    assert [later - earlier for earlier, later in pairwise(ready)] == [pytest.approx(1.0, rel=0.02)]


def longest_wait(neighbours: int, lie: bool) -> tuple[float, list[str]]:
    """Of a client that has one computation of 1 ms after another, beside some that launch as many as they can.

    And why sessions of the neighbours were ended.
    """
    cluster, ends, waits = VirtualCluster("1x1x1"), list[str](), list[float]()
    chain = Chain(cluster, (honest := cluster.client("honest")), honest.devices, 1e-3)

    async def work() -> None:
        for _ in range(100):
            before = cluster.now()
            await chain.run(1)
            waits.append(cluster.now() - before)

    async def launch_all(other: Chain) -> None:
        client, session = other.client, other.client._session
        session.set_handlers(lambda status: ends.append(status.message))
        (x,) = await client.launch(other.first, (), 1)
        if lie:
            for _ in range(8 * session.window.size):
                session.send(m.Launch(other.next, (x,), (session.mint(),), (), 0, 1))
        else:
            while len(waits) < 100:
                client.release(await client.launch(other.next, (x,), 1))

    others = [Chain(cluster, cluster.client("neighbour"), honest.devices, 1e-3) for _ in range(neighbours)]
    cluster.run_all([work(), *map(launch_all, others)])
    return max(waits), ends


def test_who_lies_about_its_window_loses_its_session_and_nobody_waits_longer_than_for_two_who_do_not():
    beside_two, nothing = longest_wait(2, lie=False)
    beside_liar, (why,) = longest_wait(1, lie=True)
    assert nothing == []
    assert "launches in flight, and launches more" in why
    assert beside_liar <= beside_two


def test_on_null_devices_no_row_is_routed_and_that_takes_no_longer_than_to_say_so():
    cluster = VirtualCluster("2x2x1")
    client = cluster.client()
    here, there = client.devices[:2], client.devices[2:]
    halves = Tiled((2, 1), (0, 1))
    rows = ArraySpec("float32", (2 << 20, 4), Sharding(tuple(here), halves))
    sizes = ArraySpec("int32", (2, 1), Sharding(tuple(here), halves))
    block = ArraySpec("float32", (2 << 20, 4), Sharding(tuple(there), halves))
    spans = ArraySpec("int32", (2, 2), Sharding(tuple(there)))
    null = NullProgram("make", 0.01, (), (("float32", (1 << 20, 4)), ("int32", (1, 1))))
    make = call(cluster.run(client.compile(null, here)), (), (rows, sizes), here)
    nodes = [make, Route((0, 1), (block, spans), 2), Unroute((2, 3), (rows,), 2)]
    number = client.register(program("route", (), nodes, (2, 4)))

    async def run() -> float:
        return await client.when_ready(await client.launch(number, (), 2))

    assert 0.01 < cluster.run(run()) < 0.012
