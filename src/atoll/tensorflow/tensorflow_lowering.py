"""A TensorFlow function as StableHLO, with the variables that it reads and assigns.

TensorFlow's own compiler (tf2xla) makes a captured variable a parameter, and one that was assigned a result, too; its
table of aliases says which result belongs to which parameter. So the program is functional, whatever the function did
to its variables: batch statistics, optimizer slots, counters and the states of random generators are all alike.

Invariant: parameters are the arguments, then the captures, in order; results are the function's, then the variables'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from jax.core import ShapedArray

from atoll.tensorflow import stablehlo
from atoll.tensorflow.compile_errors import (
    check_captures,
    check_lists,
    check_results,
    translated,
    unsupported_result,
)

_INLINED_ELEMENTS = 128  # of a captured tensor; more are no shape, no list of axes, nothing that XLA has to know


@dataclass(frozen=True, eq=False)
class Lowered:
    """A function for arguments of given shapes.

    Attributes:
      name: The function's.
      module: StableHLO, as MLIR's bytes; its function is `main`.
      captures: For each parameter after the arguments, the `tf.Variable`, or the tensor, whose value it takes.
      written: For each result after the function's own, the place in `captures` of the variable that it assigns.
      avals: The function's own results.
      structure: Puts the function's results, in order, back into the structure that it returned.
    """

    name: str
    module: bytes
    captures: tuple[Any, ...]
    written: tuple[int, ...]
    avals: tuple[ShapedArray, ...]
    structure: Callable[[Sequence[Any]], Any]


def lower(function: Callable[..., Any], name: str, specs: Sequence[tf.TensorSpec]) -> Lowered:
    """Traces `function(*tensors)` and compiles it to StableHLO; variables that it creates have their first values then.

    Raises what the function raises while it is traced, as `tf.function` does; tf.errors.InvalidArgumentError or
    UnimplementedError, with op and line, for what XLA cannot compile.
    """
    shape: list[Any] = []  # of what the function returned

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
        # The one platform for which every build of TensorFlow has its compiler; StableHLO is for any.
        hlo = outer.experimental_get_compiler_ir(*specs)(stage="hlo_serialized", platform_name="CPU")
        module = stablehlo.from_hlo(hlo)
    except (ValueError, tf.errors.OpError) as error:
        raise translated(error, name) from None
    if module.parameters != len(specs) + len(captures):
        raise tf.errors.InternalError(
            None, None, f"{name}: {len(specs)} arguments, {len(captures)} captures, but {module.parameters} parameters"
        )
    results, written = module.results, sorted(module.aliases)
    own = len(results) - len(written)
    if written != list(range(own, len(results))) or own != len(traced.outputs):
        raise tf.errors.InternalError(
            None, None, f"{name}: {len(traced.outputs)} results, but of {len(results)} those of variables are {written}"
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
    """A result as a tensor; None for what is no tensor at all, which stays what it is."""
    if leaf is None or isinstance(leaf, tf.Operation):
        return None
    if isinstance(leaf, tf.IndexedSlices):
        return tf.convert_to_tensor(leaf)
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        raise tf.errors.UnimplementedError(
            None, None, f"{name} returns a {type(leaf).__name__}: XLA has dense tensors only; return .to_tensor() of it"
        )
    return tf.convert_to_tensor(leaf)


def _with_constants(traced: Any) -> Callable[..., Any]:
    """The function with small captured tensors as constants, since they may be what XLA needs to know: a shape."""

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
