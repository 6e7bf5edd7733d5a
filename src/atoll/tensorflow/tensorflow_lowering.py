"""Lowers a TensorFlow function to StableHLO, with the variables that it reads and assigns, and binds it in JAX.

TensorFlow's compiler (tf2xla) turns each captured variable into a parameter, and each assigned variable also into a
result. Its table of aliases maps these results to parameters. So the program is functional for every kind of variable:
batch statistics, optimizer slots, counters and states of random generators.

Invariant: the parameters are the arguments, then the captures, in order. The results are the function's own results,
then the values of the assigned variables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from atoll.quantities import counted
from atoll.tensorflow import stablehlo
from atoll.tensorflow.compile_errors import (
    check_captures,
    check_lists,
    check_results,
    translated,
    unsupported_result,
)

_INLINED_ELEMENTS = 128  # a captured tensor with more elements is no shape or list of axes, so it stays a parameter


@dataclass(frozen=True, eq=False)
class Lowered:
    """A function that is lowered for arguments of given shapes.

    Attributes:
      name: The function's name.
      module: MLIR bytecode of a StableHLO module with the function `main`.
      captures: The `tf.Variable` or tensor of each parameter after the arguments.
      written: For each result after the function's own, the index in `captures` of the variable that it assigns.
      avals: Types of the function's own results.
      structure: Rebuilds the structure that the function returned from its own results.
    """

    name: str
    module: bytes
    captures: tuple[Any, ...]
    written: tuple[int, ...]
    avals: tuple[ShapedArray, ...]
    structure: Callable[[Sequence[Any]], Any]


def lower(function: Callable[..., Any], name: str, specs: Sequence[tf.TensorSpec]) -> Lowered:
    """Trace `function(*tensors)` and compile it to StableHLO. Tracing also initializes variables that it creates.

    Raises the function's own exceptions during tracing, as `tf.function` does. Raises tf.errors.InvalidArgumentError or
    UnimplementedError, with the op and the user's line, if XLA cannot compile an op.
    """
    shape: list[Any] = []  # the structure that the function returned, and which of its leaves are tensors

    def flat(*tensors: tf.Tensor) -> list[tf.Tensor]:
        found = function(*tensors)
        results = [_dense(leaf, name) for leaf in tf.nest.flatten(found)]
        shape[:] = [found, [result is not None for result in results]]
        return [result for result in results if result is not None]

    traced = tf.function(flat, autograph=False).get_concrete_function(*specs)
    check_lists(traced, name)
    outer = tf.function(_with_constants(traced), jit_compile=True, autograph=False)
    concrete = outer.get_concrete_function(*specs)
    variables = {id(each.handle): each for each in concrete.variables}
    captures = tuple(variables.get(id(each), each) for each in concrete.captured_inputs)
    check_captures(traced, captures, name)
    check_results(traced, name)
    try:
        # Every build of TensorFlow has the compiler for CPU, and StableHLO does not depend on the platform.
        hlo = outer.experimental_get_compiler_ir(*specs)(stage="hlo_serialized", platform_name="CPU")
        module = stablehlo.from_hlo(hlo)
    except (ValueError, tf.errors.OpError) as error:
        raise translated(error, name) from None
    if module.parameters != len(specs) + len(captures):
        raise tf.errors.InternalError(
            None,
            None,
            f"{name} has {counted(len(specs), 'argument')} and {counted(len(captures), 'capture')}, but the lowered "
            f"module has {counted(module.parameters, 'parameter')}",
        )
    results, written = module.results, sorted(module.aliases)
    own = len(results) - len(written)
    if written != list(range(own, len(results))) or own != len(traced.outputs):
        raise tf.errors.InternalError(
            None,
            None,
            f"{name} has {counted(len(traced.outputs), 'result')}, but the lowered module has {len(results)}, of which "
            f"{written} are values of variables",
        )
    for number, aval in enumerate(results):
        if aval is None:
            raise unsupported_result(traced, number, name)
    return Lowered(
        name=name,
        module=module.code,
        captures=captures,
        written=tuple(module.aliases[number] - len(specs) for number in written),
        avals=tuple(aval for aval in results[:own] if aval is not None),
        structure=_packer(*shape),
    )


def _dense(leaf: Any, name: str) -> tf.Tensor | None:
    """Convert a result to a dense tensor. Return None for an operation or None."""
    if leaf is None or isinstance(leaf, tf.Operation):
        return None
    if isinstance(leaf, tf.IndexedSlices):
        return tf.convert_to_tensor(leaf)
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        raise tf.errors.UnimplementedError(
            None, None, f"{name} returns a {type(leaf).__name__}, but XLA has only dense tensors: return .to_tensor()"
        )
    return tf.convert_to_tensor(leaf)


def _with_constants(traced: Any) -> Callable[..., Any]:
    """Return the function with small captured tensors as constants, because XLA may need them at compile time."""

    def call(*tensors: tf.Tensor) -> Any:
        captured = list(traced.captured_inputs)
        inlined = [
            tf.constant(each.numpy())
            if each.dtype not in (tf.resource, tf.variant) and hasattr(each, "numpy") and _is_small(each)
            else each
            for each in captured
        ]
        traced.set_external_captures(inlined)
        try:
            return traced(*tensors)
        finally:
            traced.set_external_captures(captured)

    return call


def _is_small(tensor: Any) -> bool:
    return bool(np.prod(tensor.shape, dtype=np.int64) <= _INLINED_ELEMENTS)


def _packer(found: Any, is_tensor: list[bool]) -> Callable[[Sequence[Any]], Any]:
    def pack(results: Sequence[Any]) -> Any:
        values = iter(results)
        flat = [next(values) if tensor else None for tensor in is_tensor]
        return tf.nest.pack_sequence_as(found, flat)

    return pack


_call_p = Primitive("tensorflow_function")
_call_p.multiple_results = True


def bind(lowered: Lowered, arguments: Sequence[Any], captured: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Call the lowered function in a JAX trace. Return its own results and the new values of assigned variables."""
    results = _call_p.bind(*arguments, *captured, lowered=lowered)
    own = len(lowered.avals)
    return results[:own], results[own:]


def _abstract_eval(*avals: Any, lowered: Lowered) -> list[Any]:
    captured = avals[len(avals) - len(lowered.captures) :]
    return [*lowered.avals, *(captured[place] for place in lowered.written)]


def _mlir_lowering(context: Any, *operands: Any, lowered: Lowered) -> list[Any]:
    module = ir.Module.parse(lowered.module)
    main = ir.SymbolTable(module.operation)["main"]
    results = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).results
    symbols = context.module_context.symbol_table
    name = mlir.merge_mlir_modules(context.module_context.module, lowered.name, module, dst_symtab=symbols)
    return list(func.CallOp(results, ir.FlatSymbolRefAttr.get(name), list(operands)).results)


_call_p.def_abstract_eval(_abstract_eval)
mlir.register_lowering(_call_p, _mlir_lowering)
