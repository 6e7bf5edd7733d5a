"""Tests of which programs are given to XLA, and which are rejected because only the client's process can run them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atoll.errors import Code
from tests.worker.worker_rig import Behaviours, Rig, says, spec

BEHAVIOURS = Behaviours("tests.worker.test_compile")


def refuses(rig: Rig, call: Any, *words: str, devices: tuple[int, ...] = (0, 1)) -> None:
    _, status = rig.compile(rig.lower(call, spec(), devices=devices), devices)
    says(status, Code.UNIMPLEMENTED, *words)


@BEHAVIOURS.add
def it_refuses_to_inspect_shardings(rig: Rig) -> None:
    import jax

    def inspect(x: Any) -> Any:
        jax.debug.inspect_array_sharding(x, callback=lambda sharding: None)
        return x + 1

    refuses(rig, inspect, "inspect_array_sharding", "visualize_array_sharding")


@BEHAVIOURS.add
def it_refuses_partitions_that_no_client_makes(rig: Rig) -> None:
    from jax.experimental.custom_partitioning import custom_partitioning

    @custom_partitioning
    def doubled(x: Any) -> Any:
        return x * 2

    doubled.def_partition(partition=lambda *_: None, sharding_rule="i -> i")
    refuses(rig, doubled, "custom_partitioning", "Atoll's own plug-in")


@BEHAVIOURS.add
def it_refuses_what_stands_for_another_compilation(rig: Rig) -> None:
    import jax

    def call(x: Any) -> Any:
        return jax.ffi.ffi_call("AtollCustomPartitioning", x, custom_call_api_version=2)(x)

    refuses(rig, call, "Atoll's own plug-in")


@BEHAVIOURS.add
def it_refuses_callbacks(rig: Rig) -> None:
    import jax
    from jax.experimental import io_callback

    def pure(x: Any) -> Any:
        return jax.pure_callback(lambda y: np.asarray(y), x, x, vmap_method="sequential")

    def io(x: Any) -> Any:
        return io_callback(lambda y: np.asarray(y), x, x)

    def printed(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x

    for call in (pure, io, printed):
        refuses(rig, call, "calls back into the client's Python", "jax.pure_callback", devices=(0,))


@BEHAVIOURS.add
def it_refuses_buffer_callbacks(rig: Rig) -> None:
    from jax.experimental import buffer_callback

    def call(x: Any) -> Any:
        return buffer_callback.buffer_callback(lambda *_: None, x)(x)

    refuses(rig, call, "calls back into the client's Python", devices=(0,))


def module_of(body: str) -> Any:
    """A module whose function main takes and returns four numbers, with `%y` from the body."""
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    with mlir.make_ir_context():
        return ir.Module.parse(
            f"""module @blocks {{
              func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {{
                %t = stablehlo.create_token : !stablehlo.token
                {body}
                return %y : tensor<4xf32>
              }}
            }}"""
        )


@BEHAVIOURS.add
def it_refuses_infeed_and_outfeed(rig: Rig) -> None:
    infeed = """%y, %u = "stablehlo.infeed"(%t) <{infeed_config = "", layout = [[0]]}>
        : (!stablehlo.token) -> (tensor<4xf32>, !stablehlo.token)"""
    outfeed = """%u = "stablehlo.outfeed"(%x, %t) <{outfeed_config = ""}>
        : (tensor<4xf32>, !stablehlo.token) -> !stablehlo.token
        %y = stablehlo.add %x, %x : tensor<4xf32>"""
    for body, name in ((infeed, "stablehlo.infeed"), (outfeed, "stablehlo.outfeed")):
        _, status = rig.compile(module_of(body))
        says(status, Code.UNIMPLEMENTED, name, "jax.pure_callback")


@BEHAVIOURS.add
def it_refuses_sends_and_receives_without_a_callback(rig: Rig) -> None:
    handle = "channel_handle = #stablehlo.channel_handle<handle = 7, type = {}>, is_host_transfer = true"
    send = f"""%u = "stablehlo.send"(%x, %t) <{{{handle.format(2)}}}>
        : (tensor<4xf32>, !stablehlo.token) -> !stablehlo.token
        %y = stablehlo.add %x, %x : tensor<4xf32>"""
    receive = f"""%y, %u = "stablehlo.recv"(%t) <{{{handle.format(3)}}}>
        : (!stablehlo.token) -> (tensor<4xf32>, !stablehlo.token)"""
    for body, name in ((send, "stablehlo.send"), (receive, "stablehlo.recv")):
        _, status = rig.compile(module_of(body))
        says(status, Code.UNIMPLEMENTED, name)


@BEHAVIOURS.add
def it_refuses_to_write_an_address_where_there_is_no_room_for_it(rig: Rig) -> None:
    import jax

    def call(x: Any) -> Any:
        return jax.ffi.ffi_call("atoll_address", jax.ShapeDtypeStruct((4,), np.float32))(x)

    _, status = rig.compile(rig.lower(call, spec()))
    says(status, Code.INVALID_ARGUMENT, "atoll_address")


@BEHAVIOURS.add
def it_compiles_programs_that_only_bear_the_name_of_such_a_call(rig: Rig) -> None:
    def InspectSharding(x: Any) -> Any:
        return x + 1

    def xla_ffi_python_cpu_callback(x: Any) -> Any:
        return x + 1

    for call in (InspectSharding, xla_ffi_python_cpu_callback):
        rig.function(call, spec(), devices=(0, 1))


@BEHAVIOURS.add
def it_compiles_constrained_programs(rig: Rig) -> None:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    try:
        from jax.experimental.shard_alike import shard_alike
    except ImportError:  # JAX 0.12 has it no more

        def shard_alike(x: Any, y: Any) -> Any:
            return x, y

    mesh = Mesh(np.array(rig.backend.devices[:2]), ("x",))

    def call(x: Any) -> Any:
        y = jax.lax.with_sharding_constraint(x * 3, NamedSharding(mesh, PartitionSpec()))
        _, y = shard_alike(x, y)
        return y

    rig.function(call, spec(), devices=(0, 1))


@BEHAVIOURS.add
def it_compiles_a_module_without_a_name(rig: Rig) -> None:
    module = rig.lower(lambda x: x + 1, spec())
    del module.operation.attributes["sym_name"]
    name, status = rig.compile(module)
    assert status.ok, status
    report, (result,) = rig.call(name, rig.ones())
    assert rig.shard(result).tolist() == [2, 2, 2, 2], report


@pytest.fixture(scope="module", params=["", "ana"], ids=["in the worker", "in a compiler process"])
def outcomes(request: Any) -> dict[str, str]:
    return BEHAVIOURS.outcomes(request.param)


@pytest.mark.parametrize("name", BEHAVIOURS.names)
def test_compilation(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes.get(name, outcomes[""]) == "ok"


if __name__ == "__main__":
    BEHAVIOURS.play()
