"""Random clients whose functions run on any islands, and hosts that find out whether these need worlds."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cluster.settings import Dispatch
from atoll.launch.policies import POLICIES
from tests.controller.compiling_world import CompilingWorld
from tests.controller.outcome import check_nothing_is_left, check_order, check_outcomes, play
from tests.thoroughness import examples


@settings(max_examples=examples(50, part=5))
@given(
    st.integers(0, 2**32),
    st.integers(1, 120),
    st.sampled_from(["2x1x1", "2x1x2", "2x2x1", "3x1x1", "3x2x1", "4x1x1"]),
    st.sampled_from([0.0, 0.15]),
    st.sampled_from([0, 0, 60, 200]),
    st.sampled_from(list(Dispatch)),
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from([0.0, 0.02, 0.1]),
    st.sampled_from([0, 2]),
)
def test_functions_that_need_a_world_and_others_begin_in_one_order_and_all_end(
    seed, steps, topology, doom, memory, dispatch, policy, loss, joint
):
    options = {"device_memory": memory, "dispatch": dispatch, "policy": policy, "joint_islands": joint}
    world = CompilingWorld(random.Random(seed), topology, doom, **options)
    play(world, world.rng, steps, loss)
    world.check_orders()
    for client in world.clients.values():
        check_outcomes(world, client)
    check_order(world)
    check_nothing_is_left(world)
