"""Tests that a memory quota limits the results of a tenant's functions, whatever its client declares."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from atoll.cluster.tenant_settings import TenantSettings, token_hash
from atoll.errors import Code, StatusError
from atoll.ir.program import Call, single
from atoll.ir.types import ArraySpec, Sharding
from atoll.protocol import messages as m
from atoll.session.bare import BareClient
from tests.end_to_end.remote_python import StartPython
from tests.end_to_end.standing_cluster import StandingCluster, StartCluster

MIB = 1 << 20
QUOTA = 600 * MIB
ELEMENTS = 64 * MIB  # four bytes each, so that an array has 256 MiB
FUNCTIONS = 4
TOKEN = "the token of the tenant"
SECONDS = 300.0


@pytest.fixture(scope="module")
def cluster(start_cluster: StartCluster) -> StandingCluster:
    tenant = TenantSettings("small", token_hash(TOKEN), memory=QUOTA)
    return start_cluster(islands="1x1x1", token="the token of the cluster", tenants=(tenant,))


class Constant:
    """A function that returns an array of one number. Its client builds it without JAX's devices."""

    def __init__(self, number: int) -> None:
        self._number = number

    def source(self) -> bytes:
        from jax._src.interpreters import mlir
        from jax._src.lib import _jax
        from jax._src.lib import xla_client as xc
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import stablehlo

        kind = f"tensor<{ELEMENTS}xf32>"
        text = f"""
            module @constant {{
              func.func public @main() -> {kind} {{
                %x = stablehlo.constant dense<{self._number}.0> : tensor<f32>
                %y = stablehlo.broadcast_in_dim %x, dims = [] : (tensor<f32>) -> {kind}
                return %y : {kind}
              }}
            }}"""
        with mlir.make_ir_context():
            module = mlir.module_to_bytecode(ir.Module.parse(text))
            program = _jax.mlir.serialize_portable_artifact(module, stablehlo.get_minimum_version())
        options = xc.CompileOptions()
        options.num_partitions = options.num_replicas = 1
        return msgspec.msgpack.encode(m.FunctionSource(program, options.SerializeAsString()))


def allocate(address: str, declared: int) -> list[tuple[str, str]]:
    """Keep the arrays of these functions, each declared with this many elements. Return the outcomes."""

    async def work() -> list[tuple[str, str]]:
        client = await BareClient.open(address, token=TOKEN)
        device = client.devices[0]
        output = ArraySpec("float32", (declared,), Sharding((device,)))
        found = []
        for number in range(FUNCTIONS):
            function = await client.compile(Constant(number), [device])
            program = client.register(single("constant", (), Call(function, (), (output,), (device,))))
            try:
                await client.wait(await client.launch(program, (), 1))
                found.append(("", ""))
            except StatusError as error:
                found.append((Code(error.status.code).name, error.status.message))
        client.close()
        return found

    return asyncio.run(asyncio.wait_for(work(), SECONDS))


@pytest.mark.parametrize("declared", [ELEMENTS, 1])
def test_a_client_gets_no_more_memory_than_its_quota(
    cluster: StandingCluster, start_python: StartPython, declared: int
) -> None:
    found: list[tuple[str, Any]] = start_python().call(allocate, cluster.address, declared)
    codes = [code for code, _ in found]
    if declared == ELEMENTS:
        assert codes == ["", "", "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"], found
        assert all("its quota `memory`" in text for code, text in found if code)
    else:
        assert codes == ["INVALID_ARGUMENT"] * FUNCTIONS, found
        assert all(f"has shards of float32[{ELEMENTS}], not of float32[1]" in text for _, text in found)
