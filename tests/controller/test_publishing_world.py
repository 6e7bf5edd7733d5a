"""Run random publishers and readers with model hosts."""

from __future__ import annotations

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.cluster.settings import Dispatch
from tests.controller.outcome import check_nothing_is_left, check_order, play
from tests.controller.publishing_world import PublishingWorld
from tests.thoroughness import examples


@settings(max_examples=examples(40, part=5))
@given(
    st.integers(0, 2**32),
    st.integers(1, 120),
    st.sampled_from(["1x1x2", "2x1x2", "1x2x2", "3x1x1"]),
    st.sampled_from([0.0, 0.15]),
    st.sampled_from([0, 0, 200]),
    st.sampled_from(list(Dispatch)),
    st.sampled_from([0.0, 0.05]),
    st.sampled_from([0, 2]),
)
def test_versions_are_published_and_read_as_wholes_and_leave_nothing(
    seed, steps, topology, doom, memory, dispatch, loss, relays
):
    world = PublishingWorld(
        random.Random(seed), topology, doom, device_memory=memory, dispatch=dispatch, relay_group=relays
    )
    play(world, world.rng, steps, loss)
    check_end(world)


@settings(max_examples=examples(24, part=5))
@given(st.integers(0, 2**32), st.integers(60, 160), st.sampled_from(["3x1x1", "4x1x1", "4x1x2"]))
@example(211, 105, "4x1x2")  # a copy ends after its version, which has readers, was lost
@example(1263, 111, "3x1x1")  # an island fails that has ended its part of a revoked run
@example(115, 106, "4x1x2")  # a launch consumes an array that a deferred launch reads
def test_versions_that_are_lost_while_they_are_copied_leave_nothing(seed, steps, topology):
    world = PublishingWorld(random.Random(seed), topology, 0.0)
    world.copy_loss = 0.05
    play(world, world.rng, steps, 0.02)
    check_end(world)


@settings(max_examples=examples(10, part=5))
@given(
    st.integers(0, 2**32),
    st.integers(20, 160),
    st.sampled_from(["1x1x2", "2x1x2", "3x1x1"]),
    st.sampled_from([0, 200]),
    st.sampled_from([0.0, 0.05]),
)
def test_versions_in_files_outlive_islands_and_leave_nothing(seed, steps, topology, memory, loss):
    world = PublishingWorld(random.Random(seed), topology, 0.0, device_memory=memory)
    world.spilling = 0.7
    play(world, world.rng, steps, loss)
    check_end(world)


def check_end(world: PublishingWorld) -> None:
    """Check that everything ends, and that nothing is left."""
    world.copy_loss = 0.0
    world.end_publishing()
    for client in world.clients.values():
        for handle in sorted(client.unreleased):
            client.release(handle)
    world.settle()
    check_order(world, world.deferred_launches())
    check_nothing_is_left(world)
