"""Run random clients on clusters whose operators drain islands and move and suspend sessions, while islands fail and a
standby takes over, also with programs and launches that are all handled in steps.
"""

from __future__ import annotations

import random
from contextlib import nullcontext

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.controller.migrating_world import check_that_nothing_was_noticed
from tests.controller.operated_world import OperatedWorld
from tests.controller.test_stepped_worlds import all_in_steps
from tests.thoroughness import examples


def play(world: OperatedWorld, steps: int, acts: float) -> None:
    """Let clients, hosts and the operator act. `acts` is the probability that a step is one of the operator."""
    rng = world.rng
    for _ in range(rng.randint(1, 3)):
        world.open()
    for _ in range(steps):
        if rng.random() < acts:
            world.act()
        elif rng.random() < 0.02:
            world.lose_one()
        elif rng.random() < 0.1 and world.down - world.removed:
            world.restore(min(world.down - world.removed))
        elif rng.random() < 0.7:
            rng.choice(list(world.clients.values())).act()
            world.deliver()
        elif rng.random() < 0.03 and len(world.clients) > 1:
            world.close(rng.choice(list(world.clients.values())))
        elif rng.random() < 0.02:
            world.open()
        elif rng.random() < 0.05:
            world.pass_time()
        else:
            world.work()
    world.settle()


@settings(max_examples=examples(30, part=5))
@given(
    st.integers(0, 2**32),
    st.integers(20, 200),
    st.sampled_from(["2x1x2", "1x2x2", "2x2x1", "3x1x1", "3x1x2"]),
    st.sampled_from([0.0, 0.15]),
    st.sampled_from([0, 0, 100]),
    st.sampled_from([0, 1000]),
    st.sampled_from([0, 2]),
    st.sampled_from([0.05, 0.15, 0.3]),
    st.booleans(),
)
def test_operators_and_standbys_change_nothing_for_clients(
    seed, steps, topology, doom, memory, spill, relays, acts, in_steps
):
    with all_in_steps() if in_steps else nullcontext():
        world = OperatedWorld(
            random.Random(seed), topology, doom, device_memory=memory, spill=spill, relay_group=relays
        )
        play(world, steps, acts)
        check_that_nothing_was_noticed(world)
