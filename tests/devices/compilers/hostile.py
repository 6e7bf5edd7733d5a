"""MLIR modules, as text, that crash the process that compiles them, or take long to compile."""

from __future__ import annotations

import jax

RECURSION = """module @rec {{ func.func public @main(%x: tensor<f32>) -> tensor<f32> {{
  %c = stablehlo.constant dense<{0}.0> : tensor<f32>
  %y = func.call @main(%c) : (tensor<f32>) -> tensor<f32>
  return %y : tensor<f32> }} }}"""
# XLA expects two results.
TOP_K = """module @top {{ func.func public @main(%x: tensor<16xf32>) -> tensor<{0}xf32> {{
  %y = stablehlo.custom_call @TopK(%x) : (tensor<16xf32>) -> tensor<{0}xf32>
  return %y : tensor<{0}xf32> }} }}"""
INFEED = """module @wait { func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %t = stablehlo.create_token : !stablehlo.token
  %y, %u = "stablehlo.infeed"(%t) <{infeed_config = "", layout = [[0]]}>
    : (!stablehlo.token) -> (tensor<4xf32>, !stablehlo.token)
  return %y : tensor<4xf32> } }"""
SEND = """module @wait { func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %t = stablehlo.create_token : !stablehlo.token
  %u = "stablehlo.send"(%x, %t) <{channel_handle = #stablehlo.channel_handle<handle = 7, type = 1>}>
    : (tensor<4xf32>, !stablehlo.token) -> !stablehlo.token
  return %x : tensor<4xf32> } }"""
_IDENTITY = "func.func public @main(%x: tensor<f32>) -> tensor<f32> { return %x : tensor<f32> }"


def nested_modules(depth: int) -> str:
    return "module {" * depth + "}" * depth


def nested_attributes(depth: int) -> str:
    return f"module attributes {{a = {'[' * depth}{']' * depth}}} {{ {_IDENTITY} }}"


def nested_tuples(depth: int) -> str:
    kind = "tuple<" * depth + "tensor<f32>" + ">" * depth
    return f"""module {{ func.func public @main(%x: {kind}) -> tensor<f32> {{
      %c = stablehlo.constant dense<1.0> : tensor<f32>
      return %c : tensor<f32> }} }}"""


def large_constant(number: int) -> str:
    """Return a module whose constants the compiler folds, using 0.5 GB for the result and the same amount to make it.

    XLA only folds constants with less than 45 million elements.
    """
    kind, elements = "complex<f64>", 125_000
    literal = ", ".join(f"({i}.0,{number}.0)" for i in range(elements))
    lines = [f"%v0 = stablehlo.constant dense<[{literal}]> : tensor<{elements}x{kind}>"]
    for i in range(8):
        half, elements = f"tensor<{elements}x{kind}>", 2 * elements
        joined = f"({half}, {half}) -> tensor<{elements}x{kind}>"
        lines.append(f"%v{i + 1} = stablehlo.concatenate %v{i}, %v{i}, dim = 0 : {joined}")
    body, whole = "\n".join(lines), f"tensor<{elements}x{kind}>"
    return f"""module @constant{number} {{ func.func public @main(%x: {whole}) -> {whole} {{
      {body}
      %y = stablehlo.add %x, %v8 : {whole}
      return %y : {whole} }} }}"""


def large(number: int, operations: int) -> str:
    """Return a module of this many operations, which XLA cannot simplify."""
    lines = ["%v0 = stablehlo.add %x, %c : tensor<64xf32>"]
    for i in range(1, operations):
        if i % 2:
            lines.append(f"%v{i} = stablehlo.{'sine' if i % 3 else 'exponential'} %v{i - 1} : tensor<64xf32>")
        else:
            lines.append(f"%v{i} = stablehlo.multiply %v{i - 1}, %v{max(0, i - 7)} : tensor<64xf32>")
    body = "\n".join(lines)
    return f"""module @large{number} {{ func.func public @main(%x: tensor<64xf32>) -> tensor<64xf32> {{
      %c = stablehlo.constant dense<{number}.5> : tensor<64xf32>
      {body}
      return %v{operations - 1} : tensor<64xf32> }} }}"""


def wide(number: int, chains: int) -> str:
    """Return a module of this many chains of 50 operations each. It takes long to compile, and needs little stack.

    A chain of thousands of operations would overflow XLA's stack, on a fast machine before the time limit.
    """
    lines, total = [], "%x"
    for chain in range(chains):
        lines.append(f"%c{chain} = stablehlo.constant dense<{chain}.5> : tensor<64xf32>")
        lines.append(f"%v{chain}_0 = stablehlo.add %x, %c{chain} : tensor<64xf32>")
        for i in range(1, 50):
            kind = "sine" if i % 2 else "exponential"
            lines.append(f"%v{chain}_{i} = stablehlo.{kind} %v{chain}_{i - 1} : tensor<64xf32>")
        lines.append(f"%t{chain} = stablehlo.add {total}, %v{chain}_49 : tensor<64xf32>")
        total = f"%t{chain}"
    body = "\n".join(lines)
    return f"""module @wide{number} {{ func.func public @main(%x: tensor<64xf32>) -> tensor<64xf32> {{
      {body}
      return {total} : tensor<64xf32> }} }}"""


# XLA's compiler for CPUs divides by zero, since JAX 0.11: earlier ones compile it.
DIVIDES_BY_ZERO = jax.__version_info__ >= (0, 11)
HUGE_VALUE = """
module @huge {
  func.func public @main(%x: tensor<i32>) -> tensor<i32> {
    %values = stablehlo.iota dim = 0 : tensor<1099511627776xi32>
    %sum = stablehlo.reduce(%values init: %x) applies stablehlo.add across dimensions = [0]
      : (tensor<1099511627776xi32>, tensor<i32>) -> tensor<i32>
    return %sum : tensor<i32>
  }
}
"""
