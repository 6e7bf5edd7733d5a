"""Run random clients whose slices migrate, which the clients must not notice."""

from __future__ import annotations

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.errors import Code
from tests.controller.migrating_world import MigratingWorld
from tests.thoroughness import examples


# After an island fails, a session's arrays are restored on another island.
@example(132, 89, "3x1x1", 0.0, 0, 0)
@settings(max_examples=examples(50, part=5))
@given(
    st.integers(0, 2**32),
    st.integers(20, 200),
    st.sampled_from(["2x1x2", "1x2x2", "2x2x1", "3x1x1", "1x1x3"]),
    st.sampled_from([0.0, 0.15]),
    st.sampled_from([0, 0, 100]),
    st.sampled_from([0, 1000]),
)
def test_clients_whose_slices_migrate_notice_nothing(seed, steps, topology, doom, memory, spill):
    world = MigratingWorld(random.Random(seed), topology, doom, device_memory=memory, spill=spill)
    rng = world.rng
    for _ in range(rng.randint(1, 3)):
        world.open()
    for _ in range(steps):
        if rng.random() < 0.1:
            rng.choice([world.move, world.suspend])()
        elif rng.random() < 0.01 and not world.down:
            world.lose(rng.choice(list(world.controller.resources.islands)))
        elif rng.random() < 0.05 and world.down:
            world.restore(min(world.down))
        elif rng.random() < 0.7:
            rng.choice(list(world.clients.values())).act()
            world.deliver()
        elif rng.random() < 0.01 and len(world.clients) > 1:
            world.close(rng.choice(list(world.clients.values())))
        else:
            world.work()
    world.settle()

    assert len(world.replies) == world.asked, "each operator is answered once"
    for client in world.clients.values():
        assert not client.held
        for handle in sorted(client.unreleased):
            client.wait(handle)
        world.deliver()
        session = world.controller.sessions[client.number]
        assert client.retired == client.launched, "each launch ends once"
        assert set(client.outcomes) == set(client.waits), "each wait ends"
        for wait, handle in client.waits.items():
            status, taint, maybe = client.outcomes[wait], client.taint[handle], client.maybe[handle]
            is_lost = world.has_lost and status.code in (Code.DATA_LOSS, Code.DEADLINE_EXCEEDED)
            if not is_lost and status.message not in world.exhausted:
                assert not (status.ok and taint), f"{handle} is there although it depends on {taint}"
                # An array that could not be made is on no device, so that its devices may be mapped to the same
                # physical device.
                refused = bool(taint) and "share a physical one" in status.message
                assert status.ok or refused or status.message in taint | maybe, (
                    f"{status} is not one of {taint | maybe}"
                )
        for handle, spec in client.arrays.items():
            entry = session.directory.entries[handle]
            if entry.error is not None or entry.spilled is not None:
                continue
            hosts = {client.locations[device].host for device in spec.sharding.devices}
            holding = {host.number for host in world.hosts.values() if handle in host.stores[client.number]}
            assert holding == hosts, "each array is only on the hosts of its virtual devices"
        assert all(number > 0 for number in session.programs), "the controller has dropped its internal programs"
        for handle in sorted(client.unreleased):
            client.release(handle)
        world.deliver()
        assert (session.directory.entries, session.directory.nbytes) == ({}, 0)
        for host in world.hosts.values():
            assert host.stores[client.number] == {}, "all memory is released"
            assert not host.spilled.get(client.number), "no array is still spilled"
    assert not any(world.controller.ledger.used.values())

    for client in list(world.clients.values()):
        world.close(client)
    for host in world.hosts.values():
        assert (host.plans, host.stores, host.runs, host.spilled) == ({}, {}, {}, {})
        assert not any(host.lines.values())
    assert world.controller.functions.users == {}
    assert world.controller.slices.sessions == {}
