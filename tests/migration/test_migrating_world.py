"""Run random clients whose slices migrate, which the clients must not notice."""

from __future__ import annotations

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.controller.migrating_world import MigratingWorld, check_that_nothing_was_noticed
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
    check_that_nothing_was_noticed(world)
