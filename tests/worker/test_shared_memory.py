"""Tests of a table of arrays that share memory: how they are made, how one is consumed, and how the others are then
used.

XLA would crash in some of these cases. Each must give right values, or an error of that run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache

import pytest

from atoll.errors import Code
from atoll.ir import plan as p
from atoll.protocol import messages as m
from tests.worker.worker_rig import Behaviours, Rig, add, local, says, spec

BEHAVIOURS = Behaviours("tests.worker.test_shared_memory")

# An array's handle, and the devices of its shards.
Array = tuple[int, tuple[int, ...]]


def done(outcome: tuple[object, tuple[int, ...]]) -> tuple[int, ...]:
    report, handles = outcome
    assert isinstance(report, m.Done), report
    return handles


def take(rig: Rig, array: Array, position: int) -> Array:
    device = array[1][position]
    step = p.Select((0,), 1, local(device), (p.Take(0, position),), False)
    return done(rig.run([step], [array[0]]))[0], (device,)


# ---- how memory is shared: each function returns arrays of ones that use the memory of the first


def views_of_a_whole(rig: Rig) -> list[Array]:
    whole = (rig.ones(0, 1), (0, 1))
    return [whole, take(rig, whole, 0), take(rig, whole, 1)]


def views_of_one_shard(rig: Rig) -> list[Array]:
    whole = (rig.ones(0), (0,))
    return [whole, take(rig, whole, 0), take(rig, whole, 0)]


def parts_of_an_assembled_array(rig: Rig) -> list[Array]:
    parts = [(rig.ones(0), (0,)), (rig.ones(1), (1,))]
    step = p.Select((0, 1), 2, local(0, 1), (p.Take(0, 0), p.Take(1, 0)), False)
    (whole,) = done(rig.run([step], [handle for handle, _ in parts]))
    return [(whole, (0, 1)), *parts]


def a_view_of_a_view(rig: Rig) -> list[Array]:
    whole = (rig.ones(0, 1), (0, 1))
    view = take(rig, whole, 1)
    return [whole, view, take(rig, view, 0)]


# ---- what consumes one of them


@cache
def doubling(rig: Rig, devices: tuple[int, ...], donate: tuple[int, ...]) -> str:
    return rig.function(lambda x: x + x, spec(), devices=devices, donate=donate)


@cache
def adding(rig: Rig, devices: tuple[int, ...]) -> str:
    return rig.function(add, spec(), spec(), devices=devices)


def double(rig: Rig, array: Array, *, donate: bool = False) -> Array:
    handle, devices = array
    donated = (0,) if donate else ()
    return done(rig.call(doubling(rig, devices, donated), handle, donated=donated))[0], devices


def move(rig: Rig, array: Array, to: tuple[int, ...], *, donate: bool = False) -> Array:
    step = p.Move((0,), (1,), (local(*to),), donate)
    return done(rig.run([step], [array[0]]))[0], to


def donated_to_a_function(rig: Rig, array: Array) -> None:
    assert rig.shard(double(rig, array, donate=True)[0]).tolist() == [2, 2, 2, 2]


def donated_to_a_move_in_place(rig: Rig, array: Array) -> None:
    assert rig.shard(move(rig, array, array[1], donate=True)[0]).tolist() == [1, 1, 1, 1]


def donated_to_a_move_elsewhere(rig: Rig, array: Array) -> None:
    assert rig.shard(move(rig, array, (3, 2)[: len(array[1])], donate=True)[0]).tolist() == [1, 1, 1, 1]


def donated_to_a_move_in_another_order(rig: Rig, array: Array) -> None:
    assert rig.shard(move(rig, array, array[1][::-1], donate=True)[0]).tolist() == [1, 1, 1, 1]


def deleted(rig: Rig, array: Array) -> None:
    rig.executor.submit(m.Free(rig.session, (array[0],), True))


# ---- how another one is used then


def computed_with(rig: Rig, array: Array) -> None:
    assert rig.shard(double(rig, array)[0]).tolist() == [2, 2, 2, 2]


def computed_with_and_donated(rig: Rig, array: Array) -> None:
    assert rig.shard(double(rig, array, donate=True)[0]).tolist() == [2, 2, 2, 2]


def moved(rig: Rig, array: Array) -> None:
    assert rig.shard(move(rig, array, (3, 2)[: len(array[1])])[0]).tolist() == [1, 1, 1, 1]


def moved_and_donated(rig: Rig, array: Array) -> None:
    assert rig.shard(move(rig, array, array[1], donate=True)[0]).tolist() == [1, 1, 1, 1]


def read(rig: Rig, array: Array) -> None:
    assert rig.shard(array[0]).tolist() == [1, 1, 1, 1]


def taken_from(rig: Rig, array: Array) -> None:
    assert rig.shard(take(rig, array, 0)[0]).tolist() == [1, 1, 1, 1]


def deleted_and_freed(rig: Rig, array: Array) -> None:
    rig.executor.submit(m.Free(rig.session, (array[0],), True))
    rig.executor.submit(m.Free(rig.session, (array[0],)))
    rig.ones()


SHARED = (views_of_a_whole, views_of_one_shard, parts_of_an_assembled_array, a_view_of_a_view)
CONSUMED = (
    donated_to_a_function,
    donated_to_a_move_in_place,
    donated_to_a_move_elsewhere,
    donated_to_a_move_in_another_order,
    deleted,
)
USED = (computed_with, computed_with_and_donated, moved, moved_and_donated, read, taken_from, deleted_and_freed)


def case(
    make: Callable[[Rig], list[Array]],
    victim: int,
    consume: Callable[[Rig, Array], None],
    use: Callable[[Rig, Array], None],
) -> Callable[[Rig], None]:
    def play(rig: Rig) -> None:
        arrays = make(rig)
        consumed = arrays.pop(victim)
        consume(rig, consumed)
        for array in arrays:
            use(rig, array)
        argument = rig.ones(*consumed[1])
        says(
            rig.failure(rig.call(adding(rig, consumed[1]), consumed[0], argument)),
            Code.INVALID_ARGUMENT,
            "deleted or donated",
        )

    return play


for make, victim, consume, use in itertools.product(SHARED, (0, 1), CONSUMED, USED):
    of = "the first" if victim == 0 else "the second"
    name = f"{make.__name__}, {of} {consume.__name__}, the others {use.__name__}".replace("_", " ")
    BEHAVIOURS.add_case(name, case(make, victim, consume, use))


@BEHAVIOURS.add
def it_donates_memory_that_no_other_has_any_more(rig: Rig) -> None:
    whole, view, other = views_of_a_whole(rig)
    executor = rig.executor.plan_executor
    rig.executor.submit(m.Free(rig.session, (whole[0], other[0])))
    rig.ones()
    array = executor.buffer(rig.session, view[0]).array
    double(rig, view, donate=True)
    assert executor.buffer(rig.session, view[0]).array is array, "it was not copied"
    assert array.is_deleted()


@BEHAVIOURS.add
def it_donates_one_of_two_that_share_memory_and_are_passed_together(rig: Rig) -> None:
    _, view, again = views_of_one_shard(rig)
    name = rig.function(add, spec(), spec(), donate=(0,))
    (result,) = done(rig.call(name, view[0], again[0], donated=(0,)))
    assert rig.shard(result).tolist() == [2, 2, 2, 2]
    assert rig.shard(again[0]).tolist() == [1, 1, 1, 1]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return BEHAVIOURS.outcomes()


@pytest.mark.parametrize("name", BEHAVIOURS.names)
def test_arrays_that_share_memory(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes.get(name, outcomes[""]) == "ok"


if __name__ == "__main__":
    BEHAVIOURS.play()
