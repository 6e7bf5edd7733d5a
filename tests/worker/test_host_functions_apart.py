"""Functions on two islands of a host each: those that run without a world, and those that need one."""

from __future__ import annotations

import os
import tempfile
import threading
from typing import Any

import jax
import pytest

from atoll.devices.xla import remote_device
from atoll.errors import OK, Code, Status
from atoll.protocol import messages as m
from tests.waiting import until
from tests.worker.worker_rig import SECONDS, Behaviours, Rig, add, says, spec

BEHAVIOURS = Behaviours("tests.worker.test_host_functions_apart")
CLOSED = Status(Code.DATA_LOSS, "host 1 is gone")
DEVICES = (0, 1)  # of each host
_second: dict[int, int] = {}  # by world: its number on the second host


def compiled(rig: Rig, call: Any, *arguments: Any, rank: int = 0, world: int = 0, name: str = "") -> Any:
    """Compile a function for the devices of both hosts, of which this one has a rank. Return the report."""
    module = rig.lower(call, *arguments, devices=(0, 1, 2, 3))
    rig.request(module, DEVICES, world, name, rank)
    return rig.reports.get(timeout=SECONDS)


def world_of_two(rig: Rig) -> int:
    """Have this process join a world as both of its hosts. Return the number of the world of the first one."""
    world, other = rig.fresh(), rig.fresh()
    rig.worlds.join(m.JoinWorld(world, 0, 2))
    served = rig.reports.get(timeout=SECONDS)
    rig.worlds.join(m.JoinWorld(other, 1, 2, served.address))
    for each in (world, other):
        joined = threading.Event()
        rig.worlds.when_joined(each, lambda status, joined=joined: joined.set())  # type: ignore[misc]
        assert joined.wait(SECONDS)
    _second[world] = other
    return world


def close(rig: Rig, world: int, successor: int = 0) -> None:
    """Close a world on both of its hosts. XLA ends a process that stays in it when its service has ended."""
    rig.functions.close_world(m.CloseWorld(world, CLOSED, successor))
    if world in _second:
        rig.functions.close_world(m.CloseWorld(_second[world], CLOSED))


def needs_world(report: Any) -> str:
    assert isinstance(report, m.NeedsWorld), report
    return report.function


def is_apart(report: Any) -> str:
    assert isinstance(report, m.Compiled), report
    assert report.status.ok, report
    assert report.is_apart
    return report.function


def numbered(x: Any) -> Any:
    import jax.numpy as jnp

    return x + jnp.arange(16, dtype=x.dtype)


def summed(x: Any) -> Any:
    return x + x.sum()


def summed_on_each_host(x: Any) -> Any:
    import jax.numpy as jnp

    return x + jnp.repeat(x.reshape(2, 8).sum(1), 8)


@BEHAVIOURS.add
def it_runs_its_part_without_a_world(rig: Rig) -> None:
    function = is_apart(compiled(rig, add, spec(), spec()))
    a = rig.ones(*DEVICES)
    _, (two,) = rig.call(function, a, a)
    _, (three,) = rig.call(rig.function(add, spec(), spec(), devices=DEVICES), two, a)
    assert [rig.shard(each, 1).tolist() for each in (two, three)] == [[2.0] * 4, [3.0] * 4]
    assert not rig.functions.get(function).loaded.is_joint


@BEHAVIOURS.add
def it_numbers_its_devices_as_part_of_the_function(rig: Rig) -> None:
    for rank in (0, 1):
        function = is_apart(compiled(rig, numbered, spec(), rank=rank))
        _, (result,) = rig.call(function, rig.ones(*DEVICES))
        first = 8 * rank
        assert [rig.shard(result, each).tolist() for each in (0, 1)] == [
            [first + 4 * each + i + 1.0 for i in range(4)] for each in (0, 1)
        ]


@BEHAVIOURS.add
def it_runs_collectives_of_its_own_devices(rig: Rig) -> None:
    function = is_apart(compiled(rig, summed_on_each_host, spec()))
    _, (result,) = rig.call(function, rig.ones(*DEVICES))
    assert [rig.shard(result, each).tolist() for each in (0, 1)] == [[9.0] * 4] * 2


@BEHAVIOURS.add
def it_donates_and_calls_again(rig: Rig) -> None:
    module = rig.lower(add, spec(), spec(), devices=(0, 1, 2, 3), donate=(0,))
    rig.request(module, DEVICES, rank=0)
    function = is_apart(rig.reports.get(timeout=SECONDS))
    a, b = rig.ones(*DEVICES), rig.ones(*DEVICES)
    report, (two,) = rig.call(function, a, b, donated=(0,))
    assert isinstance(report, m.Done), report
    says(rig.failure(rig.call(function, a, b, donated=(0,))), Code.INVALID_ARGUMENT, "deleted or donated")
    _, (three,) = rig.call(function, two, b, donated=(0,))
    assert rig.shard(three).tolist() == [3.0] * 4


@BEHAVIOURS.add
def it_uses_an_array_inside_and_outside_of_a_world_in_turn(rig: Rig) -> None:
    world = world_of_two(rig)
    inside = is_apart(compiled(rig, add, spec(), spec(), world=world))
    outside = rig.function(add, spec(), spec(), devices=DEVICES)
    assert rig.functions.get(inside).loaded.world == world
    _, (two,) = rig.call(outside, rig.ones(*DEVICES), rig.ones(*DEVICES))
    value = two
    for function in (inside, inside, outside, inside, outside):
        _, (value,) = rig.call(function, value, two)
    assert rig.shard(value, 1).tolist() == [12.0] * 4


@BEHAVIOURS.add
def it_asks_for_a_world_if_the_islands_communicate(rig: Rig) -> None:
    name = needs_world(compiled(rig, summed, spec()))
    assert rig.functions.stages_of([name])[0].stage is m.CompileStage.WAITING
    world = world_of_two(rig)
    rig.functions.placer.load_in_world(m.LoadInWorld(name, world))
    report = rig.reports.get(timeout=SECONDS)
    assert isinstance(report, m.Compiled), report
    assert (report.status, report.is_apart) == (OK, False), report
    loaded = rig.functions.get(name).loaded
    assert (loaded.world, loaded.is_joint) == (world, True)
    rig.functions.placer.load_in_world(m.LoadInWorld(name, world))  # the answer to another question
    assert rig.reports.empty()


@BEHAVIOURS.add
def it_asks_for_a_world_for_permutations_on_one_island(rig: Rig) -> None:
    """XLA's CPU devices meet for a permutation, also those that are not in it."""
    import jax
    from jax.sharding import Mesh, PartitionSpec

    mesh, rows = Mesh(rig.backend.devices[:4], ("x",)), PartitionSpec("x")
    swap = jax.shard_map(lambda x: jax.lax.ppermute(x, "x", [(0, 1), (1, 0)]), mesh=mesh, in_specs=rows, out_specs=rows)
    needs_world(compiled(rig, swap, spec()))


@BEHAVIOURS.add
def it_loads_a_function_in_the_world_that_there_is(rig: Rig) -> None:
    world = world_of_two(rig)
    function = is_apart(compiled(rig, numbered, spec(), world=world))
    loaded = rig.functions.get(function).loaded
    assert (loaded.world, loaded.is_joint) == (world, False)
    _, (result,) = rig.call(function, rig.ones(*DEVICES))
    assert rig.shard(result, 1).tolist() == [5.0, 6.0, 7.0, 8.0]
    close(rig, world)
    says(rig.failure(rig.call(function, result)), Code.NOT_FOUND)
    assert rig.shard(result, 1).tolist() == [5.0, 6.0, 7.0, 8.0]
    again = is_apart(compiled(rig, numbered, spec()))
    _, (result,) = rig.call(again, result)
    assert rig.shard(result).tolist() == [1.0, 3.0, 5.0, 7.0]


@BEHAVIOURS.add
def it_moves_a_function_to_the_next_world(rig: Rig) -> None:
    world, successor = world_of_two(rig), world_of_two(rig)
    function = is_apart(compiled(rig, numbered, spec(), world=world))
    close(rig, world, successor)
    is_apart(rig.reports.get(timeout=SECONDS))
    assert rig.functions.get(function).loaded.world == successor


def followed(rig: Rig, function: str, world: int) -> int:
    """Call a function with new arrays of twos of the world until it runs there. Return the result of the last call."""
    add_in_world, ones = is_apart(compiled(rig, add, spec(), spec(), world=world)), rig.ones(*DEVICES)
    results = []

    def is_there() -> bool:
        _, (two,) = rig.call(add_in_world, ones, ones)
        results.append(rig.call(function, two)[1][0])
        return rig.functions.get(function).loaded.world == world

    until(is_there)
    return int(results[-1])


@BEHAVIOURS.add
def it_follows_its_arguments_into_their_world(rig: Rig) -> None:
    function = is_apart(compiled(rig, numbered, spec()))
    result = followed(rig, function, world_of_two(rig))
    assert rig.shard(result, 1).tolist() == [6.0, 7.0, 8.0, 9.0]
    _, (result,) = rig.call(function, rig.ones(*DEVICES))
    assert rig.shard(result, 1).tolist() == [5.0, 6.0, 7.0, 8.0], "arguments of the host's client are brought over"


@BEHAVIOURS.add
def it_returns_from_the_world_of_its_arguments_when_that_is_closed(rig: Rig) -> None:
    function = is_apart(compiled(rig, numbered, spec()))
    world, next_world = world_of_two(rig), world_of_two(rig)
    result = followed(rig, function, world)
    close(rig, world)
    _, (again,) = rig.call(function, result)
    assert rig.functions.get(function).loaded.world == 0
    assert rig.shard(again).tolist() == [2.0, 4.0, 6.0, 8.0]
    result = followed(rig, function, next_world)
    assert rig.shard(result).tolist() == [2.0, 3.0, 4.0, 5.0]


@BEHAVIOURS.add
def it_asks_again_for_a_session_that_comes_later(rig: Rig) -> None:
    name = needs_world(compiled(rig, summed, spec()))
    assert needs_world(compiled(rig, summed, spec(), name=name)) == name


@BEHAVIOURS.add
def it_forgets_a_function_that_is_dropped_before_it_has_its_world(rig: Rig) -> None:
    name = needs_world(compiled(rig, summed, spec()))
    rig.functions.drop(name)
    world = world_of_two(rig)
    rig.functions.placer.load_in_world(m.LoadInWorld(name, world))
    assert rig.functions.stages_of([name])[0].stage is m.CompileStage.UNKNOWN
    assert rig.reports.empty()
    assert needs_world(compiled(rig, summed, spec(), name=name)) == name


@BEHAVIOURS.add
def it_fails_a_function_whose_world_is_closed_before_it_is_loaded(rig: Rig) -> None:
    name = needs_world(compiled(rig, summed, spec()))
    world = rig.fresh()
    rig.functions.placer.load_in_world(m.LoadInWorld(name, world))
    close(rig, world)
    report = rig.reports.get(timeout=SECONDS)
    says(report.status, Code.DATA_LOSS, "host 1 is gone")


@BEHAVIOURS.add
def it_compiles_a_function_apart_although_the_world_was_closed(rig: Rig) -> None:
    """The controller names the world only because the arguments are probably there."""
    world = rig.fresh()
    close(rig, world)
    function = is_apart(compiled(rig, numbered, spec(), world=world))
    _, (result,) = rig.call(function, rig.ones(*DEVICES))
    assert rig.shard(result, 1).tolist() == [5.0, 6.0, 7.0, 8.0]


@BEHAVIOURS.add
def it_compiles_a_function_apart_although_it_cannot_join_the_world(rig: Rig) -> None:
    world = rig.fresh()
    rig.worlds.join(m.JoinWorld(world, 1, 2, "no address"))
    assert isinstance(rig.reports.get(timeout=SECONDS), m.WorldFailed)
    function = is_apart(compiled(rig, numbered, spec(), world=world))
    _, (result,) = rig.call(function, rig.ones(*DEVICES))
    assert rig.shard(result, 1).tolist() == [5.0, 6.0, 7.0, 8.0]
    says(compiled(rig, summed, spec(), world=world).status, Code.UNAVAILABLE, "cannot join")


@BEHAVIOURS.add
def it_says_that_a_function_is_apart_when_it_has_it_already(rig: Rig) -> None:
    name = is_apart(compiled(rig, numbered, spec()))
    report = compiled(rig, numbered, spec(), name=name, world=world_of_two(rig))
    assert is_apart(report) == name
    assert report.cached


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        remote_device.prepare(None, directory)
        jax.devices()
        assert not os.listdir(directory)
    BEHAVIOURS.play()


@pytest.fixture(scope="module", params=["", "ana"], ids=["in the worker", "in a compiler process"])
def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    return BEHAVIOURS.outcomes(request.param)


@pytest.mark.parametrize("name", BEHAVIOURS.names)
def test_a_host_of_two_islands(outcomes: dict[str, str], name: str):
    assert outcomes.get(name, outcomes[""]) == "ok"
