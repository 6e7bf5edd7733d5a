"""Tests of pathwaysutils' resharding: a plugin program whose dtypes and shapes come from its arguments."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from atoll.errors import Code
from atoll.ir.program import Transfer
from atoll.ir.types import ArraySpec, Replicated, Sharding, Tiled
from atoll.protocol.ifrt import executables_pb2, xla_pb2
from tests.ifrt.rig import Rig, check_refused, node_of

PARTS = xla_pb2.OpSharding(
    type=xla_pb2.OpSharding.OTHER, tile_assignment_dimensions=(2,), tile_assignment_devices=(0, 1)
)
WHOLE = xla_pb2.OpSharding(type=xla_pb2.OpSharding.REPLICATED)
SOURCE = ArraySpec("float32", (4,), Sharding((0, 1), Tiled((2,), (0, 1))))
TARGET = ArraySpec("float32", (4,), Sharding((1, 2, 3), Replicated()))


def sharding(op: Any, *devices: int) -> Any:
    return {
        "devices": {"device_ids": devices},
        "xla_hlo_sharding": base64.b64encode(op.SerializeToString()).decode(),
    }


PAIR, TRIPLE = (sharding(PARTS, 0, 1),), (sharding(WHOLE, 1, 2, 3),)


def request(sources: Any = PAIR, targets: Any = TRIPLE, **options: Any) -> Any:
    text = json.dumps(
        {"reshardRequest": {"donateInput": False, "inSharding": sources, "outSharding": targets} | options}
    )
    compile_ = executables_pb2.Compile()
    compile_.program.type_name = "xla::ifrt::PluginProgram"
    compile_.program.data = b"__serialized_plugin_program " + text.encode()
    return compile_


@pytest.mark.parametrize("donate", [False, True])
def test_arrays_get_the_shardings_that_a_request_names(rig: Rig, donate: bool):
    reply = rig.ask("compile", request(donateInput=donate)).compile
    assert list(reply.device_ids) == [0, 1]
    rig.make(1, SOURCE)
    response = rig.ask("execute", executable=reply.executable, arguments=[1])
    ((output,), (handle,)) = response.execute.outputs, [each.array for each in response.execute.outputs]
    assert list(output.shape.dims) == [4]
    assert rig.session.arrays.spec(handle) == TARGET
    program, launch = rig.take_launch()
    assert node_of(program) == Transfer((0,), (TARGET,), donate, reshard=True)
    assert launch.arguments == (1,)
    assert rig.ask("is_array_deleted", array=1).is_array_deleted.deleted == donate


def test_a_request_that_ran_takes_more_arrays_of_the_same_type_alone(rig: Rig):
    executable = rig.ask("compile", request()).compile.executable
    rig.make(1, SOURCE)
    rig.make(2, ArraySpec("float32", (8,), SOURCE.sharding))
    rig.make(3, ArraySpec("float32", (4,), Sharding((0, 1), Replicated())))
    rig.ask("execute", executable=executable, arguments=[1])
    rig.ask("execute", executable=executable, arguments=[1], results=[9])
    for other in (2, 3):
        response = rig.ask("execute", executable=executable, arguments=[other], results=[10 + other])
        check_refused(response, Code.INVALID_ARGUMENT, "program 'reshard' takes float32[4]")


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (request(()), "has 0 input shardings and 1 output shardings"),
        (request(targets=()), "has 1 input shardings and 0 output shardings"),
        (request(sources=(sharding(WHOLE, 99),)), "99"),
        (request(sources=({"devices": {"device_ids": [0]}},)), "cannot be read"),
        (request(sources=(sharding(WHOLE, 0) | {"xla_hlo_sharding": "no base64"},)), "cannot be read"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(rig: Rig, payload: Any, text: str):
    check_refused(rig.ask("compile", payload), Code.INVALID_ARGUMENT, text)


@pytest.mark.parametrize(
    "sources",
    [
        (sharding(PARTS, 0),),  # the number of tiles equals the number of devices
        (sharding(WHOLE, 0, 0),),
        (sharding(PARTS, 0, 1), sharding(PARTS, 0, 1)),
        ({"devices": {"device_ids": [0, 1]}, "xla_hlo_sharding": base64.b64encode(b"\xff\xff").decode()},),
    ],
)
def test_a_sharding_that_fits_no_array_is_refused_when_the_arrays_are_there(rig: Rig, sources: Any):
    reply = rig.ask("compile", request(sources, (sharding(WHOLE, 2),) * len(sources)))
    if reply.WhichOneof("kind") is None:  # already registered
        return
    rig.make(1, SOURCE)
    response = rig.ask("execute", executable=reply.compile.executable, arguments=[1], results=[5])
    check_refused(response, Code.INVALID_ARGUMENT, "")
