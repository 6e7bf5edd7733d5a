"""Tests that a controller loaded from a dump makes the same decisions as the dumped one."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cluster.settings import Dispatch
from atoll.controller.controller_dumps import load_controller
from atoll.controller.core import Controller
from atoll.errors import IncompatibleJournalError
from atoll.protocol import actions as a
from atoll.protocol import events as e
from atoll.state.object_dumps import declared
from tests.controller.control_flow_world import ChoosingWorld
from tests.controller.dumps import check_dump, check_same, dumped
from tests.controller.migrating_world import MigratingWorld
from tests.controller.outcome import play
from tests.controller.play import Play
from tests.controller.publishing_world import PublishingWorld
from tests.controller.world import World
from tests.journal.worlds import act
from tests.thoroughness import examples


class Twins:
    """A controller, and a second one that was loaded from its dump and handles the same events."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.loaded = check_dump(controller)
        self._unfinished = 0  # flushes after which work was left for later steps
        self._loads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.controller, name)

    def handle(self, event: e.AnyEvent) -> list[a.AnyAction]:
        actions = self.controller.handle(event)
        assert msgspec.msgpack.encode(self.loaded.handle(event)) == msgspec.msgpack.encode(actions)
        if type(event) is e.Flush and self.controller.has_work:
            self._unfinished += 1
            if self._unfinished % 8 == 0:
                self.load_again()
        return actions

    def load_again(self) -> None:
        self._loads += 1
        if self._loads % 3 == 0:  # seldom, because comparing all objects of a controller takes long
            check_same(self.controller, self.loaded)
        self.loaded = check_dump(self.controller)


def twins_of(world: World) -> Twins:
    """Replace the controller of a world by twins."""
    del world.controller.launches.reservations.waits.hopeless  # the world's own, which knows only one controller
    twins = Twins(world.controller)
    world.controller = world.cluster.controller = twins  # type: ignore[assignment]
    return twins


class LongPrograms(World):
    longest = 16


class ReadingWorld(PublishingWorld):
    """World whose clients publish and read often, and whose controller is sometimes loaded again."""

    publishing = 0.7
    reading = 3
    spilling = 0.3
    copy_loss = 0.05

    def deliver(self) -> None:
        super().deliver()
        if isinstance(self.controller, Twins) and self.rng.random() < 0.05:
            self.controller.load_again()


@settings(max_examples=examples(40, part=5))
@given(
    st.integers(0, 2**32),
    st.integers(1, 40),
    st.sampled_from([World, MigratingWorld, ChoosingWorld, LongPrograms]),
    st.sampled_from(["2x1x2", "1x2x2", "2x2x1", "3x1x1", "4x1x2"]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0, 60, 200]),
    st.sampled_from(list(Dispatch)),
    st.sampled_from([0, 2]),
)
def test_a_loaded_controller_is_equal_and_decides_the_same(seed, steps, kind, topology, doom, memory, dispatch, relays):
    rng = random.Random(seed)
    world = kind(rng, topology, doom, device_memory=memory, dispatch=dispatch, relay_group=relays)
    twins = twins_of(world)
    for _ in range(3):
        world.open()
    for _ in range(steps):
        act(world)
        if rng.random() < 0.1:
            twins.load_again()
    world.settle()
    twins.load_again()


@settings(max_examples=examples(10, part=5))
@given(
    st.integers(0, 2**32),
    st.integers(60, 160),
    st.sampled_from(["2x1x2", "3x1x1", "4x1x2"]),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0, 200]),
    st.sampled_from([0, 2]),
)
def test_a_loaded_controller_publishes_and_reads_the_same(seed, steps, topology, doom, memory, relays):
    world = ReadingWorld(random.Random(seed), topology, doom, device_memory=memory, relay_group=relays)
    twins = twins_of(world)
    play(world, world.rng, steps, loss=0.02)
    twins.load_again()


def test_a_dump_of_another_version_is_refused_and_both_versions_are_named() -> None:
    content = msgspec.msgpack.decode(dumped(Play().controller))
    content["objects"]["versions"]["scheduler"] = [7, 7]
    content["objects"]["atoll"] = "9.9"
    text = r"atoll 9\.9 stored version 7 of 'scheduler', and atoll .* reads versions 1 to \d:"
    with pytest.raises(IncompatibleJournalError, match=text):
        load_controller(msgspec.msgpack.encode(content))


def test_each_stored_attribute_of_a_record_exists() -> None:
    for schema in declared():
        assert 1 <= schema.oldest <= schema.version, schema.tag
        if dataclasses.is_dataclass(schema.kind):
            names = {each.name for each in dataclasses.fields(schema.kind)}
            assert names.issuperset(schema.struct.__struct_fields__), schema.tag
