"""Run random clients whose programs have control flow, with model hosts that report random numbers."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cluster.settings import Dispatch
from tests.controller.control_flow_world import ChoosingWorld
from tests.controller.outcome import check_nothing_is_left, check_outcomes, play
from tests.thoroughness import examples


@settings(max_examples=examples(50, part=5))
@given(
    st.integers(0, 2**32),
    st.integers(1, 120),
    st.sampled_from(["1x1x2", "2x1x2", "1x2x2", "2x2x1", "3x1x1", "2x3x1"]),
    st.sampled_from([0.0, 0.15]),
    st.sampled_from([0, 0, 200]),
    st.sampled_from(list(Dispatch)),
    st.sampled_from([0.0, 0.02]),
    st.sampled_from([0, 2, 3]),
)
def test_whatever_data_decide_all_ends_exactly_once_and_leaves_nothing(
    seed, steps, topology, doom, memory, dispatch, loss, relays
):
    world = ChoosingWorld(
        random.Random(seed), topology, doom, device_memory=memory, dispatch=dispatch, relay_group=relays
    )
    play(world, world.rng, steps, loss)
    for client in world.clients.values():
        check_outcomes(world, client)
    check_nothing_is_left(world)
