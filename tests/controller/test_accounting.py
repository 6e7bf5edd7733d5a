"""Tests of accounting: the device time charged to tenants equals the islands' tallies, and no device is
over-charged.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.cluster.settings import Dispatch
from atoll.cluster.tenant_settings import TenantSettings, token_hash
from atoll.protocol import actions as a
from atoll.protocol import messages as m
from tests.controller.model_host import ModelHost, ModelRun
from tests.controller.outcome import play
from tests.controller.spanning_world import SpanningHost, SpanningWorld
from tests.controller.world import Client, World
from tests.thoroughness import examples

TENANTS = ("ana", "ben")
MAX_NS = 1_000_000  # of a gang


class _Clock(ModelHost):
    """Clock that reports the time from the dispatch of a unit to its end. Its seconds are those of the world."""

    def start_clock(self, world: AccountedWorld) -> None:
        self.world = world
        self.dispatched: dict[int, int] = {}
        self.began = self.clock = world.nanoseconds

    def dispatch(self, state: ModelRun, sequence: int, count: int) -> None:
        self.dispatched[sequence] = self.clock
        super().dispatch(state, sequence, count)

    def finish(self, index: int) -> Any:
        self.clock = max(self.clock, self.world.nanoseconds) + self.world.rng.randint(0, MAX_NS)
        report = super().finish(index)
        if not isinstance(report, m.Done):
            return report
        ((sequence, _, _),) = report.runs
        return m.Done(((sequence, self.dispatched.get(sequence, self.clock), self.clock),))


class HostWithClock(_Clock):
    """Host with a clock, for functions that run on one island."""

    def __init__(self, number: int, world: AccountedWorld) -> None:
        super().__init__(number)
        self.start_clock(world)


class SpanningHostWithClock(_Clock, SpanningHost):
    """Host with a clock, for functions that run on several islands."""

    def __init__(self, world: AccountedWorld, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.start_clock(world)


class AccountedWorld(World):
    """World with sessions of two tenants, whose hosts have clocks."""

    def __init__(self, rng: random.Random, topology: str, doom: float, **settings: Any) -> None:
        self.now = 0.0
        self.ended_ns = 0  # device time of hosts that have failed
        self.devices = int(topology.split("x")[2])  # of a host
        tenants = tuple(TenantSettings(name, token_hash(name)) for name in TENANTS)
        super().__init__(rng, topology, doom, tenants=tenants, **settings)

    @property
    def nanoseconds(self) -> int:
        return round(self.now * 1e9)

    def host_of(self, number: int) -> ModelHost:
        return HostWithClock(number, self)

    def open(self) -> Client:
        self.cluster.token = self.rng.choice(TENANTS)
        try:
            return super().open()
        finally:
            self.cluster.token = ""

    def end(self, island: int) -> None:
        self.ended_ns += sum(self.device_ns(host) for host in self.controller.resources.hosts_of(island))
        super().end(island)

    def device_ns(self, host: int) -> int:
        """Return the device time of the host since it started."""
        found = self.hosts[host]
        assert isinstance(found, _Clock)
        return (found.clock - found.began) * self.devices

    def charged(self) -> Counter[str]:
        """Return the device time that each tenant was charged, after the controller has stored it."""
        self.now += 2.0
        self.cluster.tick(self.now)
        self.deliver()
        found = Counter[str]()
        for action in self.cluster.actions:
            for usage in action.usage if isinstance(action, a.StoreUsage) else ():
                found[usage.tenant] += usage.device_ns
        return found

    def tallied(self) -> Counter[str]:
        """Return the device time of each tenant in the islands' tallies."""
        found = Counter[str]()
        for (_, tenant), tally in self.controller.launches.charges.by_island().items():
            found[tenant] += tally.device_ns
        return found

    def check_charges(self) -> None:
        """Check that the charges equal the tallies and do not exceed the device time of the hosts."""
        charged = self.charged()
        assert +charged == +self.tallied()
        assert min(charged.values(), default=0) >= 0
        assert charged.total() <= self.ended_ns + sum(map(self.device_ns, self.hosts))


class AccountedSpanningWorld(AccountedWorld, SpanningWorld):
    """Accounted world whose functions run on several islands."""

    def host_of(self, number: int) -> ModelHost:
        return SpanningHostWithClock(self, *self.members_of(number))


@settings(max_examples=examples(40, part=5))
@given(
    st.integers(0, 2**32),
    st.integers(1, 120),
    st.sampled_from(["1x1x2", "2x1x2", "1x2x2", "2x2x1", "3x1x1", "2x3x1"]),
    st.sampled_from([0.0, 0.15]),
    st.sampled_from(list(Dispatch)),
    st.sampled_from([0.0, 0.02]),
    st.sampled_from([0, 2]),
)
@example(8023, 25, "2x3x1", 0.15, Dispatch.PARALLEL, 0.0, 0)  # gangs that wait on hosts were charged in advance
@example(0, 15, "3x1x1", 0.0, Dispatch.PARALLEL, 0.0, 0)  # a delegated run overlaps a transfer of another session
@example(2132424030, 15, "1x1x2", 0.15, Dispatch.SEQUENTIAL, 0.02, 2)  # one of a transfer's devices computes before
def test_tenants_are_charged_what_islands_count_and_no_more_than_there_was(
    seed, steps, topology, doom, dispatch, loss, relays
):
    world = AccountedWorld(random.Random(seed), topology, doom, dispatch=dispatch, relay_group=relays)
    play(world, world.rng, steps, loss)
    world.check_charges()


@settings(max_examples=examples(20, part=5))
@given(
    st.integers(0, 2**32),
    st.integers(1, 120),
    st.sampled_from(["2x1x1", "2x1x2", "3x1x1", "3x2x1", "4x1x1"]),
    st.sampled_from([0.0, 0.15]),
    st.sampled_from(list(Dispatch)),
    st.sampled_from([0.0, 0.02, 0.1]),
    st.sampled_from([0, 2]),
)
def test_computations_over_islands_are_charged_what_islands_count(seed, steps, topology, doom, dispatch, loss, joint):
    options = {"dispatch": dispatch, "joint_islands": joint}
    world = AccountedSpanningWorld(random.Random(seed), topology, doom, **options)
    play(world, world.rng, steps, loss)
    world.check_charges()


@pytest.mark.thorough
def test_both_tenants_are_charged_in_a_long_play():
    world = AccountedWorld(random.Random(1), "2x1x2", 0.0)
    for _ in range(6):
        world.open()
    play(world, world.rng, 300, 0.0)
    charged = world.charged()
    assert all(charged[tenant] > 0 for tenant in TENANTS)
    assert +charged == +world.tallied()
