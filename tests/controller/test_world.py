"""Run random clients with model hosts: the results are correct, and nothing is left."""

from __future__ import annotations

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.cluster.settings import Dispatch
from tests.controller.outcome import check_nothing_is_left, check_order, check_outcomes, play
from tests.controller.world import World
from tests.thoroughness import examples


# A session ends between commit and start of a gang that was to take over the memory of its donated argument.
@example(75, 47, "2x2x1", 0.15, 0, Dispatch.PARALLEL, 0.0, 0)
# An island fails while gangs of a session that has ended are committed.
@example(273369, 95, "1x4x1", 0.0, 0, Dispatch.PARALLEL, 0.02, 0)
@settings(max_examples=examples(50, part=5))
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
    play(world, world.rng, steps, loss)
    for client in world.clients.values():
        check_outcomes(world, client)
    check_order(world)
    check_nothing_is_left(world)


class LongPrograms(World):
    longest = 16


@settings(max_examples=examples(40, part=5))
@example(0, 2, "4x1x2", 0.0, 0, 0.0)
@given(
    st.integers(0, 2**32),
    st.integers(1, 12),
    st.sampled_from(["2x1x1", "3x1x1", "4x1x2"]),
    st.sampled_from([0.0, 0.05]),
    st.sampled_from([0, 200, 400]),
    st.sampled_from([0.0, 0.1]),
)
def test_delegated_runs_are_revoked_at_any_segment_and_nothing_runs_twice(seed, rounds, topology, doom, memory, loss):
    world = LongPrograms(random.Random(seed), topology, doom, device_memory=memory)
    delegate_and_revoke(world, rounds, loss)


@settings(max_examples=examples(40, part=5))
@example(1, 10, "2x1x1", 0.0, 0)
@example(20, 11, "4x1x2", 0.05, 0)
@given(
    st.integers(0, 2**32),
    st.integers(1, 12),
    st.sampled_from(["2x1x1", "3x1x1", "4x1x2"]),
    st.sampled_from([0.0, 0.05]),
    st.sampled_from([0, 400]),
)
def test_delegated_runs_end_if_their_islands_are_removed(seed, rounds, topology, doom, memory):
    world = LongPrograms(random.Random(seed), topology, doom, device_memory=memory)
    world.removal = 0.5
    delegate_and_revoke(world, rounds, 0.2)


def delegate_and_revoke(world: World, rounds: int, loss: float) -> None:
    """Let one client have the cluster to itself until another one connects. Then hosts fail, or sessions end."""
    rng, one, other = world.rng, world.open(), world.open()
    for _ in range(rounds):
        if not one.arrays:
            one.put()
            world.settle()
        for _ in range(rng.randint(1, 3)):
            one.chain()
            world.deliver()
        for _ in range(rng.randint(0, 12)):
            world.work()
        if rng.random() < 0.7:
            other.call()
        world.deliver()
        if rng.random() < loss:
            world.lose(rng.choice(sorted(set(world.controller.resources.islands) - world.removed)))
        for _ in range(rng.randint(0, 4)):
            world.work()
        if rng.random() < 0.5:
            world.settle()
        if rng.random() < loss:
            world.close(one)
            one = world.open()
    world.settle()
    for client in world.clients.values():
        check_outcomes(world, client)
    check_order(world)
    check_nothing_is_left(world)
