"""Functions that the tests of programs call in their child.

`FUNCTIONS` contains functions on several islands, written as for stock JAX. Each takes SQUARE.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

RNG = np.random.default_rng(0)
SQUARE = RNG.standard_normal((8, 8)).astype(np.float32)


def meshes() -> tuple[Mesh, Mesh]:
    """Return one mesh on each island."""
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    return Mesh(devices[0], ("x", "y")), Mesh(devices[1], ("x", "y"))


def on(mesh: Mesh, *spec: Any) -> NamedSharding:
    return NamedSharding(mesh, P(*spec))


def host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


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


def custom_derivative_rules(v: Any) -> Any:
    return sine(v), jax.grad(lambda x: sine(x).sum())(v), jax.jit(sine)(v), jax.linearize(jnp.tanh, v)[1](v)


def two_stages(v: Any) -> Any:
    """Run a training step of a model whose halves are on two islands."""
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
    custom_derivative_rules,
    two_stages,
    closed_over_values,
    other_dtypes,
    samples,
    same_twice,
)  # fmt: skip


def nested() -> Any:
    """Call programs within a program, also jitted, differentiated and mapped. The last result is the expected value."""
    import atoll

    inner = atoll.program(lambda x: (jnp.sin(x), x))
    outer = atoll.program(lambda x: inner(x * 2)[0] + inner(x)[1])
    x = jnp.arange(4.0)
    expected = jnp.sin(x * 2) + x
    return host((outer(x), jax.jit(outer)(x), jax.grad(lambda x: outer(x).sum())(x), jax.vmap(outer)(x), expected))
