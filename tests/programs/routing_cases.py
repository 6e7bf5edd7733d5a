"""Cases of routes, and their results computed with NumPy, for any devices of this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import atoll

Array = np.ndarray[Any, Any]
FACTORS = (2, 3, 5, 7)
# The computation of experts, for each row.
EXPERTS = tuple(jax.jit(lambda block, factor=factor: block * jnp.asarray(factor, block.dtype)) for factor in FACTORS)


@dataclass
class Case:
    """Case of a route. With `choices` 0, each row has one destination.

    `spec` is the sharding of rows on the first mesh. If `weighted` is None, all weights are one.
    """

    name: str
    rows: tuple[int, ...] = (16, 3)
    choices: int = 2
    capacity: int = 8
    dtype: str = "float32"
    spec: tuple[Any, ...] = ("x",)
    blocks: tuple[Any, ...] | None = None  # like `spec`, for the blocks; None for the default of a mesh
    weighted: bool = True
    overflow: Any = "drop"
    destinations: Callable[[np.random.Generator, tuple[int, ...]], Array] = field(
        default=lambda rng, shape: rng.integers(-1, len(FACTORS) + 1, shape).astype(np.int32)
    )


CASES = (
    Case("rows in shards, some dropped, some of no destination"),
    Case("kept, one destination, no weights, bfloat16", choices=0, weighted=False, overflow="keep", dtype="bfloat16"),
    Case("cut along their width here, by rows there", spec=(None, "x"), rows=(12, 4)),
    Case("rows of several dimensions, copies there, int8", rows=(8, 2, 3, 1), blocks=(), weighted=False, dtype="int8"),
    Case("by rows here, along their width there", rows=(12, 4), blocks=(None, "x")),
    Case(
        "destinations of 64 bits that end as others do",
        destinations=lambda rng, shape: rng.choice(np.array([0, 3, 1 << 32, -(1 << 40)]), shape),
    ),
    Case("one destination a row", choices=0),
    Case("kept where there is no room", overflow="keep"),
    Case("one place", spec=(None,)),
    Case("room for all", capacity=64, choices=3),
    Case("rows of one number", rows=(16,)),
    Case("cut along their width", spec=(None, "x"), rows=(12, 4), blocks=(None, "x")),
    Case("bool", dtype="bool", weighted=False, choices=0),
    Case("complex64", dtype="complex64", weighted=False),
    Case("float64", dtype="float64"),
    Case("uint32 destinations", destinations=lambda rng, shape: rng.integers(0, 2**32, shape).astype(np.uint32)),
    Case("nobody goes", destinations=lambda rng, shape: np.full(shape, -1, np.int8)),
    Case("all go to one", destinations=lambda rng, shape: np.full(shape, 2, np.int16)),
)


def parametrized(count: int) -> Any:
    """Parametrize a test with the numbers of all cases. The suite runs only this many of them."""
    marks = [[] if number < count else [pytest.mark.thorough] for number in range(len(CASES))]
    numbers = [pytest.param(number, id=case.name, marks=marks[number]) for number, case in enumerate(CASES)]
    return pytest.mark.parametrize("number", numbers)


def meshes() -> list[Mesh]:
    """Return four meshes: the first two are on one island each, with all of its hosts, and the others have one device
    of the last and the first island.
    """
    devices = jax.devices()
    islands: dict[Any, list[Any]] = {}
    for number, device in enumerate(devices):
        islands.setdefault(getattr(device, "slice_index", number // 2), []).append(device)
    first, second, *_ = islands.values()
    return [Mesh(np.array(each), ("x",)) for each in (first, second, devices[-1:], devices[:1])]


def source_of(case: Case) -> NamedSharding:
    return NamedSharding(meshes()[0], P(*case.spec))


def groups_of(case: Case) -> int:
    source = source_of(case)
    return int(source.mesh.size) if case.spec[0] else 1


def made(case: Case) -> tuple[Array, Array, Array | None]:
    """Return rows, destinations and weights."""
    rng = np.random.default_rng(len(case.name))
    rows = (rng.standard_normal(case.rows) * 3).astype(jnp.dtype(case.dtype))
    shape = (case.rows[0], case.choices) if case.choices else case.rows[:1]
    weights = rng.standard_normal(shape).astype(np.float32) if case.weighted else None
    return rows, case.destinations(rng, shape), weights


def routed(case: Case, rows: Any, destinations: Any, weights: Any) -> Any:
    """Route rows to the experts and back. Return the results and the counts."""
    to = [mesh if case.blocks is None else NamedSharding(mesh, P(*case.blocks)) for mesh in meshes()]
    blocks, routing = atoll.route(rows, destinations, to=to, capacity=case.capacity, overflow=case.overflow)
    blocks = [expert(block) for expert, block in zip(EXPERTS, blocks, strict=True)]
    back = atoll.unroute(blocks, routing, weights)
    return back, routing.dropped, routing.out_of_range, routing.sizes


def on_devices(case: Case) -> tuple[Any, ...]:
    rows, destinations, weights = made(case)
    source = source_of(case)
    lies = NamedSharding(source.mesh, P(*source.spec[:1]))
    return jax.device_put(rows, source), *(
        None if each is None else jax.device_put(each, lies) for each in (destinations, weights)
    )


def by_themselves_and_in_a_program(number: int) -> list[Any]:
    case = CASES[number]
    given = on_devices(case)

    def f(*given: Any) -> Any:
        return routed(case, *given)

    program = atoll.program(f)
    return [jax.tree.map(np.asarray, each) for each in (f(*given), program(*given), program(*given))]


def expected(case: Case, groups: int) -> Any:
    """Return NumPy's results, computed row by row, with first choices before second ones."""
    rows, destinations, weights = made(case)
    n = len(rows)
    chosen = destinations.reshape(n, -1)
    by = np.ones(chosen.shape) if weights is None else weights.reshape(n, -1)
    wide = np.complex128 if case.dtype == "complex64" else np.float64
    back = np.zeros(rows.shape, wide)
    dropped, sizes = np.zeros((2, groups, len(FACTORS)), np.int32)
    outside = np.zeros(groups, np.int32)
    for choice in range(chosen.shape[1]):
        for row in range(n):
            group, to = row * groups // n, int(chosen[row, choice])
            if not 0 <= to < len(FACTORS):
                outside[group] += 1
            elif sizes[group, to] == case.capacity // groups:
                dropped[group, to] += 1
            else:
                sizes[group, to] += 1
                back[row] += by[row, choice] * (rows[row] * rows.dtype.type(FACTORS[to])).astype(wide)
                continue
            if case.overflow == "keep":
                back[row] += by[row, choice] * rows[row].astype(wide)
    return back, dropped.sum(0), outside.sum(), sizes


def check(number: int, found: Any) -> None:
    case = CASES[number]
    back, *counts = expected(case, groups_of(case))
    got = np.asarray(found[0])
    if case.dtype == "int8":
        back = back.astype(np.int64).astype(np.int8)  # it wraps around
    elif case.dtype == "bool":
        back = back.astype(bool)
    tolerance = 0.05 if case.dtype == "bfloat16" else 1e-5
    wide = np.complex128 if case.dtype == "complex64" else np.float64
    np.testing.assert_allclose(got.astype(wide), back.astype(wide), rtol=tolerance, atol=10 * tolerance)
    for counted, want in zip(found[1:], counts, strict=True):
        np.testing.assert_array_equal(counted, want)
