"""A play of random clients on model hosts: the answers to them are true, and nothing is left."""

from __future__ import annotations

import random
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cluster.settings import Dispatch
from atoll.errors import Code
from tests.controller.world import World
from tests.thoroughness import examples


@settings(max_examples=examples(50))
@given(
    st.integers(0, 2**32),
    st.integers(1, 120),
    st.sampled_from(["1x1x2", "2x1x2", "1x2x2", "2x2x1", "3x1x1", "1x4x1", "2x3x1"]),
    st.sampled_from([0.0, 0.15]),
    st.sampled_from([0, 0, 60, 200]),
    st.sampled_from(list(Dispatch)),
    st.sampled_from([0.0, 0.02]),
    st.sampled_from([0, 2, 3]),
)
def test_whatever_clients_do_all_ends_in_order_exactly_once_and_leaves_nothing(
    seed, steps, topology, doom, memory, dispatch, loss, relays
):
    world = World(random.Random(seed), topology, doom, device_memory=memory, dispatch=dispatch, relay_group=relays)
    rng = world.rng
    for _ in range(rng.randint(1, 3)):
        world.open()
    for _ in range(steps):
        if world.clients and rng.random() < 0.75:
            rng.choice(list(world.clients.values())).act()
            world.deliver()
        elif rng.random() < 0.05 and len(world.clients) > 1:
            world.close(rng.choice(list(world.clients.values())))
        elif rng.random() < loss:
            islands = sorted(set(world.controller.resources.islands) - world.down)
            if islands:
                world.lose(rng.choice(islands))
        elif world.down and rng.random() < 0.2:
            world.restore(min(world.down))
        else:
            world.work()
    world.settle()

    for client in world.clients.values():
        for handle in sorted(client.unreleased):
            client.wait(handle)
        world.deliver()
        assert client.retired == client.launched, "each launch ends once"
        assert set(client.outcomes) == set(client.waits), "each wait ends"
        for wait, handle in client.waits.items():
            status = client.outcomes[wait]
            taint, maybe = client.taint[handle], client.maybe[handle]
            if status.message in world.exhausted:
                assert status.code == Code.RESOURCE_EXHAUSTED
                continue
            if world.has_lost and status.code in (Code.DATA_LOSS, Code.DEADLINE_EXCEEDED):
                continue
            assert not (status.ok and taint), f"{handle} is there although it depends on {taint}"
            assert status.ok or status.message in taint | maybe, f"{status} is none of {taint | maybe}"
        for handle in sorted(client.unreleased):
            client.release(handle)
        world.deliver()
        session = world.controller.sessions[client.number]
        assert (session.directory.entries, session.directory.nbytes) == ({}, 0)
        assert session.in_flight == 0
        assert session.feeds.awaited == {}
        for host in world.hosts.values():
            assert host.stores[client.number] == {}, "all memory goes"
    assert not any(world.controller.memory.used.values()), "and so does what is reserved"
    if memory:
        assert max(world.controller.memory.peak.values()) <= memory
    for host in world.hosts.values():
        assert all(count == 1 for count in host.freed.values()), "nothing is freed twice"
        last: dict[int, int] = defaultdict(int)
        for session_number, sequence in host.sequences:
            assert sequence > last[session_number], "a session's gangs keep their order"
            last[session_number] = sequence
    for island in world.controller.resources.islands:
        statistics = world.controller.scheduler.statistics(island)
        assert (statistics.waiting, statistics.in_flight) == (0, 0)

    for client in list(world.clients.values()):
        world.close(client)
    for host in world.hosts.values():
        assert (host.plans, host.stores) == ({}, {})
        assert not any(host.lines.values())
        assert host.runs == {}
    assert world.controller.functions.users == {}
    assert world.controller.launcher.in_flight == {}
