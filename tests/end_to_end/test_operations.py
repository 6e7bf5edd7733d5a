"""Tests of operations that are sent to workers in a special form: the results are those of stock JAX.

Each function without `test_` in its name runs twice: here on stock JAX, and in a child on Atoll.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.end_to_end.remote_python import RemoteError, RemotePython


def ordered_effects() -> Any:
    """Run two programs whose order a token keeps: the first one returns the token, and the second one takes it."""
    from jax._src import core, dispatch, effects
    from jax._src.interpreters import mlir

    class Order(effects.Effect):
        pass

    order = Order()
    for kinds in (effects.lowerable_effects, effects.ordered_effects):
        kinds.add_type(Order)
    step = core.Primitive("step")
    step.multiple_results = True
    step.def_effectful_abstract_eval(lambda: ((), {order}))

    def lower(context: Any) -> list[Any]:
        context.set_tokens_out(context.tokens_in)
        return []

    mlir.register_lowering(step, lower)

    @jax.jit
    def call(x: Any) -> Any:
        step.bind()
        return x + 1

    result = call(call(np.float32(1)))
    dispatch.runtime_tokens.block_until_ready()
    return np.asarray(result)


def test_programs_that_return_tokens_run(same_as_stock: Any) -> None:
    same_as_stock(ordered_effects)


def asynchronous_sum() -> Any:
    """Use an operation of StableHLO 1.16. jaxlib's client writes 1.13."""
    from jax._src.lax import parallel

    mesh = Mesh(np.array(jax.devices()[:4]), ("x",))

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    def call(x: Any) -> Any:
        return parallel.all_gather_start(x, "x", tiled=True).done().sum(0, keepdims=True) * x

    return np.asarray(call(jax.device_put(np.arange(8.0).reshape(4, 2), NamedSharding(mesh, P("x")))))


def test_operations_that_are_younger_than_what_the_client_writes_run(same_as_stock: Any) -> None:
    same_as_stock(asynchronous_sum)


def sparse_product() -> Any:
    """Multiply sparse matrices.

    On CPUs this is a custom call that JAX registers in the script when it imports `jax.experimental.sparse`.
    """
    from jax.experimental import sparse

    entries = np.array([1, 2, 3, 4], np.float32), np.array([0, 1, 2, 3]), np.array([0, 1, 3, 3])
    matrix = sparse.BCSR(tuple(jax.numpy.asarray(each) for each in entries), shape=(3, 4))
    call = jax.jit(lambda matrix, x: matrix @ x)
    assert "cpu_csr_sparse_dense_ffi" in call.lower(matrix, np.ones(4, np.float32)).as_text()
    return np.asarray(call(matrix, np.arange(4, dtype=np.float32)))


def test_products_of_sparse_matrices_run(same_as_stock: Any) -> None:
    same_as_stock(sparse_product)


def unknown_operation() -> None:
    """Return a program that no version of StableHLO can represent."""
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    with context, ir.Location.unknown(context):
        module = ir.Module.parse('module @broken { func.func public @main() { "nobody.knows"() : () -> () return } }')
        device = jax.devices()[0]
        options = compiler.get_compile_options(1, 1, np.array([[device.id]]))
        compiler.backend_compile_and_load(device.client, module, xla_client.DeviceList((device,)), options, [])


def test_what_no_version_can_hold_is_refused_with_the_operation(atoll_python: RemotePython) -> None:
    with pytest.raises(RemoteError, match=r"nobody\.knows"):
        atoll_python.call(unknown_operation)
