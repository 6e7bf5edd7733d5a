"""Programs on a real cluster of two islands: with and without `atoll.program`, the same values bit for bit.

Functions named without `test_` run in the child; `compared` calls a function both ways there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.end_to_end.remote_python import RemoteError, RemotePython, StartPython
from tests.end_to_end.same import assert_same
from tests.end_to_end.standing_cluster import StartCluster

RNG = np.random.default_rng(0)
SQUARE = RNG.standard_normal((8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def python(start_python: StartPython) -> RemotePython:
    return start_python("2x1x4")


def meshes() -> tuple[Mesh, Mesh]:
    """One on each island."""
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    return Mesh(devices[0], ("x", "y")), Mesh(devices[1], ("x", "y"))


def on(mesh: Mesh, *spec: Any) -> NamedSharding:
    return NamedSharding(mesh, P(*spec))


def host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


# ---- functions over several islands: each takes SQUARE


def figure_2(v: Any) -> Any:
    a = jax.pmap(lambda x: x * 2.0, devices=jax.devices()[0:2])
    b = jax.pmap(lambda x: x + 1.0, devices=jax.devices()[2:4])
    c = jax.pmap(lambda x: x / 2.0, devices=jax.devices()[4:6])
    x = a(v[:2])
    return b(x), a(c(x))


def jits_with_shardings(v: Any) -> Any:
    first, second = meshes()
    one = jax.jit(lambda x: x @ x.T, in_shardings=on(first, "x", "y"), out_shardings=on(first, "x"))
    two = jax.jit(lambda x: jnp.tanh(x).sum(0), in_shardings=on(second, "y"), out_shardings=on(second))
    x = one(jax.device_put(v, on(first, "x", "y")))
    y = two(jax.device_put(x, on(second, "y")))
    return x, y


def shardings_that_only_xla_knows(v: Any) -> Any:
    first, second = meshes()
    x = jax.jit(lambda x: x @ x)(jax.device_put(v, on(first, "x", "y")))
    y = jax.jit(lambda x: (x.T * 2, x.sum()))(jax.device_put(x, on(second, None, "x")))
    return x, y


def shard_maps(v: Any) -> Any:
    first, second = meshes()

    def rows(mesh: Mesh) -> Any:
        body = jax.shard_map(lambda x: x - jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
        return jax.jit(body)

    return rows(second)(jax.device_put(rows(first)(jax.device_put(v, on(first, "x"))), on(second, "x")))


def ordinary_operations(v: Any) -> Any:
    first, _ = meshes()
    x = jax.device_put(v, on(first, "x")) * 3
    y = jnp.where(x > 0, x, -x)[1:3].T + np.float32(1.5)
    return {"x": x, "y": y, "z": [x.sum(), jnp.linalg.norm(y), jnp.arange(3) + 1], "n": None}


def derivatives(v: Any) -> Any:
    loss = jax.jit(lambda w, x: jnp.mean(jax.nn.relu(x @ w) ** 2))
    value, slope = jax.value_and_grad(loss)(v, v + 1)
    second = jax.vmap(jax.grad(lambda x: jnp.sin(x) * jax.nn.softplus(x)))(v[0])
    return value, slope, second, jax.checkpoint(lambda x: jnp.cos(x) * x)(v)


def keys(v: Any) -> Any:
    key = jax.random.key(int(v.shape[0]))
    one, two = jax.random.split(jax.random.fold_in(key, 3))
    return jax.random.normal(one, (3,)) + v[0, :3], jax.random.key_data(two)


def keys_of_values(v: Any) -> Any:
    key = jax.random.key(v[0, 0].astype(jnp.int32))
    return jax.random.uniform(jax.random.split(key)[0], (3,)), jax.random.key_data(key)


def control_flow(v: Any) -> Any:
    x = jnp.asarray(v)
    y = jax.lax.scan(lambda carry, row: (carry + row, carry * row), x[0], x)
    z = jax.lax.fori_loop(0, 3, lambda i, z: z * x, x)
    return jax.lax.cond(x[0, 0] > 0, lambda: y, lambda: (y[0] * 2, y[1])), z


def copies(v: Any) -> Any:
    device = jax.devices()[5]
    x = jax.device_put(v, device)
    y = jax.device_put(x, device, may_alias=False)
    consume = jax.jit(lambda a: a + 1, donate_argnums=0)
    return consume(y), x, jnp.copy(x), jax.device_put(x, jax.devices()[1])


def constraints(v: Any) -> Any:
    first, second = meshes()
    x = jax.lax.with_sharding_constraint(jax.device_put(v, on(first, "x")) * 2, on(first, "y"))
    transposed = Mesh(first.devices.T, ("x", "y"))
    y = jax.jit(lambda x: jax.lax.with_sharding_constraint(x + 1, on(second, None, ("x", "y"))))(np.asarray(SQUARE))
    return x, y, jax.device_put(x, on(transposed, "x"))


@jax.custom_vjp
def sine(x: Any) -> Any:
    return jnp.sin(x)


sine.defvjp(lambda x: (sine(x), x), lambda x, g: (g * x,))


def rules_of_ones_own(v: Any) -> Any:
    return sine(v), jax.grad(lambda x: sine(x).sum())(v), jax.jit(sine)(v), jax.linearize(jnp.tanh, v)[1](v)


def two_stages(v: Any) -> Any:
    """A training step of a model whose halves are on two islands."""
    first, second = meshes()
    w = jax.device_put(v, on(first, "x")), jax.device_put(v + 1, on(second, None, "y"))
    lower = jax.jit(lambda w, x: jnp.tanh(x @ w))
    upper = jax.jit(jax.value_and_grad(lambda w, h: jnp.mean((h @ w) ** 2), argnums=(0, 1)))
    back = jax.jit(lambda w, x, g: jax.vjp(lambda w: lower(w, x), w)[1](g)[0])
    x = jax.device_put(v, w[0].sharding)
    loss, (high, error) = upper(w[1], jax.device_put(lower(w[0], x), w[1].sharding))
    low = back(w[0], x, jax.device_put(error, x.sharding))
    return loss, w[0] - 0.1 * low, w[1] - 0.1 * high


def closed_over_values(v: Any) -> Any:
    x = jnp.asarray(v) * 1
    return jax.jit(lambda y: x + y)(v), jax.lax.map(lambda row: row @ x, x), jax.vmap(lambda row: row * x)(x)


def other_dtypes(v: Any) -> Any:
    x = jnp.asarray(v)
    small = x.astype(jnp.bfloat16) + 1, x.astype(jnp.int4) * 1, x.astype(jnp.float8_e4m3fn) * 1
    return tuple(each.astype(jnp.float32) for each in small), x > 0, x.astype(complex) * 1j


def samples(v: Any) -> Any:
    key = jax.random.key(7)
    table = jnp.asarray(SQUARE).at[0].add(v[0])
    return jax.random.choice(key, 5, (3,)) + v[0, 0], jnp.array(3).astype(float) * v, table


def same_twice(v: Any) -> Any:
    x = jnp.asarray(v) + 1
    return x, x, [x, x * 1]


FUNCTIONS = (
    figure_2,
    jits_with_shardings,
    shardings_that_only_xla_knows,
    shard_maps,
    ordinary_operations,
    derivatives,
    keys,
    keys_of_values,
    control_flow,
    copies,
    constraints,
    rules_of_ones_own,
    two_stages,
    closed_over_values,
    other_dtypes,
    samples,
    same_twice,
)  # fmt: skip


def compared(function: Callable[..., Any], commit: str) -> Any:
    """Its results without and with a program, the latter twice; how they are committed; which lie elsewhere with it."""
    import atoll

    v: Any = {
        "numpy": lambda: SQUARE,
        "uncommitted": lambda: jnp.asarray(SQUARE),
        "committed": lambda: jax.device_put(SQUARE, jax.devices()[0]),
    }[commit]()
    decorated = atoll.program(function)
    if (function, commit) == (figure_2, "committed"):
        # Without a program, pmap takes no arrays that are committed to other devices; a program moves them.
        with pytest.raises(ValueError, match="pmap"):
            function(v)
        plain = function(SQUARE)
    else:
        plain = function(v)
    results = [plain, decorated(v), decorated(v)]
    places = [[x.committed for x in jax.tree.leaves(each)] for each in results]
    shardings = [[x.sharding for x in jax.tree.leaves(each)] for each in results]
    elsewhere = {
        jax.tree_util.keystr(path)
        for other in shardings[1:]
        for a, b, (path, x) in zip(shardings[0], other, jax.tree.leaves_with_path(plain), strict=True)
        if not a.is_equivalent_to(b, x.ndim)
    }
    assert len(decorated._cache) == 1
    return [host(each) for each in results], places, elsewhere


@pytest.mark.parametrize("commit", ["numpy", "uncommitted", "committed"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
def test_a_program_gives_what_its_function_gives(python: RemotePython, function: Any, commit: str) -> None:
    (plain, first, again), committed, elsewhere = python.call(compared, function, commit)
    assert_same(first, plain)
    assert_same(again, plain)
    assert committed[1] == committed[2] == committed[0]
    # Indexing an array and indexing a tracer are different operations to jax.numpy, and XLA shards them differently.
    assert elsewhere == ({"['y']"} if function is ordinary_operations else set())


# ---- arguments


def arguments() -> Any:
    import atoll

    first, second = meshes()

    @functools.partial(atoll.program, static_argnums=1, static_argnames="kind")
    def f(tree: Any, times: int, *rest: Any, scale: Any, kind: str = "a") -> Any:
        total = tree["x"]
        for _ in range(times):
            total = total + tree["y"] * scale
        return total, rest, kind == "a" and tree["x"], 7

    x = jax.device_put(np.arange(8.0), on(first, "x"))
    y = jax.device_put(np.arange(8.0), on(second))
    got = [
        f({"x": x, "y": y}, 2, 1, np.int8(3), scale=2.5),
        f({"x": x, "y": y}, 3, 1, np.int8(3), scale=2.5),
        f({"x": x, "y": 2.0}, 3, scale=np.float32(1), kind="b"),
    ]
    results = host(got)
    assert got[0][2] is x
    return results


def test_arguments_are_trees_of_anything_anywhere(python: RemotePython) -> None:
    two, three, other = python.call(arguments)
    x = np.arange(8.0)
    np.testing.assert_array_equal(two[0], x + x * 5)
    np.testing.assert_array_equal(three[0], x + x * 7.5)
    np.testing.assert_array_equal(other[0], x + 6)
    assert two[1] == (1, np.int8(3))
    assert other[2] is np.False_ or not other[2]
    assert two[3] == 7


def returned_argument() -> list[bool]:
    import atoll

    results = atoll.program(lambda x: (x, x + 1, jax.device_put(x, jax.devices()[0])))(np.arange(4.0))
    return [each.committed for each in results]


def test_a_host_value_that_is_returned_stays_free_to_go_anywhere(python: RemotePython) -> None:
    assert python.call(returned_argument) == [False, False, True]


def with_debug_nans() -> None:
    import atoll

    with jax.debug_nans(True):
        atoll.program(lambda x: jnp.log(x))(-1.0)


def test_debug_nans_is_heeded(python: RemotePython) -> None:
    with pytest.raises(RemoteError, match=r"FloatingPointError: program .* returns nan"):
        python.call(with_debug_nans)


def closures() -> Any:
    import atoll

    weights = jax.device_put(SQUARE, jax.devices()[6])
    table = SQUARE.copy()

    @atoll.program
    def f(x: Any) -> Any:
        return x @ weights + table * 2.0, weights

    first = host(f(weights))
    table[:] = 0
    return first, host(f(weights)), host(weights @ weights + SQUARE * 2.0)


def test_what_a_function_closes_over_is_part_of_its_program(python: RemotePython) -> None:
    first, again, expected = python.call(closures)
    assert_same(first[0], expected)
    assert_same(again[0], expected)
    assert_same(first[1], SQUARE)


def nested() -> Any:
    import atoll

    inner = atoll.program(lambda x: (jnp.sin(x), x))
    outer = atoll.program(lambda x: inner(x * 2)[0] + inner(x)[1])
    x = jnp.arange(4.0)
    expected = jnp.sin(x * 2) + x
    return host((outer(x), jax.jit(outer)(x), jax.grad(lambda x: outer(x).sum())(x), jax.vmap(outer)(x), expected))


def test_programs_nest_and_are_transformed(python: RemotePython) -> None:
    outer, jitted, slope, mapped, expected = python.call(nested)
    assert_same(outer, expected)
    np.testing.assert_allclose(jitted, expected)
    np.testing.assert_allclose(slope, 2 * np.cos(2 * np.arange(4.0)) + 1)
    assert_same(mapped, expected)


def typed_keys() -> Any:
    import atoll

    _, second = meshes()
    split = atoll.program(lambda k: (jax.vmap(jax.random.split)(k), jax.vmap(lambda k: jax.random.normal(k, (3,)))(k)))
    many = jax.device_put(jax.random.split(jax.random.key(3), 4), on(second, "x"))
    keys, numbers = split(many)
    return [host((jax.random.key_data(k), n)) for k, n in ((keys, numbers), split.__wrapped__(many))]


def test_keys_are_arguments_and_results(python: RemotePython) -> None:
    got, expected = python.call(typed_keys)
    assert_same(got, expected)


def explicit_meshes() -> Any:
    import atoll

    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(explicit, explicit), devices=jax.devices()[4:])
    x = jax.device_put(SQUARE, NamedSharding(mesh, P("x", "y")))
    program = atoll.program(lambda x: (jnp.sin(x) * 2, jax.jit(lambda a: a.T + 1)(x), x.sum(0)))
    with jax.set_mesh(mesh):
        return host(program(x)), host(program.__wrapped__(x))


def test_shardings_may_be_part_of_the_types(python: RemotePython) -> None:
    got, expected = python.call(explicit_meshes)
    assert_same(got, expected)


def threads() -> list[str]:
    import threading

    import atoll

    first, _ = meshes()
    wide, narrow = jax.device_put(SQUARE, on(first, "x")), jnp.ones(3)
    program = atoll.program(lambda a, b: (a * 2, b + 1))  # the arguments have different numbers of shards
    errors: list[str] = []

    def work(number: int) -> None:
        try:
            for i in range(50):
                _, result = program(wide, narrow * (number + i))
                assert np.asarray(result)[0] == number + i + 1
        except Exception as error:
            errors.append(repr(error))

    workers = [threading.Thread(target=work, args=(100 * i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return errors


def test_threads_share_a_program(python: RemotePython) -> None:
    assert python.call(threads) == []


def deleted() -> None:
    import atoll

    x = jnp.ones(3)
    x.delete()
    atoll.program(lambda x: x + 1)(x)


def test_a_deleted_argument_is_an_error_as_in_jit(python: RemotePython) -> None:
    with pytest.raises(RemoteError, match=r"RuntimeError: Array has been deleted with shape=float64\[3\]"):
        python.call(deleted)


# ---- islands that go and come back


def keep_a_program() -> Any:
    import atoll

    far = jax.devices()[1]
    globals()["_kept"] = atoll.program(lambda x: jax.device_put(x, far) * 2.5 + jnp.arange(4))
    return call_it()


def call_it() -> Any:
    return host(globals()["_kept"](np.arange(4.0)))


def test_a_program_runs_again_when_an_island_with_its_constants_is_back(
    start_cluster: StartCluster, start_python: StartPython
) -> None:
    cluster = start_cluster(islands="2x1x1")
    client = start_python(ATOLL_ADDRESS=cluster.address)
    expected = client.call(keep_a_program)
    before = cluster.worker(1)
    before.kill()
    cluster.until(lambda report: report["islands"][1]["hosts"][0]["pid"] not in (0, None, before.pid), 60.0)
    assert_same(client.call(call_it), expected)


# ---- donation


def donated(kind: str) -> Any:
    import atoll

    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    plain = jax.jit(lambda x: x + 1)
    programs = {
        "inside": atoll.program(lambda x: step(x) * 2),
        "outside": atoll.program(lambda x: plain(x) * 2, donate_argnums=0),
        "put": atoll.program(lambda x: jax.device_put(x, jax.devices()[7], donate=True)),
        "neither": atoll.program(lambda x: plain(x) * 2),
        "constant": atoll.program(lambda x: step(np.arange(4.0)) * x),
        "returned": atoll.program(lambda x: (plain(x), x), donate_argnums=0),
    }
    results = []
    for _ in range(3):
        x = jax.device_put(np.arange(4.0), jax.devices()[4])
        y = programs[kind](x)
        results.append((host(y), x.is_deleted()))
    return results


@pytest.mark.parametrize(
    ("kind", "consumed"),
    [("inside", True), ("outside", True), ("put", True), ("neither", False), ("constant", False), ("returned", False)],
)
def test_donated_arguments_are_deleted_as_by_jit(python: RemotePython, kind: str, consumed: bool) -> None:
    results = python.call(donated, kind)
    assert [deleted for _, deleted in results] == [consumed] * 3
    for value, _ in results[1:]:
        assert_same(value, results[0][0])


# ---- the stages


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


# ---- errors and hostile payloads


def submitted(change: str) -> None:
    import msgspec
    from jax.extend.ifrt_programs import ifrt_programs as programs

    from atoll.ir.program import Call, HostToDevice, Program, Transfer
    from atoll.ir.submission import MAGIC, Staging, Submission, encode
    from atoll.ir.types import ArraySpec, Replicated, Sharding, Tiled

    devices = jax.devices()
    x = jax.device_put(np.arange(4, dtype=np.float32), devices[0])
    compiled = jax.jit(lambda x: x * 2, donate_argnums=0).lower(x).compile()
    name = compiled.runtime_executable().fingerprint
    spec = ArraySpec("float32", (4,), Sharding((0,)))
    call = Call(0, (0,), (spec,), (0,))
    good = Program("p", (spec,), (call,), (1,))

    def nodes(*nodes: Any, **changes: Any) -> Program:
        return msgspec.structs.replace(good, nodes=nodes, **changes)

    def array(**changes: Any) -> Program:
        return msgspec.structs.replace(good, arguments=(msgspec.structs.replace(spec, **changes),))

    replace = msgspec.structs.replace
    far = ArraySpec("float32", (4,), Sharding((99,)))
    cut = Sharding((0, 1), Tiled((3,), (0, 1)))
    payloads: dict[str, Any] = {
        "good": Submission(good, (name,)),
        "garbage": MAGIC + b"\xff\x00",
        "empty": MAGIC,
        "version": Submission(good, (name,), 99),
        "function": Submission(good, (b"other",)),
        "no functions": Submission(good, ()),
        "negative function": Submission(nodes(replace(call, function=-1)), (name,)),
        "value": Submission(nodes(replace(call, inputs=(7,))), (name,)),
        "inputs": Submission(nodes(replace(call, inputs=(0, 0))), (name,)),
        "outputs": Submission(nodes(replace(call, outputs=())), (name,)),
        "output shape": Submission(nodes(replace(call, outputs=(replace(spec, shape=(5,)),))), (name,)),
        "completion": Submission(nodes(replace(call, completion=True)), (name,)),
        "donated twice": Submission(nodes(replace(call, donated=(0,)), replace(call, donated=(0,))), (name,)),
        "donated result": Submission(nodes(call, replace(call, inputs=(1,), donated=(0,)), results=(1, 2)), (name,)),
        "result twice": Submission(replace(good, results=(1, 1)), (name,)),
        "argument returned": Submission(replace(good, results=(0,)), (name,)),
        "feeds": Submission(replace(good, feeds=1), (name,)),
        "host data": Submission(nodes(HostToDevice((), (spec,))), (name,)),
        "copy": Submission(nodes(Transfer((0,), (spec,))), (name,)),
        "far": Submission(nodes(Transfer((0,), (far,), reshard=True)), (name,)),
        "cut": Submission(nodes(Transfer((0,), (replace(spec, sharding=cut),), reshard=True)), (name,)),
        "transfer shape": Submission(nodes(Transfer((0,), (replace(spec, shape=(3,)),), reshard=True)), (name,)),
        "dtype": Submission(array(dtype="float31"), (name,)),
        "token": Submission(array(dtype="token"), (name,)),
        "shape": Submission(array(shape=(-1,)), (name,)),
        "huge": Submission(array(shape=(1 << 40, 1 << 40)), (name,)),
        "wrong argument": Submission(array(shape=(8,)), (name,)),
        "no devices": Submission(array(sharding=Sharding((), Replicated())), (name,)),
        "layout": Submission(array(layout=(1,)), (name,)),
        "nothing": Submission(Program("p", (), (), ()), ()),
        "staging": Staging((99,)),
        "staging twice": Staging((0, 0)),
    }
    payload = payloads[change]
    data = payload if isinstance(payload, bytes) else encode(payload)
    client = devices[0].client
    loaded = client.compile_ifrt_program(programs.make_plugin_program(data), programs.make_plugin_compile_options())
    (result,) = loaded.execute_sharded([x]).consume_with_handlers([lambda arrays: arrays])
    del result
    other = jax.device_put(np.arange(5, dtype=np.float32), devices[0])
    loaded.execute_sharded([other]).consume_with_handlers([lambda arrays: arrays])[0][0].block_until_ready()


BAD = (
    "garbage",
    "empty",
    "version",
    "function",
    "no functions",
    "negative function",
    "value",
    "inputs",
    "outputs",
    "output shape",
    "completion",
    "donated twice",
    "donated result",
    "result twice",
    "argument returned",
    "feeds",
    "host data",
    "copy",
    "far",
    "cut",
    "transfer shape",
    "dtype",
    "token",
    "shape",
    "huge",
    "wrong argument",
    "no devices",
    "layout",
    "nothing",
    "staging",
    "staging twice",
)  # fmt: skip


@pytest.mark.parametrize("change", BAD)
def test_a_program_that_makes_no_sense_is_an_invalid_argument(python: RemotePython, change: str) -> None:
    with pytest.raises(RemoteError, match=r"INVALID_ARGUMENT"):
        python.call(submitted, change)
    assert python.call(nested)[4].shape == (4,)


def test_a_program_on_arguments_of_other_shapes_is_an_invalid_argument(python: RemotePython) -> None:
    with pytest.raises(RemoteError, match=r"INVALID_ARGUMENT.*takes float32\[4\].*got float32\[5\]"):
        python.call(submitted, "good")


def released() -> Any:
    """A program runs on when its function has been released in every way that a client has."""
    import gc

    import atoll

    results = []
    for i in range(3):
        program = atoll.program(lambda x, i=i: jax.jit(lambda x: x + i)(x) * 2)
        results.append(program(np.arange(4.0)))
        del program
        jax.clear_caches()
        gc.collect()
    return host(results)


def test_programs_and_their_functions_are_released_in_any_order(python: RemotePython) -> None:
    for i, result in enumerate(python.call(released)):
        np.testing.assert_array_equal(result, (np.arange(4.0) + i) * 2)
