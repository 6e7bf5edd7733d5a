"""Tests that a function on two islands has bitwise the same values with and without `atoll.program`.

Functions without `test_` in their names run in the child. `compared` calls a function both ways there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.end_to_end.programs.functions import FUNCTIONS, SQUARE, figure_2, host, ordinary_operations
from tests.end_to_end.remote_python import RemotePython
from tests.end_to_end.same import assert_same


def compared(function: Callable[..., Any], commit: str) -> Any:
    """Return results without a program and with one, called twice; which are committed; and whose shardings differ."""
    import atoll

    v: Any = {
        "numpy": lambda: SQUARE,
        "uncommitted": lambda: jnp.asarray(SQUARE),
        "committed": lambda: jax.device_put(SQUARE, jax.devices()[0]),
    }[commit]()
    decorated = atoll.program(function)
    if (function, commit) == (figure_2, "committed"):
        # Without a program, pmap rejects arrays that are committed to other devices. A program moves them.
        with pytest.raises(ValueError, match="pmap"):
            function(v)
        plain = function(SQUARE)
    else:
        plain = function(v)
    results = [plain, decorated(v), decorated(v)]
    committed = [[x.committed for x in jax.tree.leaves(each)] for each in results]
    shardings = [[x.sharding for x in jax.tree.leaves(each)] for each in results]
    elsewhere = {
        jax.tree_util.keystr(path)
        for other in shardings[1:]
        for a, b, (path, x) in zip(shardings[0], other, jax.tree.leaves_with_path(plain), strict=True)
        if not a.is_equivalent_to(b, x.ndim)
    }
    assert len(decorated._cache) == 1
    return [host(each) for each in results], committed, elsewhere


def cases() -> Iterator[Any]:
    """Return each function with each kind of argument. The suite tests most functions with one kind only, in turn."""
    for number, function in enumerate(FUNCTIONS):
        chosen = ("numpy", "committed")[number % 2]
        for commit in ("numpy", "uncommitted", "committed"):
            is_in_suite = commit == chosen or function is figure_2
            marks = [] if is_in_suite else [pytest.mark.thorough]
            yield pytest.param(function, commit, id=f"{function.__name__}-{commit}", marks=marks)


@pytest.mark.parametrize(("function", "commit"), list(cases()))
def test_a_program_gives_what_its_function_gives(python: RemotePython, function: Any, commit: str) -> None:
    (plain, first, again), committed, elsewhere = python.call(compared, function, commit)
    assert_same(first, plain)
    assert_same(again, plain)
    assert committed[1] == committed[2] == committed[0]
    # jax.numpy treats indexing of arrays and of tracers as different operations, and XLA shards them differently.
    assert elsewhere == ({"['y']"} if function is ordinary_operations else set())


def stages() -> Any:
    import atoll

    program = atoll.program(figure_2)
    lowered = program.lower(jax.ShapeDtypeStruct((8, 8), np.float32))
    compiled = lowered.compile()
    flops = compiled.cost_analysis()["flops"]
    plan = lowered.as_text(stage="lowered")
    return lowered.as_text(), plan, flops, host(compiled(SQUARE)), host(figure_2(SQUARE)), str(compiled.out_tree)


def test_a_program_can_be_looked_at_before_it_runs(python: RemotePython) -> None:
    text, plan, flops, got, expected, tree = python.call(stages)
    assert "figure_2" in text
    assert "host 0" in plan
    assert "host 1" in plan
    assert flops > 0
    assert_same(got, expected)
    assert tree == "PyTreeDef((*, *))"
