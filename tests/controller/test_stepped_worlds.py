"""Run random clients all of whose programs and launches are large, and whose remains are released in steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.controller.sessions import inboxes
from atoll.launch import failing_launches, launch_ends, launcher, registry
from atoll.migration import array_spiller, migrations, movers
from atoll.state import stepped_work
from tests.controller.control_flow_world import ChoosingWorld
from tests.controller.outcome import check_nothing_is_left, check_outcomes, play
from tests.controller.world import World
from tests.thoroughness import examples


@contextmanager
def all_in_steps() -> Iterator[None]:
    """Have each program and each launch of two nodes be large."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (launcher, launch_ends, failing_launches, inboxes):
            patch.setattr(module, "LARGE_NODES", 1)
        patch.setattr(registry, "SMALL_NODES", 0)
        patch.setattr(array_spiller, "_MAX_AT_ONCE", 1)
        for name in ("_PROGRAMS_AT_ONCE", "_MAX_AT_ONCE", "MAX_TOGETHER"):
            patch.setattr(movers, name, 1)
        for name in ("_ROUNDS", "_FUNCTIONS_AT_ONCE", "_PROGRAMS_AT_ONCE"):
            patch.setattr(migrations, name, 1)
        patch.setattr(stepped_work, "SMALL_ITEMS", 0)
        yield


# A delegated run of which nothing is left to be put in line is revoked.
@example(95, 44, "2x1x2", 0.0, 0, 0.0, 0, ChoosingWorld)
@settings(max_examples=examples(50, part=5))
@given(
    st.integers(0, 2**32),
    st.integers(1, 120),
    st.sampled_from(["1x1x2", "2x1x2", "2x2x1", "3x1x1", "2x3x1"]),
    st.sampled_from([0.0, 0.15]),
    st.sampled_from([0, 60, 200]),
    st.sampled_from([0.0, 0.02, 0.1]),
    st.sampled_from([0, 2]),
    st.sampled_from([World, ChoosingWorld]),
)
def test_whatever_clients_do_in_steps_all_ends_exactly_once_and_leaves_nothing(
    seed, steps, topology, doom, memory, loss, relays, kind
):
    with all_in_steps():
        world = kind(random.Random(seed), topology, doom, device_memory=memory, relay_group=relays)
        play(world, world.rng, steps, loss)
        for client in world.clients.values():
            check_outcomes(world, client)
        check_nothing_is_left(world)
