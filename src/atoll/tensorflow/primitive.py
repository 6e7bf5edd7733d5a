"""A lowered TensorFlow function as an operation of JAX: in whatever is traced, it is a call of its StableHLO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from atoll.tensorflow.tensorflow_lowering import Lowered

_call_p = Primitive("tensorflow_function")
_call_p.multiple_results = True


def call(lowered: Lowered, arguments: Sequence[Any], captured: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The function's own results, and the values of the variables that it assigns; under a trace of JAX."""
    results = _call_p.bind(*arguments, *captured, lowered=lowered)
    own = len(lowered.avals)
    return results[:own], results[own:]


def _types(*avals: Any, lowered: Lowered) -> list[Any]:
    captured = avals[len(avals) - len(lowered.captures) :]
    return [*lowered.avals, *(captured[place] for place in lowered.written)]


def _lower(context: Any, *operands: Any, lowered: Lowered) -> list[Any]:
    module = ir.Module.parse(lowered.module)
    main = ir.SymbolTable(module.operation)["main"]
    results = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).results
    symbols = context.module_context.symbol_table
    name = mlir.merge_mlir_modules(context.module_context.module, lowered.name, module, dst_symtab=symbols)
    return list(func.CallOp(results, ir.FlatSymbolRefAttr.get(name), list(operands)).results)


_call_p.def_abstract_eval(_types)
mlir.register_lowering(_call_p, _lower)
