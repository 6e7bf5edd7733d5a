"""Tests of what `atoll.program` records of a function, on stock CPU devices without a cluster."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import atoll
from atoll.errors import ProgramError
from atoll.ir.program import Call, Program, Transfer, check
from atoll.programs.program_functions import FunctionTable

VECTOR = np.arange(8.0)
double = jax.jit(lambda x: x * 2)
consume = jax.jit(lambda x: x + 1, donate_argnums=0)


def mesh(first: int, count: int = 2, name: str = "x") -> Mesh:
    return Mesh(np.array(jax.devices()[first : first + count]), name)


def at(number: int) -> Any:
    return SingleDeviceSharding(jax.devices()[number])


def body(function: Any, *arguments: Any, **options: Any) -> Program:
    program = atoll.program(function, **options).lower(*arguments)._built.program
    check(program)
    return program


def kinds(program: Program) -> list[str]:
    return [type(node).__name__ for node in program.nodes]


def devices(program: Program) -> list[tuple[int, ...]]:
    return [node.outputs[0].sharding.devices for node in program.nodes]


# ---- nodes


def test_a_jit_call_is_one_node() -> None:
    program = body(lambda x: double(double(x)), VECTOR)
    assert kinds(program) == ["Call", "Call"]


def test_equal_calls_share_a_function() -> None:
    def chain(x: Any) -> Any:
        for _ in range(64):
            x = double(x) + 1.0
        return x

    lowered = atoll.program(chain).lower(VECTOR)
    assert len(lowered._built.program.nodes) == 128
    assert len(lowered._built.functions) == 2
    assert len(lowered._built.program.arguments) == 2


def test_an_operation_is_the_node_that_eager_jax_makes_of_it() -> None:
    program = body(lambda x: jnp.sin(x) + 1.0, VECTOR)
    assert kinds(program) == ["Call", "Call"]
    assert len(program.arguments) == 2  # including the constant


def test_what_depends_on_no_argument_is_computed_once() -> None:
    lowered = atoll.program(lambda x: x + jnp.arange(8.0) * 2).lower(VECTOR)
    # Only the addition, because the product is computed during tracing.
    assert kinds(lowered._built.program) == ["Call"]
    _, product = lowered._built.arguments
    np.testing.assert_array_equal(product.constant, 2 * np.arange(8.0))


def test_arrays_made_of_host_values_are_arrays() -> None:
    def function(x: Any) -> Any:
        made = [jnp.asarray(3), jnp.array(2.5), jnp.asarray(VECTOR), jnp.array(np.float32(1))]
        assert all(isinstance(each, jax.Array) for each in made)
        return x + made[2].at[0].set(made[1])

    assert kinds(body(function, VECTOR)) == ["Call"]


def test_nodes_that_no_result_needs_are_left_out() -> None:
    def function(x: Any) -> Any:
        double(x)
        return x + 1

    assert len(body(function, VECTOR).nodes) == 1


def test_values_that_lie_elsewhere_are_moved_once() -> None:
    one, two = mesh(0), mesh(2)
    on_two = jax.jit(lambda x: x * 2, in_shardings=NamedSharding(two, P("x")))
    other = jax.jit(lambda x: x - 1, in_shardings=NamedSharding(two, P("x")))
    x = jax.device_put(VECTOR, NamedSharding(one, P("x")))
    program = body(lambda x: (on_two(x), other(x)), x)
    assert kinds(program) == ["Transfer", "Call", "Call"]
    assert devices(program) == [(2, 3)] * 3
    moved = program.nodes[0]
    assert isinstance(moved, Transfer)
    assert moved.reshard


def test_another_sharding_of_the_same_devices_is_computed() -> None:
    rows, columns = NamedSharding(mesh(0), P("x")), NamedSharding(mesh(0), P(None, "x"))
    x = jax.device_put(np.ones((4, 4)), rows)
    program = body(lambda x: (jax.device_put(x, columns), jax.device_put(x * 2, columns)), x)
    assert kinds(program) == ["Call", "Call", "Call"]
    assert len([each for each in program.nodes if isinstance(each, Call) and each.function == 0]) == 2


@pytest.mark.parametrize(
    "target",
    [
        lambda: NamedSharding(Mesh(np.array(jax.devices()[1::-1]), "x"), P(None, "x")),  # another order of devices
        lambda: NamedSharding(mesh(1), P(None, "x")),
    ],
)
def test_a_sharding_of_other_devices_is_a_transfer(target: Any) -> None:
    x = jax.device_put(np.ones((4, 4)), NamedSharding(mesh(0), P("x")))
    assert kinds(body(lambda x: jax.device_put(x, target()), x)) == ["Transfer"]


def test_a_donated_argument_that_is_resharded_is_consumed_by_a_transfer() -> None:
    x = jax.device_put(np.ones((4, 4)), NamedSharding(mesh(0), P("x")))
    columns = NamedSharding(mesh(0), P(None, "x"))
    program = body(lambda x: jax.device_put(x, columns), x, donate_argnums=0)
    assert [node.donate for node in program.nodes if isinstance(node, Transfer)] == [True]


def test_a_pmap_runs_on_its_devices() -> None:
    a = jax.pmap(lambda x: x * 2, devices=jax.devices()[0:2])
    b = jax.pmap(lambda x: x + 1, devices=jax.devices()[2:4])
    program = body(lambda x: b(a(x)), VECTOR[:2])
    assert kinds(program) == ["Call", "Transfer", "Call"]
    assert devices(program) == [(0, 1), (2, 3), (2, 3)]
    assert program.arguments[0].sharding.devices == (0, 1)


def test_a_shard_map_runs_on_its_mesh_with_and_without_jit() -> None:
    mapped = jax.shard_map(lambda x: x * 2, mesh=mesh(4), in_specs=P("x"), out_specs=P("x"))
    for function in (mapped, jax.jit(mapped)):
        program = body(function, VECTOR)
        assert devices(program) == [(4, 5)]


def test_an_operation_runs_where_its_first_committed_operand_is() -> None:
    x, y = jax.device_put(VECTOR, at(3)), jax.device_put(VECTOR, at(5))
    program = body(lambda x, y: (x + y, y + x), x, y)
    calls = [node.devices for node in program.nodes if isinstance(node, Call)]
    assert calls == [(3,), (5,)]


def test_a_device_put_is_a_transfer_unless_it_lies_there() -> None:
    x = jax.device_put(VECTOR, at(3))
    program = body(lambda x: double(jax.device_put(jax.device_put(x, at(3)), at(1))), x)
    assert kinds(program) == ["Transfer", "Call"]


def test_a_device_put_may_name_a_memory() -> None:
    far = jax.device_put(VECTOR, NamedSharding(mesh(2), P("x")))
    program = body(lambda x, y: [jax.device_put(double(each), jax.memory.Space.Host) for each in (x, y)], 1.0, far)
    assert kinds(program) == ["Call", "Transfer"] * 2
    assert devices(program) == [(0,), (0,), (2, 3), (2, 3)]
    assert [node.outputs[0].sharding.memory_kind for node in program.nodes] == ["device", "pinned_host"] * 2


def test_host_values_go_where_they_are_used_first() -> None:
    on = functools.partial(jax.jit, lambda x: x * 2)
    first, second = (on(in_shardings=NamedSharding(mesh(i), P("x"))) for i in (2, 4))
    program = body(lambda x: (first(x), second(x)), VECTOR)
    assert program.arguments[0].sharding.devices == (2, 3)
    assert kinds(program) == ["Call", "Transfer", "Call"]


def test_a_tracer_knows_where_its_array_lies() -> None:
    x = jax.device_put(VECTOR, at(3))
    seen = []

    def function(x: Any) -> Any:
        seen.extend([x.sharding, double(x).sharding, x.committed])
        return double(x)

    body(function, x)
    assert seen == [at(3), at(3), True]


def test_results_may_repeat_and_be_arguments() -> None:
    lowered = atoll.program(lambda x: (double(x), x, (y := double(x)), y, 3)).lower(VECTOR)
    assert len(set(lowered._built.program.results)) == len(lowered._built.program.results) == 2
    assert [leaf.shape for leaf in jax.tree.leaves(lowered.out_info)] == [(8,)] * 4 + [()]


def test_arguments_with_other_numbers_of_shards_come_first() -> None:
    wide = jax.device_put(VECTOR, NamedSharding(mesh(0), P("x")))
    program = body(lambda a, b, c: (double(a), double(b), double(c)), wide, jnp.ones(3), wide)
    assert [len(spec.sharding.devices) for spec in program.arguments] == [1, 2, 2]


# ---- the function it is made of


def test_a_program_is_its_function_to_whoever_looks() -> None:
    @atoll.program
    def step(x: Any, *, scale: float = 1.0) -> Any:
        """Takes a step."""
        return x * scale

    assert (step.__name__, step.__doc__) == ("step", "Takes a step.")
    assert list(inspect.signature(step).parameters) == ["x", "scale"]
    assert copy.deepcopy({"step": step})["step"] is step


def test_on_other_backends_and_under_transformations_the_function_is_called() -> None:
    program = atoll.program(lambda x: (x**2).sum())
    assert program(VECTOR) == (VECTOR**2).sum()
    np.testing.assert_array_equal(jax.grad(program)(VECTOR), 2 * VECTOR)
    np.testing.assert_array_equal(jax.vmap(program)(VECTOR[:, None]), VECTOR**2)
    assert jax.jit(program)(VECTOR) == (VECTOR**2).sum()


def test_inner_programs_are_part_of_the_outer() -> None:
    inner = atoll.program(lambda x: double(x) + 1)
    assert kinds(body(lambda x: inner(inner(x)), VECTOR)) == ["Call"] * 4


def test_a_function_is_traced_once_for_each_kind_of_arguments() -> None:
    traced = []

    @functools.partial(atoll.program, static_argnames="n")
    def function(x: Any, n: int = 1) -> Any:
        traced.append(n)
        return double(x) if isinstance(x, jax.core.Tracer) else x

    def count(*args: Any, **kwargs: Any) -> int:
        function(*args, **kwargs)
        return len(function._cache)

    x = jnp.asarray(VECTOR)
    assert count(x) == count(x + 1) == 1
    assert count(x, n=2) == 2
    assert count(x, 2) == 3
    assert count(jax.device_put(VECTOR, at(1))) == 4
    assert count(VECTOR) == 5
    assert count(1.0) == count(2.0) == 6
    special = [np.arange(n).view(type("Special", (np.ndarray,), {})) for n in (3, 4)]
    assert count(special[0]) == 7
    assert count(special[1]) == 8
    with jax.numpy_dtype_promotion("strict"):
        assert count(x) == 9


def test_static_arguments_must_be_hashable() -> None:
    with pytest.raises(TypeError, match="static argument 1 of program '<lambda>' is not hashable"):
        atoll.program(lambda x, y: x, static_argnums=1)(1.0, [])


# ---- donation


def test_a_donation_inside_consumes_the_argument() -> None:
    (call,) = body(consume, VECTOR).nodes
    assert isinstance(call, Call)
    assert call.donated == (0,)


def test_a_donated_argument_is_consumed_by_its_last_user() -> None:
    program = body(lambda x: (double(x), double(double(x))), jnp.asarray(VECTOR), donate_argnums=0)
    assert [node.donated for node in program.nodes if isinstance(node, Call)] == [(), (0,), ()]


def test_a_constant_of_the_programs_own_is_never_consumed() -> None:
    (call,) = body(lambda x: consume(np.arange(8.0)) if x is None else x + consume(jnp.arange(8.0)), VECTOR).nodes
    assert isinstance(call, Call)
    assert call.donated == ()


def test_a_function_that_consumes_several_arguments_is_made_once_for_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[set[int]] = []
    donating = FunctionTable.donating

    def counted(table: FunctionTable, function: Any, more: set[int]) -> Any:
        made.append(more)
        return donating(table, function, more)

    monkeypatch.setattr(FunctionTable, "donating", counted)
    add = jax.jit(lambda x, y: (x + 1, y + 1))
    (call,) = body(add, *(jnp.asarray(VECTOR + i) for i in range(2)), donate_argnums=(0, 1)).nodes
    assert call.donated == (0, 1)
    assert made == [{0, 1}]


def test_a_host_value_can_be_used_after_a_donation_of_its_upload() -> None:
    first, _ = body(lambda x: (consume(x), double(x)), VECTOR).nodes
    assert isinstance(first, Call)
    assert first.donated == ()


def test_two_device_puts_give_two_arrays() -> None:
    def function(x: Any) -> Any:
        one, other = (jax.device_put(x, jax.devices()[1]) for _ in range(2))
        return consume(one), other

    for given, expected in [
        (jax.device_put(VECTOR, jax.devices()[0]), ["Transfer", "Call"]),
        (VECTOR, ["Call"]),
    ]:
        program = body(function, given)
        assert kinds(program) == expected
        assert [node.donated for node in program.nodes if isinstance(node, Call)] == [()]


def test_a_use_after_donation_names_both_lines() -> None:
    def function(x: Any) -> Any:
        y = double(x)
        z = consume(y)
        return y + z

    first = inspect.getsourcelines(function)[1]
    with pytest.raises(ProgramError) as caught:
        body(function, VECTOR)
    message = str(caught.value)
    assert f"test_tracing.py:{first + 3}" in message
    assert f"donated at {__file__}:{first + 2}" in message


# ---- what cannot be traced


@pytest.mark.parametrize(
    "look",
    [bool, float, int, np.asarray, lambda x: x.tolist()],
    ids=["bool", "float", "int", "numpy", "list"],
)
def test_python_cannot_look_at_a_value(look: Any) -> None:
    def function(x: Any) -> Any:
        return look(double(x))

    line = inspect.getsourcelines(function)[1] + 1
    with pytest.raises((jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError)) as caught:
        body(function, 1.0)
    message = str(caught.value)
    assert re.search(rf"test_tracing\.py:{line}\b", message)
    assert "'function'" in message
    assert "atoll.cond" in message
    assert "static_argnums" in message


def test_a_call_with_effects_is_kept_whatever_becomes_of_its_results() -> None:
    @jax.jit
    def talkative(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x

    def function(x: Any) -> Any:
        talkative(x)
        double(x)
        jax.debug.print("{}", x)
        return x + 1

    assert kinds(body(function, VECTOR)) == ["Call", "Call", "Call"]


def test_ordered_effects_cannot_be_lowered() -> None:
    @jax.jit
    def talkative(x: Any) -> Any:
        jax.debug.print("{}", x, ordered=True)
        return x

    with pytest.raises(ProgramError, match=r"talkative at .* has ordered effects"):
        body(lambda x: talkative(x), VECTOR)


def test_a_function_that_writes_into_a_mutable_array_of_others_is_refused() -> None:
    sums = jax.new_ref(jnp.zeros(()))

    @jax.jit
    def adding(x: Any) -> Any:
        sums[...] += x.sum()
        return x

    with pytest.raises(ProgramError, match=r"mutable array"):
        body(lambda x: adding(x), VECTOR)


def test_a_function_may_have_mutable_arrays_of_its_own() -> None:
    @jax.jit
    def function(x: Any) -> Any:
        sums = jax.new_ref(x)
        sums[...] += 1
        return sums[...]

    assert kinds(body(function, VECTOR)) == ["Call"]


def test_mutable_arrays_of_a_program_are_refused() -> None:
    ref = jax.new_ref(VECTOR)
    for function in (lambda x: jax.new_ref(x)[...], lambda x: ref.__setitem__(..., x)):
        with pytest.raises(ProgramError, match=r"at .*test_tracing.* mutable array .*inside of a jit function"):
            body(function, jnp.asarray(VECTOR))


def test_results_and_arguments_are_arrays() -> None:
    with pytest.raises(ProgramError, match=r"returns <class 'object'>"):
        body(lambda x: object(), VECTOR)
    with pytest.raises(TypeError, match=r"argument x of a program is not an array.*static_argnums"):
        body(lambda x: x, "text")


def test_an_argument_is_named_as_in_its_function() -> None:
    def function(n: int, x: Any, *more: Any, scale: Any = 1.0) -> None: ...

    for args, kwargs, name in [
        ((1, {"mode": "text"}), {}, r"x\['mode'\]"),
        ((1, 2.0, 3.0, "text"), {}, r"args\[3\]"),
        ((1, 2.0), {"scale": "text"}, "scale"),
    ]:
        with pytest.raises(TypeError, match=f"argument {name} of a program"):
            atoll.program(function, static_argnums=0).lower(*args, **kwargs)


def test_options_that_name_no_argument_are_refused() -> None:
    for option in ("static_argnames", "donate_argnames"):
        with pytest.raises(ValueError, match=r"step has no argument 'm'; it takes \['x', 'n'\]"):
            atoll.program(step, **{option: "m"})
    atoll.program(lambda **kwargs: 1, static_argnames="m")
    for option in ("static_argnums", "donate_argnums"):
        for number in (2, -3):
            with pytest.raises(ValueError, match=f"{option}={number}: step takes only \\['x', 'n'\\]"):
                atoll.program(step, **{option: number})
            with pytest.raises(ValueError, match=option):  # as JAX does
                jax.jit(step, **{option: number})
        atoll.program(lambda *args: 1, **{option: 7})


def step(x: Any, n: int) -> Any:
    return x * n


def test_a_call_takes_no_types() -> None:
    with pytest.raises(TypeError, match=r"called with arrays, not with ShapeDtypeStruct.*lower\(\) takes types"):
        atoll.program(double)(jax.ShapeDtypeStruct((3,), "float32"))


def test_an_index_that_depends_on_values_is_an_error_with_the_way_out() -> None:
    with pytest.raises(jax.errors.NonConcreteBooleanIndexError) as caught:
        body(lambda x: x[x > 0], VECTOR)
    assert "jax.numpy.where" in "".join(caught.value.__notes__)


def test_only_a_cluster_plans_and_compiles() -> None:
    lowered = atoll.program(double).lower(VECTOR)
    for ask in (lowered.compile, functools.partial(lowered.as_text, stage="lowered")):
        with pytest.raises(ProgramError, match=r"on another backend.*JAX_PLATFORMS=atoll"):
            ask()


def test_a_value_that_escapes_is_an_error() -> None:
    kept: list[Any] = []
    body(lambda x: kept.append(x) or double(x), VECTOR)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        _ = kept[0] + 1
