"""Tests of FFI kernels in a library that the script has loaded, on the devices of a cluster.

Each function without `test_` in its name runs twice: here on stock JAX, and in a child on Atoll.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.end_to_end.ffi_kernels import COMPILER, MISSING, build, build_package
from tests.end_to_end.remote_python import RemotePython, StartPython
from tests.end_to_end.same import assert_same

pytestmark = pytest.mark.skipif(COMPILER is None, reason=MISSING)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("kernels"))


# ---- what runs in scripts


def register(path: str) -> None:
    jax.devices()  # JAX accepts types only before the handlers that use them, and passes on both when it starts
    loaded = ctypes.CDLL(path)
    capsule = jax.ffi.pycapsule
    for name in ("scale", "divided"):
        jax.ffi.register_ffi_target(name, capsule(loaded.Scale))
    jax.ffi.register_ffi_target_as_batch_partitionable("divided")
    loaded.CountId.restype = loaded.CountInfo.restype = ctypes.c_void_p
    count = {"type_id": capsule(loaded.CountId()), "type_info": capsule(loaded.CountInfo())}
    jax.ffi.register_ffi_type("count", count)
    stages = {"instantiate": capsule(loaded.CountInstantiate), "execute": capsule(loaded.CountExecute)}
    jax.ffi.register_ffi_target("count", stages)
    jax.ffi.register_ffi_target("crash", capsule(loaded.Crash))


def scaled(x: Any, scale: float, sign: str = "plus", vmap_method: str = "broadcast_all") -> Any:
    results = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:-1], x.dtype))
    return jax.ffi.ffi_call("scale", results, vmap_method=vmap_method)(x, scale=np.float32(scale), sign=sign)


def rows(count: int = 8) -> np.ndarray[Any, Any]:
    return np.arange(count * 3, dtype=np.float32).reshape(count, 3)


def in_jit() -> Any:
    return jax.device_get(jax.jit(lambda x: scaled(x + 1, 2.5, "minus"))(rows()))


def in_vmap() -> Any:
    """Use both ways in which JAX maps a call: one call for all rows, and a loop of calls."""
    x = rows().reshape(2, 4, 3)
    return [
        jax.device_get(jax.jit(jax.vmap(lambda x, method=method: scaled(x, 3, vmap_method=method)))(x))
        for method in ("broadcast_all", "sequential")
    ]


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:4]), ("x",))


def in_shard_map() -> Any:
    """Call the kernel on all devices, each with its own rows, with a collective of the results."""

    def shard(x: Any) -> Any:
        y, sums = scaled(x, 2)
        return y, jax.lax.psum(sums, "x")

    function = jax.jit(jax.shard_map(shard, mesh=mesh(), in_specs=P("x"), out_specs=(P("x"), P())))
    return jax.device_get(function(jax.device_put(rows(), NamedSharding(mesh(), P("x")))))


def divided(x: Any) -> Any:
    """Call the kernel as an operation of JAX whose lowering marks the first dimension as a batch."""
    from jax._src import core
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    primitive = core.Primitive("divided")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda x, **_: [x, x.update(shape=x.shape[:-1])])

    def lower(context: Any, *operands: Any, **attributes: Any) -> Any:
        batch = ir.DictAttr.get({"num_batch_dims": ir.StringAttr.get("1")})
        lowering = jax.ffi.ffi_lowering("divided", extra_attributes={"mhlo.frontend_attributes": batch})
        return lowering(context, *operands, **attributes)

    mlir.register_lowering(primitive, lower)
    return primitive.bind(x, scale=np.float32(2), sign="plus")


def in_partitioned_jit() -> Any:
    """Call the kernel on sharded rows.

    XLA gathers them for the call, unless the target is divided along the first dimension.
    """
    sharding = NamedSharding(mesh(), P("x"))
    x = jax.device_put(rows(), sharding)
    results = []
    for function in (lambda x: scaled(x, 2), divided):
        compiled = jax.jit(function, out_shardings=sharding).lower(x).compile()
        results.append((jax.device_get(compiled(x)), "all-gather" in compiled.as_text()))
    assert [gathers for _, gathers in results] == [True, False]
    return results


def with_gradient() -> Any:
    @jax.custom_vjp
    def twice(x: Any) -> Any:
        return scaled(x, 2)[0]

    twice.defvjp(lambda x: (twice(x), None), lambda _, cotangent: (scaled(cotangent, 2)[0],))
    return np.asarray(jax.jit(jax.grad(lambda x: (twice(x) * x).sum()))(rows()))


def counted() -> Any:
    """Count calls in the state of a handler, which belongs to its executable: another program has its own count."""
    call = jax.ffi.ffi_call("count", jax.ShapeDtypeStruct((1,), np.int32), has_side_effect=True)
    counters = [jax.jit(lambda first=first: call(first=np.int32(first))) for first in (5, 100)]
    return [int(counter()[0]) for counter in counters for _ in range(3)]


def invalid_attribute() -> str:
    try:
        jax.block_until_ready(jax.jit(lambda x: scaled(x, 1, "neither"))(rows()))
    except jax.errors.JaxRuntimeError as error:
        return "INVALID_ARGUMENT" * ("INVALID_ARGUMENT" in str(error)) + "sign" * ("the sign is neither" in str(error))
    return ""


# ---- the tests


# `test_ffi_tenants` has one host.
@pytest.fixture(scope="module", params=[pytest.param("1x1x4", marks=pytest.mark.thorough), "1x2x2"])
def python(request: pytest.FixtureRequest, start_python: StartPython, library: str) -> RemotePython:
    """Return a child that has registered the kernels, with devices of one host or of two."""
    child = start_python(request.param)
    child.call(register, library)
    return child


@pytest.fixture(scope="module", autouse=True)
def registered(library: str) -> None:
    register(library)


@pytest.mark.parametrize(
    "function", [in_jit, in_vmap, in_shard_map, in_partitioned_jit, with_gradient, counted, invalid_attribute]
)
def test_kernels_compute_what_they_compute_on_stock_jax(python: RemotePython, function: Callable[[], Any]) -> None:
    assert_same(python.call(function), function())


def by_name(path: str) -> Any:
    """Call the kernel by a name that only Atoll knows."""
    import atoll

    atoll.ffi.register(path, {"given": "Scale"})
    result = jax.ShapeDtypeStruct((8, 3), np.float32), jax.ShapeDtypeStruct((8,), np.float32)
    call = jax.ffi.ffi_call("given", result)
    return jax.device_get(jax.jit(lambda x: call(x, scale=np.float32(2), sign="plus"))(rows()))


def test_a_library_that_this_process_has_not_loaded_is_registered_by_name(python: RemotePython, library: str) -> None:
    scaled_rows, sums = python.call(by_name, library)
    np.testing.assert_array_equal(scaled_rows, rows() * 2)
    np.testing.assert_array_equal(sums, rows().sum(1) * 2)


def test_a_library_is_sent_with_those_that_it_needs(python: RemotePython, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "other").mkdir()
    first, other = build_package(tmp_path / "first", 3), build_package(tmp_path / "other", 5)
    scaled_rows, sums = python.call(by_name, first)
    np.testing.assert_array_equal(scaled_rows, rows() * 6)
    np.testing.assert_array_equal(sums, rows().sum(1) * 6)
    with pytest.raises(Exception, match=r"needs libfactor\.so, and this host has loaded another file of this name"):
        python.call(by_name, other)


def refused(kind: str, path: str) -> str:
    """Return the error for a target that cannot be sent to hosts."""
    import atoll
    from atoll.client.ffi_handlers import HANDLERS

    if kind == "made at run time":
        handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda frame: None)
        _kept.append(handler)
        # This process's XLA would call the target, so it is recorded as JAX's function would record it.
        HANDLERS.record_target(kind, jax.ffi.pycapsule(ctypes.cast(handler, ctypes.c_void_p).value), "cpu", 1)
    elif kind == "older interface":
        jax.ffi.register_ffi_target(kind, jax.ffi.pycapsule(ctypes.CDLL(path).Scale), api_version=0)
    elif kind == "no symbol":
        atoll.ffi.register(path, {kind: "Missing"})
    elif kind == "no library":
        atoll.ffi.register(__file__, {kind: "Scale"})
    elif kind == "private name":
        kind = "atoll_ffi.0123456789abcdef0123456789abcdef"
    try:
        jax.jit(jax.ffi.ffi_call(kind, jax.ShapeDtypeStruct((3,), np.float32)))(np.ones(3, np.float32))
    except jax.errors.JaxRuntimeError as error:
        return str(error)
    return ""


_kept: list[Any] = []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("made at run time", "UNIMPLEMENTED: the handler of the FFI target 'made at run time' (execute) is in no file"),
        ("older interface", "UNIMPLEMENTED: the FFI target 'older interface' has XLA's older interface"),
        ("no symbol", "has no symbol 'Missing'"),
        ("no library", "is not a shared library for Linux"),
        ("private name", "INVALID_ARGUMENT: the program calls 'atoll_ffi.0123456789abcdef0123456789abcdef'"),
    ],
)
def test_targets_that_cannot_run_are_refused_with_the_reason(
    python: RemotePython, library: str, kind: str, text: str
) -> None:
    assert text in python.call(refused, kind, library)
