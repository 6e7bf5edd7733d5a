"""Tests of reading IFRT IR programs: outlines, fragments, and named errors."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

from atoll.devices.xla.ifrt_ir import read_fragment, read_outline
from atoll.errors import Code, StatusError
from atoll.ir.outline import Fragment, Outline
from atoll.ir.program import Call, Transfer
from atoll.ir.types import ArraySpec, Replicated, Sharding, Tiled
from tests.mpmd_programs import array, parsed, two_stages


def bytecode(text: str) -> bytes:
    written = io.BytesIO()
    parsed(text).operation.write_bytecode(written)
    return written.getvalue()


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    with mlir.make_ir_context():
        yield


def outline(text: str) -> Outline:
    return read_outline(bytecode(text))


def moved(source: str, target: str, operation: str = "ifrt.Reshard", attributes: str = "") -> str:
    """Return a program with one operation that converts from the type `source` to the type `target`."""
    return f"""module @moved {{
  func.func public @main(%x: {source}) -> {target} attributes {{ifrt.function}} {{
    %y, %c = {operation}(%x) {attributes} : ({source}) -> {target}
    return %y : {target}
  }}
}}"""


def test_calls_become_nodes_and_copies_become_transfers() -> None:
    read = outline(two_stages())
    h, moved = (ArraySpec("float32", (4, 8), Sharding((device,))) for device in (0, 1))
    y = ArraySpec("float32", (4, 2), Sharding((1,)))
    assert read.program.nodes == (
        Call(0, (0, 2), (h,), (0,)),
        Transfer((3,), (moved,), reshard=True),
        Call(1, (1, 4), (y,), (1,)),
    )
    assert read.program.results == (5, 3)
    assert read.fragments == (Fragment("first", "m0", (0,)), Fragment("second", "m1", (1,)))
    assert (read.program.name, read.donated) == ("two_stages", ())


def test_a_call_consumes_intermediate_values_and_donated_arguments_only() -> None:
    def consumed(mark: str) -> tuple[int, ...]:
        call = outline(two_stages(mark=mark, donated="0, 1")).program.nodes[2]
        assert isinstance(call, Call)
        return call.donated

    assert consumed("") == (1,)
    assert consumed("{ifrt.donated}") == (0, 1)
    assert outline(two_stages(mark="{ifrt.donated}")).donated == (1,)


@pytest.mark.parametrize(("param", "tiling"), [
    ("1x1 to [0] on 6", Replicated()),
    ("6x1 to [0] on 6", Tiled((6, 1, 1), (0, 1, 2, 3, 4, 5))),
    ("2x1 to [0,1] on 3x2", Tiled((2, 1, 3), (0, 1, 2, 3, 4, 5))),
    ("2x3 to [1, 0] on 2x3", Tiled((2, 3, 1), (0, 2, 4, 1, 3, 5))),
])  # fmt: skip
def test_shardings_become_tilings(param: str, tiling: Any) -> None:
    kind = f"!ifrt.array<tensor<12x12xf32>, #ifrt.sharding_param<{param}>, [0, 1, 2, 3, 4, 5]>"
    spec = outline(moved(kind, kind)).program.arguments[0]
    assert spec.sharding.tiling == tiling


def test_types_have_dtype_memory_kind_and_shape() -> None:
    kind = array((), (3,), (), ', memory_kind = "pinned_host"').replace("f32", "complex<f32>")
    assert outline(moved(kind, kind)).program.arguments == (
        ArraySpec("complex64", (), Sharding((3,), Replicated(), "pinned_host")),
    )


def test_arguments_and_repeated_values_are_copied_to_results() -> None:
    kind = array((4,), (0,))
    text = f"""module @same {{
  func.func public @main(%x: {kind}) -> ({kind}, {kind}) attributes {{ifrt.function}} {{
    return %x, %x : {kind}, {kind}
  }}
}}"""
    program = outline(text).program
    assert [type(each) for each in program.nodes] == [Transfer, Transfer]
    assert program.results == (1, 2)


ONE = array((4,), (0,))


def ignored(operation: str) -> str:
    """Return a program that returns its argument, and has an operation whose result it does not use."""
    return f"""module @m {{ func.func public @main(%x: {ONE}) -> {ONE} attributes {{ifrt.function}} {{
      {operation} : ({ONE}) -> {ONE}
      return %x : {ONE} }} }}"""


@pytest.mark.parametrize(("text", "code", "names"), [
    (f"""module @m {{ func.func public @main(%x: {ONE}) -> {ONE} attributes {{ifrt.function}} {{
      %y, %c = ifrt.CallLoadedExecutable @e(%x) : ({ONE}) -> {ONE}
      return %y : {ONE} }}
      ifrt.LoadedExecutable @e on devices [0] : ({ONE}) -> {ONE} }}""",
     Code.UNIMPLEMENTED, "ifrt.CallLoadedExecutable is not supported"),
    (ignored("ifrt.RemapArrays(%x) mappings=[#ifrt.array_mapping<0, 0, [#ifrt.mapping<[0:1:1] to [0:1:1]>]>]"),
     Code.UNIMPLEMENTED, "ifrt.RemapArrays is not supported"),
    (ignored("ifrt.Assemble(%x)"), Code.UNIMPLEMENTED, "ifrt.Assemble is not supported"),
    (ignored("ifrt.Disassemble(%x)"), Code.UNIMPLEMENTED, "ifrt.Disassemble is not supported"),
    (moved(ONE.replace("tensor<4xf32>", "tensor<?xf32>"), ONE.replace("tensor<4xf32>", "tensor<?xf32>")),
     Code.UNIMPLEMENTED, r"tensor<\?xf32> are not supported"),
    (moved(array((4, 4), (0,), rest=', layout = "{0,1}"'), array((4, 4), (0,))), Code.UNIMPLEMENTED, "layout {0,1}"),
    ("module @m { func.func @main() { return } }", Code.INVALID_ARGUMENT, "no function with the attribute ifrt"),
])  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(text: str, code: Code, names: str) -> None:
    with pytest.raises(StatusError, match=names) as caught:
        outline(text)
    assert caught.value.status.code == code


def test_bytes_that_are_no_module_are_refused() -> None:
    with pytest.raises(StatusError, match="cannot parse the IFRT IR program") as caught:
        read_outline(b"ML\xefR nothing")
    assert caught.value.status.code == Code.INVALID_ARGUMENT


def test_a_fragment_is_a_module_with_its_name_and_mesh() -> None:
    module = ir.Module.parse(read_fragment(bytecode(two_stages()), "second", "m1"))
    assert ir.StringAttr(module.operation.attributes["sym_name"]).value == "second_mesh_m1"
    assert "stablehlo.dot_general" in str(module)
    assert "tanh" not in str(module)
    with pytest.raises(StatusError, match="no fragment 'third'"):
        read_fragment(bytecode(two_stages()), "third", "m1")
