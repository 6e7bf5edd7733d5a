"""Run random clients, and check the outcomes."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection

from atoll.errors import Code
from tests.controller.world import Client, World


def play(world: World, rng: random.Random, steps: int, loss: float) -> None:
    """Let the clients and the world act for a number of steps, and then finish all work.

    In each step, an island fails with probability `loss`.
    """
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
        elif world.down - world.removed and rng.random() < 0.2:
            world.restore(min(world.down - world.removed))
        else:
            world.work()
    world.settle()


def check_outcomes(world: World, client: Client) -> None:
    """Check that each launch and each wait of the client has ended correctly, and that none of its state is left."""
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
        assert status.ok or status.message in taint | maybe, f"{status} is not one of {taint | maybe}"
    for handle in sorted(client.unreleased):
        client.release(handle)
    world.deliver()
    session = world.controller.sessions[client.number]
    assert (session.directory.entries, session.directory.nbytes) == ({}, 0)
    assert session.in_flight == 0
    assert session.feeds.awaited == {}
    for host in world.working_hosts():
        assert host.stores[client.number] == {}, "all memory is released"


def check_order(world: World, deferred: Collection[tuple[int, int]] = ()) -> None:
    """Check that the gangs of a session started in the order of its launches.

    `deferred` contains the results, as (session, handle), of launches that other launches of their session may
    overtake.
    """
    for host in world.hosts.values():
        last: dict[int, int] = defaultdict(int)
        for session, first_result in host.launches:
            if (session, first_result) not in deferred:
                assert first_result >= last[session], "a session's launches keep their order"
                last[session] = first_result
        if world.has_lost or deferred:  # launches that are sent again have other numbers
            continue
        last.clear()
        for session, sequence in host.sequences:
            assert sequence > last[session], "a session's gangs keep their order"
            last[session] = sequence


def check_nothing_is_left(world: World) -> None:
    assert not any(world.controller.ledger.used.values()), "all reservations are released"
    if world.memory:
        assert max(world.controller.ledger.peak.values()) <= world.memory
    for host in world.hosts.values():
        assert all(count == 1 for count in host.freed.values()), "nothing is freed twice"
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
    assert world.controller.launches.in_flight == {}
    assert world.controller.launches.control_flow_runs.statistics() == {"awaited": 0}
    assert world.controller.parts()["dependencies"].statistics() == {"unresolved": 0}
