"""IFRT IR programs for tests, in MLIR's text form, and code that compiles them without Shardy's Python, as a client
does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax.sharding import NamedSharding

from atoll.devices.missing_modules import import_mpmd

_EMPTY = 'module { func.func @main() attributes {topology = #mpmd.topology<<"m": <["x"=1]>>>} { return } }'

# An attribute in MLIR's text form that represents `donated_input_indices`, whose own form depends on the version.
_DONATED = "test.donated"


def array(shape: Sequence[int], devices: Sequence[int], counts: Sequence[int] | None = None, rest: str = "") -> str:
    """Return the type of a float32 array with `counts` shards per dimension."""
    sizes = "x".join(map(str, (*shape, "f32")))
    shards = "x".join(map(str, counts or [1] * len(shape)))
    return (
        f"!ifrt.array<tensor<{sizes}>, #ifrt.sharding_param<{shards} to [0] on {len(devices)}>, {list(devices)}{rest}>"
    )


def two_stages(first: Sequence[int] = (0,), second: Sequence[int] = (1,), mark: str = "", donated: str = "") -> str:
    """Return tanh(x @ w) on the devices `first`, copied to `second`, and multiplied by v there.

    `mark` is an attribute of the argument v, and `donated` is a list of inputs that the second stage consumes.
    """
    w, x, h = array((8, 8), first), array((4, 8), first), array((4, 8), second)
    v, y = array((8, 2), second), array((4, 2), second)
    donates = f"{_DONATED} = array<i32: {donated}>, " if donated else ""
    return f"""module @two_stages {{
  func.func public @main(%w: {w}, %v: {v} {mark}, %x: {x}) -> ({y}, {x}) attributes {{ifrt.function}} {{
    %a, %c0 = ifrt.Call @first::@main(%w, %x) on devices {list(first)} {{ifrt.mesh_name = "m0"}} : ({w}, {x}) -> {x}
    %b, %c1 = ifrt.CopyArrays(%a) : ({x}) -> {h}
    %c, %c2 = ifrt.Call @second::@main(%v, %b) on devices {list(second)} {{{donates}ifrt.mesh_name = "m1"}}
      : ({v}, {h}) -> {y}
    return %c, %a : {y}, {x}
  }}
  module @first {{
    func.func @main(%w: tensor<8x8xf32>, %x: tensor<4x8xf32>) -> tensor<4x8xf32> {{
      %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
        : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
      %1 = stablehlo.tanh %0 : tensor<4x8xf32>
      return %1 : tensor<4x8xf32>
    }}
  }}
  module @second {{
    func.func @main(%v: tensor<8x2xf32>, %h: tensor<4x8xf32>) -> tensor<4x2xf32> {{
      %0 = stablehlo.dot_general %h, %v, contracting_dims = [1] x [0]
        : (tensor<4x8xf32>, tensor<8x2xf32>) -> tensor<4x2xf32>
      return %0 : tensor<4x2xf32>
    }}
  }}
}}"""


def parsed(text: str) -> Any:
    """Return the module, in a new MLIR context."""
    with mlir.make_ir_context(), ir.Location.unknown():
        import_mpmd().lower_to_ifrt(ir.Module.parse(_EMPTY))  # loads the dialect
        module = ir.Module.parse(text)
        module.operation.walk(_set_donated)
        return module


def _set_donated(operation: Any) -> Any:
    attributes = operation.attributes
    if _DONATED in attributes:
        attributes["donated_input_indices"] = attributes[_DONATED]
        del attributes[_DONATED]
    return ir.WalkResult.ADVANCE


def compiled(
    module: Any,
    devices: Sequence[Any],
    avals: Sequence[Any],
    shardings: Sequence[NamedSharding],
    options: Mapping[str, Sequence[tuple[str, Any]]] | None = None,
) -> Any:
    """Compile the module for `devices`, with XLA options by mesh. `avals` and `shardings` are those of its results."""
    extension = import_mpmd()
    return extension.compile_mpmd(
        backend=devices[0].client,
        ifrt_mlir_module=extension.clone_mlir_module(module),
        devices=devices,
        out_avals=avals,
        out_shardings=shardings,
        xla_compile_options=extension.get_compile_options(module, options or {}),
    )
