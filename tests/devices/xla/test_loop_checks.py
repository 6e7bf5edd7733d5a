"""Tests that only loops which may take long have a check, which can end a run on all its devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax._src.lib import _jax
from jax._src.lib import xla_client as xc
from jax._src.lib.mlir import ir
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib.mlir.dialects import stablehlo

from atoll.devices.compilers.compiler_messages import CompileProgram
from atoll.devices.xla import stops
from atoll.devices.xla.compiler import XlaCompiler
from atoll.devices.xla.loop_checks import insert_checks
from atoll.devices.xla.xla_compilation import context, load_executable
from atoll.errors import StatusError

MATRIX = np.ones((32, 32), np.float32)
SCALAR = np.float32(0)


def scan(x: Any) -> Any:
    return jax.lax.scan(
        lambda carry, row: (jnp.tanh(carry @ carry + row), carry.sum()), x, jnp.ones((100, 32, 32), jnp.float32)
    )


def fori(limit: int) -> Callable[[Any], Any]:
    return lambda x: jax.lax.fori_loop(0, limit, lambda i, value: value * 0.5 + 1, x)


def endless(x: Any) -> Any:
    return jax.lax.while_loop(lambda value: value.max() < 3, lambda value: value * 0.5 + 1, x)


def lowered(function: Callable[[Any], Any], *arguments: Any) -> Any:
    return jax.jit(function).lower(*arguments).compiler_ir()


def checks(module: Any, devices: int = 1) -> int:
    with module.context:
        return insert_checks(module, devices)


@pytest.mark.parametrize(
    ("function", "argument", "expected"),
    [
        (fori(100_000), SCALAR, 0),
        (fori(2**31 - 2), SCALAR, 1),
        (endless, SCALAR, 1),
        (lambda x: jax.lax.fori_loop(0, x.astype(int), lambda i, value: value + 1, x), SCALAR, 1),
        (lambda x: jax.lax.fori_loop(0, 10, lambda i, value: endless(value), x), SCALAR, 2),
        (lambda x: jax.lax.fori_loop(0, 10**6, lambda i, value: fori(10**6)(value), x), SCALAR, 1),
        (scan, MATRIX, 0),
        (jax.grad(lambda x: scan(x)[1].sum()), MATRIX, 0),
        (lambda x: jax.lax.fori_loop(0, 10**6, lambda i, value: value @ value, x), MATRIX, 1),
        (lambda x: jax.lax.fori_loop(0, 10, lambda i, value: jnp.linalg.cholesky(value), x), MATRIX, 1),
        (lambda x: jax.random.normal(jax.random.key(0), (1000,)) + x, SCALAR, 0),
        (lambda x: jax.lax.map(jnp.sort, x), MATRIX, 0),
    ],
    ids=[
        *("short", "long", "endless", "unknown", "endless in short", "long by nesting", "scan", "gradient of scan"),
        *("large products", "unknown work", "random", "map"),
    ],
)
def test_loops_that_may_take_long_have_checks(function: Callable[[Any], Any], argument: Any, expected: int) -> None:
    assert checks(lowered(function, argument)) == expected


@pytest.mark.parametrize(
    "change",
    [
        ("stablehlo.add %iterArg, %c_3", "stablehlo.multiply %iterArg, %c_3"),
        ("compare  LT", "compare  NE"),
        ("stablehlo.add %iterArg, %c_3", "stablehlo.add %iterArg_0, %c_3"),
    ],
    ids=["counts otherwise", "compares otherwise", "another counter"],
)
def test_a_loop_that_only_looks_like_one_that_counts_has_a_check(change: tuple[str, str]) -> None:
    text = """
    func.func public @main(%x: tensor<i32>) -> tensor<i32> {
      %c = stablehlo.constant dense<0> : tensor<i32>
      %0:2 = stablehlo.while(%iterArg = %c, %iterArg_0 = %x) : tensor<i32>, tensor<i32>
      cond {
        %c_1 = stablehlo.constant dense<10> : tensor<i32>
        %1 = stablehlo.compare  LT, %iterArg, %c_1,  SIGNED : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %1 : tensor<i1>
      } do {
        %c_3 = stablehlo.constant dense<1> : tensor<i32>
        %1 = stablehlo.add %iterArg, %c_3 : tensor<i32>
        stablehlo.return %1, %iterArg_0 : tensor<i32>, tensor<i32>
      }
      return %0#1 : tensor<i32>
    }"""
    with context(0), ir.Location.unknown():
        assert insert_checks(ir.Module.parse(text), 1) == 0
        assert change[0] in text
        assert insert_checks(ir.Module.parse(text.replace(*change)), 1) == 1


def test_a_program_cannot_bring_checks_of_its_own() -> None:
    call = jax.ffi.ffi_call(stops.TARGET, jax.ShapeDtypeStruct((), np.bool_))
    with pytest.raises(StatusError, match="cannot call atoll_loop_check"):
        checks(lowered(lambda x: call(x), SCALAR))


# ---- runs


@pytest.fixture(scope="module")
def compiler() -> XlaCompiler:
    return XlaCompiler(len(jax.devices()))


class Program:
    """Program with checks, on the first devices of this process."""

    def __init__(self, compiler: XlaCompiler, function: Callable[[Any], Any], argument: Any, devices: int = 1) -> None:
        mesh = jax.make_mesh((devices,), ("x",), devices=jax.devices()[:devices])
        spec = PartitionSpec("x") if np.ndim(argument) else PartitionSpec()
        self._argument = jax.device_put(argument, NamedSharding(mesh, spec))
        options = xc.CompileOptions()
        options.num_partitions = options.executable_build_options.num_partitions = devices
        options.executable_build_options.use_spmd_partitioning = devices > 1
        options.executable_build_options.use_shardy_partitioner = True
        artifact = _jax.mlir.serialize_portable_artifact(
            mlir.module_to_bytecode(lowered(function, self._argument)), stablehlo.get_minimum_version()
        )
        request = CompileProgram(artifact, options.SerializeAsString(), 1, devices, "cpu")
        compiled = compiler.compile(request, None, lambda begun: None)
        grid = np.array([jax.devices()[:devices]], dtype=object)
        self._loaded = load_executable(jax.devices()[0].client, compiled.executable, grid)

    def run(self, sequence: int) -> Any:
        results = self._loaded.execute_sharded([self._argument], with_tokens=True, launch_id=stops.launch_id(sequence))
        results.consume_token().block_until_ready()
        return results.disassemble_into_single_device_arrays()[0][0]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_run_ends_on_all_its_devices(devices: int, compiler: XlaCompiler) -> None:
    own = stops.stops_here("cpu")
    argument, sequence = np.zeros(2 * devices, np.float32), 2**40 + 2 * devices
    program = Program(compiler, endless, argument, devices)
    outcome: list[str] = []

    def run() -> None:
        try:
            program.run(sequence)
        except Exception as error:
            outcome.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    own.stop(sequence + 1, "not this one")
    thread.join(0.2)
    assert thread.is_alive(), outcome
    while thread.is_alive():
        own.stop(sequence, "stopped by the test")
        thread.join(0.5)
    assert outcome == ["CANCELLED: stopped by the test"]


def test_a_loop_with_a_check_computes_what_it_did_without(compiler: XlaCompiler) -> None:
    halves = lambda x: jax.lax.while_loop(lambda value: value.max() > 1e-3, lambda value: value * 0.5, x)  # noqa: E731
    assert checks(lowered(halves, np.ones(4, np.float32))) == 1
    program = Program(compiler, halves, np.ones(4, np.float32))
    expected = np.asarray(jax.jit(halves)(np.ones(4, np.float32)))
    stops.stops_here("cpu").stop(100, "another run")  # all checks run, and pass
    assert np.array_equal(np.asarray(program.run(101)), expected)
    assert np.array_equal(np.asarray(program.run(102)), expected)
